"""The rows of `source.labels`: read, joined to objects by key, added to their samples."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

import numpy as np

from growcache.config import SamplingConfig
from growcache.config_source import LABEL_MATCHES, SourceConfig
from growcache.errors import ConfigError, GrowcacheError, SamplingError, TransientStoreError
from growcache.sampling.classes import NO_CLASS, Classes, class_numbers, decide_classes
from growcache.sampling.folder_labels import (
    IMAGE_LABEL,
    SHOWN_CLASSES,
    FolderLabels,
    JoinedLabels,
    TableAndFolderLabels,
    finds_folder_classes,
    refuse_other_classes,
)
from growcache.sampling.label_table import (
    BUDGET_PIECE_BYTES,
    NO_ROW,
    UNBOUNDED_BUDGET,
    IntColumn,
    KeyedTable,
    ReadBudget,
    read_table,
)
from growcache.sampling.messages import LabelValues
from growcache.sampling.sources import first_urls, make_each, name_source, source_of_url
from growcache.store.retries import RetryPolicy
from growcache.store.urls import LOCAL_SCHEMES, parse_url, redact
from growcache.usercode import short_key

RowKey: TypeAlias = Callable[[int, str], str]  # from a store and a key to the key of a row


class _TableLabels:
    """The rows of a table.

    A row whose cell is none of a column's classes belongs to no object.
    """

    def __init__(
        self, source: SourceConfig, table: KeyedTable, first_url: int, classes: Classes
    ) -> None:
        assert source.labels is not None
        self._config = source.labels
        self._table = table
        self._urls = source.url
        self._first_url = first_url
        self._ways = list(_row_keys(self._config.match, source.url))
        self._numbers = {
            name: class_numbers(table.column(name), classes[name], name)
            for name in self._config.columns
            if name in classes
        }
        self._classes = classes

    def rows(self, stores: Sequence[int], keys: Sequence[str]) -> IntColumn:
        rows = self._rows_of_table(stores, keys)
        for numbers in self._numbers.values():
            rows[(rows != NO_ROW) & (numbers[rows] == NO_CLASS)] = NO_ROW
        return rows

    def _rows_of_table(
        self, stores: Sequence[int], keys: Sequence[str], match: str | None = None
    ) -> IntColumn:
        rows = np.full(len(keys), NO_ROW, np.int64)
        for way in self._ways if match is None else _row_keys(match, self._urls):
            left = np.flatnonzero(rows == NO_ROW)
            if not len(left):
                break
            names = [way(stores[i] - self._first_url, keys[i]) for i in left.tolist()]
            rows[left] = self._table.find(names)
        return rows

    def values(self, row: int) -> LabelValues:
        return {
            name: int(self._numbers[name][row])
            if name in self._numbers
            else self._table.cell(name, row)
            for name in self._config.columns
        }

    def text(self, column: str, row: int) -> str:
        return str(self._table.cell(column, row))

    def complaint(self, missing: Sequence[tuple[int, str]], count: int, looked: int) -> str:
        stores, keys = [store for store, _ in missing], [key for _, key in missing]
        rows = self._rows_of_table(stores, keys)
        leave = "leave them out with source.on_missing: skip"
        if (rows != NO_ROW).all():
            return f"{self._without_class(rows, keys, count, looked)}or {leave}"
        names = ", ".join(map(short_key, keys))
        examples = ", ".join(map(repr, self._table.examples))
        return (
            f"source.labels: {count:,} of {looked:,} objects have no row in "
            f"{redact(self._config.url)}, whose column {self._config.key} has {examples}, …: "
            f"{names}. {self._advice(stores, keys)}or {leave}"
        )

    def _advice(self, stores: Sequence[int], keys: Sequence[str]) -> str:
        found = {
            match: int((self._rows_of_table(stores, keys, match) != NO_ROW).sum())
            for match in LABEL_MATCHES
        }
        best = max(found, key=lambda match: found[match])
        if not found[best]:
            return "Correct the table, or source.labels.match, "
        these = "all" if found[best] == len(keys) else f"{found[best]}"
        return (
            f"Set source.labels.match: {best}, which finds {these} of these, correct the "
            "table, "
        )

    def _without_class(
        self, rows: IntColumn, keys: Sequence[str], count: int, looked: int
    ) -> str:
        """Return the start of a message about objects whose cells are not classes."""
        odd = [
            (name, short_key(key), self.text(name, row))
            for key, row in zip(keys, rows.tolist(), strict=True)
            for name, numbers in self._numbers.items()
            if numbers[row] == NO_CLASS
        ]
        found = ", ".join(f"{cell!r} ({key})" for _, key, cell in odd)
        column = odd[0][0]
        known = ", ".join(self._classes[column][:SHOWN_CLASSES])
        return (
            f"source.labels.classes: {count:,} of {looked:,} objects have no class: in {column} "
            f"expected one of {known}, found {found}. Name what is missing, "
        )


class Labels:
    """The labels of the sources, joined to their objects.

    A row's number is the row in the table times the number of sources, plus the source. Objects
    of a source without a table have an empty row. If the folders of images are classes, call
    `add_folders` when these are known.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        tables: Sequence[KeyedTable | None],
    ) -> None:
        refuse_other_classes(sources)
        self._sources = sources
        self._firsts = first_urls(sources)
        classes = decide_classes(sources, tables)
        rows = zip(sources, tables, self._firsts, strict=True)
        self._labels: list[JoinedLabels | None] = [
            None if table is None else _TableLabels(source, table, first, classes)
            for source, table, first in rows
        ]
        self.classes: Classes = classes
        digests = ["" if table is None else table.digest for table in tables]
        self.digest = digests[0]
        if len(digests) > 1:
            self.digest = hashlib.blake2b(
                "\n".join(digests).encode(), digest_size=16
            ).hexdigest()

    def add_folders(self, folders: Sequence[str]) -> None:
        """Set the classes of the images whose folders are classes."""
        for number, source in enumerate(self._sources):
            if finds_folder_classes(source):
                found = FolderLabels(folders)
                table = self._labels[number]
                self._labels[number] = (
                    found if table is None else TableAndFolderLabels(table, found)
                )
        self.classes = {**self.classes, IMAGE_LABEL: tuple(folders)}

    def rows(self, stores: Sequence[int], keys: Sequence[str]) -> IntColumn:
        """Return the row of each object, or `NO_ROW` without one."""
        count, rows = len(self._labels), np.zeros(len(keys), np.int64)
        sources = np.searchsorted(self._firsts, np.asarray(stores), side="right") - 1
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            found = np.zeros(len(places), np.int64)
            if (labels := self._labels[source]) is not None:
                mine = places.tolist()
                found = labels.rows([stores[at] for at in mine], [keys[at] for at in mine])
            rows[places] = np.where(found == NO_ROW, NO_ROW, found * count + source)
        return rows

    def joined(self, stores: Sequence[int], keys: Sequence[str]) -> list[LabelValues]:
        rows = self.rows(stores, keys)
        if len(missing := np.flatnonzero(rows == NO_ROW)):
            first = int(missing[0])
            message = self.complaint([(stores[first], keys[first])], len(missing), len(keys))
            raise ConfigError(message, code="GC112")
        return [self._values(row) for row in rows.tolist()]

    def _values(self, row: int) -> LabelValues:
        at, source = divmod(row, len(self._labels))
        labels = self._labels[source]
        return {} if labels is None else labels.values(at)

    def texts(self, column: str, rows: IntColumn) -> list[str]:
        """Return a column as texts, by which objects are grouped, with "" for objects without a row."""
        count, texts = len(self._labels), []
        for row in rows.tolist():
            labels = None if row == NO_ROW else self._labels[row % count]
            texts.append("" if labels is None else labels.text(column, row // count))
        return texts

    def complaint(self, missing: Sequence[tuple[int, str]], count: int, looked: int) -> str:
        """Return a message about objects without a row.

        With several sources it is about the first such.
        """
        source = source_of_url(self._firsts, missing[0][0])
        labels = self._labels[source]
        assert labels is not None
        own = [one for one in missing if source_of_url(self._firsts, one[0]) == source]
        return name_source(labels.complaint(own, count, looked), source, len(self._labels))


def _row_keys(match: str, urls: Sequence[str]) -> Iterator[RowKey]:
    """Yield the ways to make a table's key from an object. The first match counts."""
    if match == "name":
        yield lambda _, key: key.rpartition("/")[2]
    elif match == "stem":
        yield lambda _, key: _stem(key.rpartition("/")[2])
    elif match != "exact":
        pattern = re.compile(match)
        yield lambda _, key: found["key"] or "" if (found := pattern.search(key)) else ""
    else:
        yield lambda _, key: key
        by_store = [_spellings(url) for url in urls]
        for way in range(len(by_store[0])):
            yield _respelled([spellings[way] for spellings in by_store])


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _spellings(url: str) -> list[tuple[str, str]]:
    """Return other spellings of a store's keys: a prefix to remove, and its replacement."""
    location = parse_url(url)
    prefix = location.prefix
    if location.scheme not in LOCAL_SCHEMES:
        return [(prefix, ""), ("", location.root)]
    typed = url.removesuffix(location.pattern.removeprefix(prefix))
    return [(prefix, ""), (prefix, typed)]


def _respelled(spellings: Sequence[tuple[str, str]]) -> RowKey:
    def spelled(store: int, key: str) -> str:
        cut, put = spellings[store]
        return put + key.removeprefix(cut) if key.startswith(cut) else ""

    return spelled


def read_labels(
    sources: Sequence[SourceConfig],
    timeout_seconds: float,
    budget: ReadBudget = UNBOUNDED_BUDGET,
) -> Labels:
    """Read the tables of all sources. Blocks."""

    def read(source: SourceConfig) -> KeyedTable | None:
        if (wanted := source.labels) is None:
            return None
        table = (wanted.url, wanted.key, wanted.columns)
        return read_table(*table, source, timeout_seconds, budget)

    return Labels(sources, make_each(sources, read))


ATTEMPT_SECONDS = 10.0  # of reading a table, before a retry is reported; attempts continue

T = TypeVar("T")


class LabelsReader:
    """Reads tables of labels in its own thread, while the sources are being listed."""

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        sampling: SamplingConfig,
        book: Callable[[object, int, Callable[[bool], None]], None],
        on_end: Callable[[Labels | GrowcacheError], None],
        on_retry: Callable[[BaseException], None],
        retries_forever: Callable[[TransientStoreError], bool],
    ) -> None:
        self.sources = sources
        self._timeout_seconds = sampling.timeout_seconds
        paced = None if sampling.max_bytes_per_second is None else BUDGET_PIECE_BYTES
        self._budget = ReadBudget(sampling.max_egress, paced, self._booked)
        self._book = book
        self._on_end = on_end
        self._on_retry = on_retry
        self._retries_forever = retries_forever
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="labels", daemon=True).start()

    async def _booked(self, nbytes: int) -> None:
        """Wait until the supervisor's thread allows a piece to be read."""
        answer: Future[bool] = Future()
        self._call_soon(lambda size: self._book(self, size, answer.set_result), nbytes)
        if not await asyncio.wrap_future(answer):
            raise ConfigError(
                "reading all of it takes more than sampling.max_egress; raise that",
                code="GC112",
            )

    def _call_soon(self, callback: Callable[[T], None], value: T) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)

    def _run(self) -> None:
        retries = RetryPolicy(self._timeout_seconds, self._retried, self._retries_forever)
        try:
            found: Labels | GrowcacheError = retries.run(self._read)
        except GrowcacheError as error:
            found = error
        except Exception as error:  # noqa: BLE001 - a client may raise anything
            found = SamplingError(
                f"source.labels: {type(error).__name__}: {error}", code="GC112"
            )
        self._call_soon(self._on_end, found)

    def _read(self) -> Labels:
        """Read with the current sources, because their options may have changed."""
        timeout_seconds = min(self._timeout_seconds, ATTEMPT_SECONDS)
        return read_labels(self.sources, timeout_seconds, self._budget)

    def _retried(self, error: BaseException) -> None:
        self._call_soon(self._on_retry, error)
