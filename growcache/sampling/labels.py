"""The rows of `source.labels`: read, joined to objects by key, added to their samples."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from growcache.config import LABEL_MATCHES, LabelsConfig, SamplingConfig, SourceConfig
from growcache.errors import ConfigError, GrowcacheError, SamplingError, TransientStoreError
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
from growcache.sampling.orders import Ints
from growcache.sampling.sampler_limits import ByteRateLimit
from growcache.sampling.sources import first_urls, make_each, name_source, source_of_url
from growcache.store.retries import RetryPolicy
from growcache.store.urls import LOCAL_SCHEMES, parse_url, redact
from growcache.usercode import short_key

RowKey: TypeAlias = Callable[
    [int, str], str
]  # from a store and a key to what a row is asked by


class Labels:
    """A table, joined to the objects of a source."""

    def __init__(self, source: SourceConfig, table: KeyedTable) -> None:
        assert source.labels is not None
        self._labels: LabelsConfig = source.labels
        self._urls = source.url
        self._table = table
        self._ways = list(_row_keys(self._labels.match, source.url))
        self.digest = table.digest

    def rows(self, stores: Sequence[int], keys: Sequence[str]) -> IntColumn:
        """Return the row of each object, `NO_ROW` where none belongs to it."""
        return self._found(self._ways, stores, keys)

    def joined(self, stores: Sequence[int], keys: Sequence[str]) -> list[LabelValues]:
        """Return what the samples of each object get.

        Raises:
            ConfigError: one has no row.
        """
        rows = self.rows(stores, keys)
        if len(missing := np.flatnonzero(rows == NO_ROW)):
            first = int(missing[0])
            told = self.complaint([(stores[first], keys[first])], len(missing), len(keys))
            raise ConfigError(told)
        names = self._labels.columns
        return [{name: self._table.cell(name, row) for name in names} for row in rows.tolist()]

    def texts(self, column: str, rows: IntColumn) -> list[str]:
        """Return the cells of a column as texts, by which objects are grouped; "" for no row."""
        cell = self._table.cell
        return ["" if row == NO_ROW else str(cell(column, row)) for row in rows.tolist()]

    def complaint(self, missing: Sequence[tuple[int, str]], count: int, looked: int) -> str:
        """Say that objects have no row."""
        names = ", ".join(short_key(key) for _, key in missing)
        examples = ", ".join(map(repr, self._table.examples))
        return (
            f"source.labels: {count:,} of {looked:,} objects have no row in "
            f"{redact(self._labels.url)}, whose column {self._labels.key} has {examples}, …: "
            f"{names}. {self._advice(missing)}or leave them out with source.on_missing: skip"
        )

    def _advice(self, missing: Sequence[tuple[int, str]]) -> str:
        stores, keys = [store for store, _ in missing], [key for _, key in missing]
        found = {
            match: int(
                (self._found(_row_keys(match, self._urls), stores, keys) != NO_ROW).sum()
            )
            for match in LABEL_MATCHES
        }
        best = max(found, key=lambda match: found[match])
        if not found[best]:
            return "Mend the table, or source.labels.match, "
        these = "all" if found[best] == len(keys) else f"{found[best]}"
        return (
            f"Set source.labels.match: {best}, which finds {these} of these, mend the table, "
        )

    def _found(
        self,
        ways: Sequence[RowKey] | Iterator[RowKey],
        stores: Sequence[int],
        keys: Sequence[str],
    ) -> IntColumn:
        rows = np.full(len(keys), NO_ROW, np.int64)
        for way in ways:
            left = np.flatnonzero(rows == NO_ROW)
            if not len(left):
                break
            rows[left] = self._table.find([way(stores[i], keys[i]) for i in left.tolist()])
        return rows


def _row_keys(match: str, urls: Sequence[str]) -> Iterator[RowKey]:
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
    source: SourceConfig, timeout_seconds: float, budget: ReadBudget = UNBOUNDED_BUDGET
) -> Labels:
    """Return the labels of a source. Blocks.

    Raises:
        ConfigError: the table cannot be used; says why.
        StoreError: it cannot be read.
    """
    wanted = source.labels
    assert wanted is not None
    table = read_table(wanted.url, wanted.key, wanted.columns, source, timeout_seconds, budget)
    return Labels(source, table)


ATTEMPT_SECONDS = 10.0  # at a table, before that is told; attempts go on

AnyLabels: TypeAlias = "Labels | SourcesLabels"
T = TypeVar("T")


class SourcesLabels:
    """As `Labels`, of sources of which each has a table of its own, or none.

    A row's number says whose it is, too: it is the row in the table times the number of
    sources, plus the source.
    """

    def __init__(
        self, sources: Sequence[SourceConfig], labels: Sequence[Labels | None]
    ) -> None:
        self._firsts = first_urls(sources)
        self._labels = labels
        texts = "\n".join(one.digest if one is not None else "" for one in labels)
        self.digest = hashlib.blake2b(texts.encode(), digest_size=16).hexdigest()

    def rows(self, stores: Sequence[int], keys: Sequence[str]) -> Ints:
        """See `Labels.rows`; where a source has no labels, objects have a row of nothing."""
        rows = np.zeros(len(keys), np.int64)
        for source, places in self._by_source(stores):
            found = np.zeros(len(places), np.int64)
            if (labels := self._labels[source]) is not None:
                found = labels.rows(*self._own(source, places, stores, keys))
            rows[places] = np.where(found == NO_ROW, NO_ROW, found * len(self._labels) + source)
        return rows

    def joined(self, stores: Sequence[int], keys: Sequence[str]) -> list[LabelValues]:
        """See `Labels.joined`."""
        joined: list[LabelValues] = [{} for _ in keys]
        for source, places in self._by_source(stores):
            if (labels := self._labels[source]) is not None:
                found = labels.joined(*self._own(source, places, stores, keys))
                for place, values in zip(places.tolist(), found, strict=True):
                    joined[place] = values
        return joined

    def texts(self, column: str, rows: Ints) -> list[str]:
        """See `Labels.texts`."""
        texts = [""] * len(rows)
        for source, labels in enumerate(self._labels):
            mine = np.flatnonzero((rows != NO_ROW) & (rows % len(self._labels) == source))
            if labels is not None and len(mine):
                found = labels.texts(column, rows[mine] // len(self._labels))
                for place, text in zip(mine.tolist(), found, strict=True):
                    texts[place] = text
        return texts

    def complaint(self, missing: Sequence[tuple[int, str]], count: int, looked: int) -> str:
        """See `Labels.complaint`; it is about the first source that lacks some."""
        source = source_of_url(self._firsts, missing[0][0])
        labels, first = self._labels[source], self._firsts[source]
        assert labels is not None
        own = [
            (n - first, key) for n, key in missing if source_of_url(self._firsts, n) == source
        ]
        said = labels.complaint(own, count, looked)
        return name_source(said, source, len(self._labels))

    def _by_source(self, stores: Sequence[int]) -> list[tuple[int, Ints]]:
        found = np.searchsorted(self._firsts, np.asarray(stores), side="right") - 1
        return [(int(source), np.flatnonzero(found == source)) for source in np.unique(found)]

    def _own(
        self, source: int, places: Ints, stores: Sequence[int], keys: Sequence[str]
    ) -> tuple[list[int], list[str]]:
        first, mine = self._firsts[source], places.tolist()
        return [stores[place] - first for place in mine], [keys[place] for place in mine]


def read_labels_of_all(
    sources: Sequence[SourceConfig],
    timeout_seconds: float,
    budget: ReadBudget = UNBOUNDED_BUDGET,
) -> AnyLabels:
    """Return the labels of all sources. Blocks.

    Raises:
        ConfigError: a table cannot be used; says why.
        StoreError: it cannot be read.
    """

    def read(source: SourceConfig) -> Labels | None:
        if source.labels is None:
            return None
        return read_labels(source, timeout_seconds, budget)

    found = make_each(sources, read)
    only = found[0]
    return only if len(found) == 1 and only is not None else SourcesLabels(sources, found)


class LabelsReader:
    """Reads tables of labels in a thread of its own, while the sources are being listed.

    Args:
        sources: of which one at least has ``labels``.
        on_bytes: told how many bytes were read, on the event loop.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        sampling: SamplingConfig,
        on_bytes: Callable[[int], None],
        on_end: Callable[[AnyLabels | GrowcacheError], None],
        on_retry: Callable[[BaseException], None],
        endless: Callable[[TransientStoreError], bool],
    ) -> None:
        self.sources = sources
        self._timeout_seconds = sampling.timeout_seconds
        self._pace = ByteRateLimit(sampling.max_bytes_per_second)
        paced = None if sampling.max_bytes_per_second is None else BUDGET_PIECE_BYTES
        self._budget = ReadBudget(sampling.max_egress, paced, self._spent)
        self._on_bytes = on_bytes
        self._on_end = on_end
        self._on_retry = on_retry
        self._endless = endless
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="labels", daemon=True).start()

    async def _spent(self, nbytes: int) -> None:
        self._tell(self._on_bytes, nbytes)
        self._pace.charge(nbytes)
        await self._pace.wait()

    def _tell(self, whom: Callable[[T], None], what: T) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(whom, what)

    def _run(self) -> None:
        patience = RetryPolicy(self._timeout_seconds, self._retried, self._endless)
        try:
            found: AnyLabels | GrowcacheError = patience.run(self._read)
        except GrowcacheError as error:
            found = error
        except Exception as error:  # noqa: BLE001 - a client may raise anything; all is told
            found = SamplingError(f"source.labels: {type(error).__name__}: {error}")
        self._tell(self._on_end, found)

    def _read(self) -> AnyLabels:
        """Read them with what the sources are by now, their options may have changed."""
        timeout_seconds = min(self._timeout_seconds, ATTEMPT_SECONDS)
        return read_labels_of_all(self.sources, timeout_seconds, self._budget)

    def _retried(self, error: BaseException) -> None:
        self._tell(self._on_retry, error)
