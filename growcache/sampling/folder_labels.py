"""Image folders as classes, found in the listing, and labels of any kind joined to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Protocol

import numpy as np

from growcache.config_source import AUTO, SourceConfig
from growcache.errors import ConfigError
from growcache.sampling.classes import Classes, sorted_classes
from growcache.sampling.label_table import NO_ROW, IntColumn
from growcache.sampling.messages import LabelValues
from growcache.sampling.sources import first_urls, name_source
from growcache.store.catalog import Catalog
from growcache.usercode import short_key

IMAGE_LABEL = "label"  # the field of format image
SHOWN_CLASSES = 10  # in a message


class JoinedLabels(Protocol):
    """The labels of one source."""

    def rows(self, stores: Sequence[int], keys: Sequence[str], /) -> IntColumn: ...

    def values(self, row: int, /) -> LabelValues: ...

    def text(self, column: str, row: int, /) -> str: ...

    def complaint(
        self, missing: Sequence[tuple[int, str]], count: int, looked: int, /
    ) -> str: ...


def folder_of(key: str) -> str:
    """Return the name of an object's folder.

    >>> folder_of("train/cat/1.jpg"), folder_of("1.jpg")
    ('cat', '')
    """
    return key.rpartition("/")[0].rpartition("/")[2]


class FolderLabels:
    """The labels of images whose classes are the folders of the listing. A row is a class."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._numbers = {name: number for number, name in enumerate(names)}

    def rows(self, _: Sequence[int], keys: Sequence[str]) -> IntColumn:
        found = (self._numbers.get(folder_of(key), NO_ROW) for key in keys)
        return np.fromiter(found, np.int64, len(keys))

    def values(self, row: int) -> LabelValues:
        return {IMAGE_LABEL: row}

    def __len__(self) -> int:
        return len(self._names)

    def text(self, _: str, row: int) -> str:
        return self._names[row]

    def complaint(self, missing: Sequence[tuple[int, str]], count: int, looked: int) -> str:
        names = ", ".join(short_key(key) for _, key in missing)
        known = ", ".join(self._names[:SHOWN_CLASSES])
        return (
            f"source.options.classes: {count:,} of {looked:,} objects are in a folder that is "
            f"not one of the classes of this cache ({known}): {names}. Start another cache, or "
            "leave them out with source.on_missing: skip"
        )


class TableAndFolderLabels:
    """Both kinds of labels of a source.

    A row is the table's row times the classes, plus the class.
    """

    def __init__(self, table: JoinedLabels, folders: FolderLabels) -> None:
        self._table = table
        self._folders = folders

    def rows(self, stores: Sequence[int], keys: Sequence[str]) -> IntColumn:
        of_table, of_folders = self._table.rows(stores, keys), self._folders.rows(stores, keys)
        lacks = (of_table == NO_ROW) | (of_folders == NO_ROW)
        rows: IntColumn = np.where(lacks, NO_ROW, of_table * len(self._folders) + of_folders)
        return rows

    def values(self, row: int) -> LabelValues:
        table, folder = divmod(row, len(self._folders))
        return {**self._table.values(table), **self._folders.values(folder)}

    def text(self, column: str, row: int) -> str:
        return self._table.text(column, row // len(self._folders))

    def complaint(self, missing: Sequence[tuple[int, str]], count: int, looked: int) -> str:
        lacks = self._folders.rows([store for store, _ in missing], [key for _, key in missing])
        of = self._table if lacks[0] != NO_ROW else self._folders
        return of.complaint(missing, count, looked)


def finds_folder_classes(source: SourceConfig) -> bool:
    """Whether the folders of all listed images are the classes."""
    is_image = source.format == "image" and not source.fields
    return is_image and source.options.get("classes") == AUTO


def refuse_other_classes(sources: Sequence[SourceConfig]) -> None:
    """Raise ConfigError if one source finds its label in folders, and another does not."""
    finding = [finds_folder_classes(source) for source in sources]
    if not any(finding):
        return
    for number, (source, finds) in enumerate(zip(sources, finding, strict=True)):
        said = ""
        if source.labels is not None and IMAGE_LABEL in source.labels.columns:
            said = (
                f"source.labels.columns: {IMAGE_LABEL!r} is the folder's class, by "
                "source.options.classes: auto; rename the table's column"
            )
        elif not finds and source.format == "image" and source.options.get("classes"):
            said = (
                "source.options.classes: expected auto, as another source has it, or the same list "
                "in all; a label must not mean one class here and another there"
            )
        if said:
            raise ConfigError(name_source(said, number, len(sources)), code="GC112")


def named_folder_classes(sources: Sequence[SourceConfig]) -> Classes:
    """Return the classes that all sources name in the options of format image."""
    lists = {
        tuple(map(str, source.options.get("classes") or ()))
        for source in sources
        if source.format == "image" and not source.fields and not finds_folder_classes(source)
    }
    return {IMAGE_LABEL: names} if len(lists) == 1 and (names := lists.pop()) else {}


def listed_folders(catalog: Catalog, sources: Sequence[SourceConfig]) -> tuple[str, ...]:
    """Return the classes of the whole listing."""
    firsts, found = first_urls(sources), set[str]()
    finds = np.array([finds_folder_classes(source) for source in sources])
    for stores, keys in catalog.stores_and_keys(0, len(catalog)):
        mine = finds[np.searchsorted(firsts, np.asarray(stores), side="right") - 1]
        found |= set(map(folder_of, compress(keys, mine.tolist())))
    return sorted_classes(found - {""}, "the folder of the images")
