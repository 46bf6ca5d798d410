"""The rows of `source.labels` that belong to objects, and what samples get of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from growcache.config import MATCHES, LabelsConfig, SourceConfig
from growcache.errors import ConfigError
from growcache.remote.table_files import UNBOUNDED, Budget, read_table
from growcache.remote.tables import NONE, Ints, Table
from growcache.remote.urls import LOCAL, parse_url, redact
from growcache.sampling.messages import Joined
from growcache.usercode import short

Way: TypeAlias = Callable[[int, str], str]  # from a store and a key to what a row is asked by


class Labels:
    """A table, joined to the objects of a source.

    Args:
        source: of the objects, with ``labels``.
        table: that was read for it.

    Attributes:
        digest: of what the table holds.
    """

    def __init__(self, source: SourceConfig, table: Table) -> None:
        assert source.labels is not None
        self._labels: LabelsConfig = source.labels
        self._urls = source.url
        self._table = table
        self._ways = list(_ways(self._labels.match, source.url))
        self.digest = table.digest

    def rows(self, stores: Sequence[int], keys: Sequence[str]) -> Ints:
        """Return the row of each object, `NONE` where none belongs to it."""
        return self._found(self._ways, stores, keys)

    def joined(self, stores: Sequence[int], keys: Sequence[str]) -> list[Joined]:
        """Return what the samples of each object get.

        Raises:
            ConfigError: one has no row.
        """
        rows = self.rows(stores, keys)
        if len(missing := np.flatnonzero(rows == NONE)):
            first = int(missing[0])
            told = self.complaint([(stores[first], keys[first])], len(missing), len(keys))
            raise ConfigError(told)
        names = self._labels.columns
        return [{name: self._table.cell(name, row) for name in names} for row in rows.tolist()]

    def texts(self, column: str, rows: Ints) -> list[str]:
        """Return the cells of a column as texts, by which objects are grouped; "" for no row."""
        cell = self._table.cell
        return ["" if row == NONE else str(cell(column, row)) for row in rows.tolist()]

    def complaint(self, missing: Sequence[tuple[int, str]], count: int, looked: int) -> str:
        """Say that objects have no row.

        Args:
            missing: the first of them: store and key.
            count: all of them.
            looked: objects that were looked at.
        """
        names = ", ".join(short(key) for _, key in missing)
        examples = ", ".join(map(repr, self._table.examples))
        return (
            f"source.labels: {count:,} of {looked:,} objects have no row in "
            f"{redact(self._labels.url)}, whose column {self._labels.key} has {examples}, …: "
            f"{names}. {self._advice(missing)}or leave them out with source.on_missing: skip"
        )

    def _advice(self, missing: Sequence[tuple[int, str]]) -> str:
        stores, keys = [store for store, _ in missing], [key for _, key in missing]
        found = {
            match: int((self._found(_ways(match, self._urls), stores, keys) != NONE).sum())
            for match in MATCHES
        }
        best = max(found, key=lambda match: found[match])
        if not found[best]:
            return "Mend the table, or source.labels.match, "
        these = "all" if found[best] == len(keys) else f"{found[best]}"
        return (
            f"Set source.labels.match: {best}, which finds {these} of these, mend the table, "
        )

    def _found(
        self, ways: Sequence[Way] | Iterator[Way], stores: Sequence[int], keys: Sequence[str]
    ) -> Ints:
        rows = np.full(len(keys), NONE, np.int64)
        for way in ways:
            left = np.flatnonzero(rows == NONE)
            if not len(left):
                break
            rows[left] = self._table.find([way(stores[i], keys[i]) for i in left.tolist()])
        return rows


def _ways(match: str, urls: Sequence[str]) -> Iterator[Way]:
    """Yield what of an object a table's key may be, the first that is counts."""
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
    """Return how else keys may be spelled: what is cut off, and what is put there."""
    location = parse_url(url)
    prefix = location.prefix
    if location.scheme not in LOCAL:
        return [(prefix, ""), ("", location.root)]
    typed = url.removesuffix(location.pattern.removeprefix(prefix))
    return [(prefix, ""), (prefix, typed)]


def _respelled(spellings: Sequence[tuple[str, str]]) -> Way:
    def spelled(store: int, key: str) -> str:
        cut, put = spellings[store]
        return put + key.removeprefix(cut) if key.startswith(cut) else ""

    return spelled


def read_labels(
    source: SourceConfig, timeout_seconds: float, budget: Budget = UNBOUNDED
) -> Labels:
    """Return the labels of a source. Blocks.

    Args:
        source: with ``labels``.
        timeout_seconds: without progress for so long it is given up.
        budget: of what is read.

    Raises:
        ConfigError: the table cannot be used; says why.
        StoreError: it cannot be read.
    """
    wanted = source.labels
    assert wanted is not None
    table = read_table(wanted.url, wanted.key, wanted.columns, source, timeout_seconds, budget)
    return Labels(source, table)
