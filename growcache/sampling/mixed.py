"""What several sources have of their own, as one: their labels, and objects of several fields."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeAlias, TypeVar

import numpy as np

from growcache.config import SamplingConfig, SourceConfig
from growcache.errors import GrowcacheError, SamplingError, TransientStoreError
from growcache.remote.retry import Patience
from growcache.remote.sources import each, firsts, numbered, owner
from growcache.remote.table_files import PIECE, UNBOUNDED, Budget
from growcache.remote.tables import NONE
from growcache.sampling.draws import Ints
from growcache.sampling.labels import Labels, read_labels
from growcache.sampling.messages import Joined
from growcache.sampling.pace import Pace
from growcache.sampling.pairs import Complete, Pairs

ATTEMPT_SECONDS = 10.0  # at a table, before that is told; attempts go on

AnyLabels: TypeAlias = "Labels | MixedLabels"
T = TypeVar("T")
AnyPairs: TypeAlias = "Pairs | MixedPairs"


class MixedLabels:
    """As `Labels`, of sources of which each has a table of its own, or none.

    A row's number says whose it is, too: it is the row in the table times the number of
    sources, plus the source.

    Args:
        sources: in their order.
        labels: of each.
    """

    def __init__(
        self, sources: Sequence[SourceConfig], labels: Sequence[Labels | None]
    ) -> None:
        self._firsts = firsts(sources)
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
            rows[places] = np.where(found == NONE, NONE, found * len(self._labels) + source)
        return rows

    def joined(self, stores: Sequence[int], keys: Sequence[str]) -> list[Joined]:
        """See `Labels.joined`."""
        joined: list[Joined] = [{} for _ in keys]
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
            mine = np.flatnonzero((rows != NONE) & (rows % len(self._labels) == source))
            if labels is not None and len(mine):
                found = labels.texts(column, rows[mine] // len(self._labels))
                for place, text in zip(mine.tolist(), found, strict=True):
                    texts[place] = text
        return texts

    def complaint(self, missing: Sequence[tuple[int, str]], count: int, looked: int) -> str:
        """See `Labels.complaint`; it is about the first source that lacks some."""
        source = owner(self._firsts, missing[0][0])
        labels, first = self._labels[source], self._firsts[source]
        assert labels is not None
        own = [(n - first, key) for n, key in missing if owner(self._firsts, n) == source]
        said = labels.complaint(own, count, looked)
        return numbered(said, source, len(self._labels))

    def _by_source(self, stores: Sequence[int]) -> list[tuple[int, Ints]]:
        found = np.searchsorted(self._firsts, np.asarray(stores), side="right") - 1
        return [(int(source), np.flatnonzero(found == source)) for source in np.unique(found)]

    def _own(
        self, source: int, places: Ints, stores: Sequence[int], keys: Sequence[str]
    ) -> tuple[list[int], list[str]]:
        first, mine = self._firsts[source], places.tolist()
        return [stores[place] - first for place in mine], [keys[place] for place in mine]


class MixedPairs:
    """As `Pairs`, of sources of which some have fields; other entries are whole by themselves.

    Args:
        sources: in their order.

    Attributes:
        width: members of the objects that have the most.
    """

    def __init__(self, sources: Sequence[SourceConfig]) -> None:
        self._firsts = firsts(sources)
        self._pairs = [Pairs(one.fields) if one.fields else None for one in sources]
        self.width = max(max(1, len(one.fields)) for one in sources)

    @property
    def unmatched(self) -> int:
        """Listed members that lack a partner."""
        return sum(one.unmatched for one in self._pairs if one is not None)

    def take(self, first: int, stores: Sequence[int], keys: Sequence[str]) -> Complete:
        """See `Pairs.take`; where an object has fewer members than others, -1 follows them."""
        rows: list[tuple[list[int], int, str]] = []
        for ordinal, (store, key) in enumerate(zip(stores, keys, strict=True), first):
            source = owner(self._firsts, store)
            pairs, base = self._pairs[source], self._firsts[source]
            if pairs is None:
                rows.append(([ordinal], store, key))
                continue
            whole = pairs.take(ordinal, [store - base], [key])
            members = whole.members.tolist()
            rows += [(some, base, name) for some, name in zip(members, whole.keys, strict=True)]
        padded = [some + [-1] * (self.width - len(some)) for some, _, _ in rows]
        members_of_all = np.array(padded, np.int64).reshape(-1, self.width)
        return Complete(
            members_of_all, list(map(itemgetter(2), rows)), list(map(itemgetter(1), rows))
        )

    def complaint(self, shown: int) -> str:
        """See `Pairs.complaint`; it is about the first source that lacks some."""
        for number, pairs in enumerate(self._pairs):
            if pairs is not None and pairs.unmatched:
                return numbered(pairs.complaint(shown), number, len(self._pairs))
        return ""


def pairs_of(sources: Sequence[SourceConfig]) -> AnyPairs | None:
    """Return what makes objects of members; None where each entry is one."""
    if not any(source.fields for source in sources):
        return None
    return Pairs(sources[0].fields) if len(sources) == 1 else MixedPairs(sources)


def read_all_labels(
    sources: Sequence[SourceConfig], timeout_seconds: float, budget: Budget = UNBOUNDED
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

    found = each(sources, read)
    only = found[0]
    return only if len(found) == 1 and only is not None else MixedLabels(sources, found)


class Reading:
    """Reads tables of labels in a thread of its own, while the sources are being listed.

    Args:
        sources: of which one at least has ``labels``.
        sampling: what may be read at all, and how fast.
        on_bytes: told how many bytes were read, on the event loop.
        on_end: told the labels, or why there are none, on the event loop.
        on_retry: told there why an attempt failed; another one follows.
        endless: tells whether one does.
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
        self._pace = Pace(sampling.max_bytes_per_second)
        paced = None if sampling.max_bytes_per_second is None else PIECE
        self._budget = Budget(sampling.max_egress, paced, self._spent)
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
        patience = Patience(self._timeout_seconds, self._retried, self._endless)
        try:
            found: AnyLabels | GrowcacheError = patience.call(self._read)
        except GrowcacheError as error:
            found = error
        except Exception as error:  # noqa: BLE001 - a client may raise anything; all is told
            found = SamplingError(f"source.labels: {type(error).__name__}: {error}")
        self._tell(self._on_end, found)

    def _read(self) -> AnyLabels:
        """Read them with what the sources are by now, their options may have changed."""
        timeout_seconds = min(self._timeout_seconds, ATTEMPT_SECONDS)
        return read_all_labels(self.sources, timeout_seconds, self._budget)

    def _retried(self, error: BaseException) -> None:
        self._tell(self._on_retry, error)
