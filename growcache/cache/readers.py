"""Who reads the cache: which shards are protected, and who used what how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from growcache.cache.eviction import Candidate
from growcache.cache.files import Layout, allocated
from growcache.cache.foreign_leases import ForeignLease
from growcache.cache.index import KEPT_JOBS, StockRow
from growcache.cache.leases import LeaseView, lease_path, protected, survey_leases
from growcache.cache.room import Room
from growcache.cache.stock import Stock

Uses = dict[str, dict[int, int]]  # job → shard → how often
_PerShard = Callable[[int], int]

# Leases of this job protect what they hold, but its uses are not asked for: somebody who
# only looks (check, peek) must not hold eviction back until everything was looked at.
NO_JOB = ""


KEPT_SHARE = 5  # what dead readers keep is at most one part of so many of the bound


class _Survey(NamedTuple):
    """What the leases say of all shards together.

    Attributes:
        held: shards that must not be deleted.
        kept: of these, those that readers who died hold, in case they come back.
        reads: how often unfinished leases read a shard.
        least: tells `Candidate.min_job_uses`.
    """

    held: frozenset[int]
    kept: frozenset[int]
    reads: Counter[int]
    least: _PerShard


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept for a reader that died, in case it comes back.

    Attributes:
        lease: of the reader.
        shards: that are kept.
        seconds: for which they are kept yet.
    """

    lease: LeaseView
    shards: tuple[int, ...]
    seconds: float


class Readers:
    """The leases as they were last read, and the uses of finished ones.

    Attributes:
        leases: those that are not finished.
        foreign: what lies there and cannot be read.
        uses: of finished leases, per job.
        version: another whenever what `candidates` says of a shard may be different.
    """

    def __init__(
        self, layout: Layout, resume_seconds: float, uses: Uses, stock: Stock, room: Room
    ) -> None:
        self.leases: list[LeaseView] = []
        self.foreign: list[ForeignLease] = []
        self.uses = uses
        self.version = 0
        self._known: _Survey | None = None
        self._layout = layout
        self._resume_seconds = resume_seconds
        self._stock = stock
        self._room = room
        self._dead_since: dict[str, float] = {}
        self._there: dict[Path, frozenset[int]] = {}  # when a foreign lease was first seen
        self._kept: dict[str, tuple[int, ...]] = {}  # by the lease of a dead reader
        self._kept_below = 0
        self._now = 0.0

    def refresh(self, now: float | None = None) -> list[LeaseView]:
        """Read the leases anew; return those that are finished and still have a file.

        Args:
            now: monotonic seconds; as at the last call if None.
        """
        self._now = self._now if now is None else now
        views, foreign = survey_leases(self._layout.root)
        dead = {view.name for view in views if not view.open and not view.closed}
        self._dead_since = {
            name: since for name, since in self._dead_since.items() if name in dead
        }
        for name in dead:
            self._dead_since.setdefault(name, self._now)
        finished = [view for view in views if self._finished(view)]
        over = {view.name for view in finished}
        unfinished = [view for view in views if view.name not in over]
        self._heed(foreign)
        kept_below = self._room.max_bytes // KEPT_SHARE
        if unfinished != self.leases or kept_below != self._kept_below:
            self._kept_below = kept_below
            self.leases = unfinished
            self._changed()
        return finished

    def _heed(self, foreign: list[ForeignLease]) -> None:
        """Have what cannot be read protect all that is there when it is first seen."""
        protecting = {lease.path for lease in foreign if lease.protects}
        if protecting != self._there.keys():
            there = frozenset((*self._stock.live, *self._stock.retired))
            self._there = {path: self._there.get(path, there) for path in protecting}
            self._changed()
        self.foreign = foreign

    def _changed(self) -> None:
        self.version += 1
        self._known = None

    def _finished(self, lease: LeaseView) -> bool:
        if lease.open:
            return False
        if not lease.resumable or self._kept.get(lease.name) == ():
            return True  # nothing is kept for it: others had the room
        since = self._dead_since.get(lease.name, self._now)
        return self._now - since >= self._resume_seconds

    @property
    def held(self) -> frozenset[int]:
        """The shards that must not be deleted, as of the last refresh."""
        return self._survey().held

    @property
    def kept(self) -> frozenset[int]:
        """The shards that readers who died hold, also where others do: none lets them go."""
        return self._survey().kept

    def kept_for(self) -> list[Kept]:
        """Return what is kept for which reader that died; it may be nothing."""
        self._survey()
        return [
            Kept(lease, self._kept[lease.name], max(0.0, self._seconds_left(lease)))
            for lease in self.leases
            if not lease.open
        ]

    def _seconds_left(self, lease: LeaseView) -> float:
        return self._dead_since.get(lease.name, self._now) + self._resume_seconds - self._now

    def count(self, finished: Iterable[LeaseView], there: Container[int]) -> list[int]:
        """Add the uses of finished leases; return every shard once per use.

        Args:
            finished: the leases.
            there: the shards whose files lie in the cache; uses of others are of no use.
        """
        used = []
        for lease in finished:
            mine = self.uses[lease.job] = self.uses.pop(lease.job, {})  # it is last now
            for number in filter(there.__contains__, lease.used()):
                mine[number] = mine.get(number, 0) + 1
                used.append(number)
        for job in list(self.uses)[:-KEPT_JOBS]:  # as the index forgets them
            del self.uses[job]
        self._changed()
        return used

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget the uses of shards that are gone."""
        for mine in self.uses.values():
            for number in numbers:
                mine.pop(number, None)

    def candidates(self, rows: Iterable[StockRow]) -> list[Candidate]:
        """Return the shards as the eviction policies see them."""
        held, _, reads, least = self._survey()
        return [
            Candidate(
                number=(number := row.number),
                seq=row.seq,
                allocated=row.allocated,
                uses=row.uses + reads.get(number, 0),
                min_job_uses=least(number),
                leased=number in held,
            )
            for row in rows
        ]

    def _survey(self) -> _Survey:
        if self._known is None:
            counts = self._counts()
            reads: Counter[int] = Counter()
            for of_job in counts.values():
                reads.update(of_job)
            # Who died reads nothing any more: nobody waits for that.
            live = {lease.job for lease in self.leases if lease.open and lease.job != NO_JOB}
            kept = self._keep()
            held = kept | self._protected(lease for lease in self.leases if lease.open)
            held = held.union(*self._there.values())
            least = self._least(live, counts) if live else self._most(counts)
            self._known = _Survey(held, kept, reads, least)
        return self._known

    def _keep(self) -> frozenset[int]:
        """Return what is kept for readers who died: of the latest first, as far as it goes.

        Shards are taken by number, so that as others leave the cache the choice stays. The leases
        themselves have a fifth of the room of all leases, or the living would find none.
        """
        self._kept, kept, left = {}, set[int](), self._kept_below
        room = self._room.budget.leases // KEPT_SHARE
        dead = [lease for lease in self.leases if not lease.open]
        for lease in sorted(dead, key=lambda lease: (-self._seconds_left(lease), lease.name)):
            mine: list[int] = []
            room -= allocated(lease_path(self._layout, lease.name))
            if room < 0 and self._kept:  # one is kept, however little room there is
                self._kept[lease.name] = ()
                continue
            for number in protected(lease, resumable=True):
                row = self._stock.live.get(number) or self._stock.retired.get(number)
                nbytes = row.allocated if row is not None and number not in kept else 0
                if row is not None and nbytes <= left:
                    left -= nbytes
                    mine.append(number)
            kept.update(mine)
            self._kept[lease.name] = tuple(mine)
        return frozenset(kept)

    def _protected(self, leases: Iterable[LeaseView]) -> frozenset[int]:
        return frozenset().union(*(protected(lease, resumable=True) for lease in leases))

    def _counts(self) -> dict[str, Counter[int]]:
        """Return per job how often its unfinished leases read which shard."""
        counts: dict[str, Counter[int]] = {}
        for lease in self.leases:
            counts.setdefault(lease.job, Counter()).update(lease.used())
        return counts

    def _least(self, live: Iterable[str], counts: Mapping[str, Counter[int]]) -> _PerShard:
        pairs = [(self.uses.get(job, {}), counts[job]) for job in live]
        return lambda number: min(
            done.get(number, 0) + now.get(number, 0) for done, now in pairs
        )

    def _most(self, counts: Mapping[str, Counter[int]]) -> _PerShard:
        jobs = {*self.uses, *counts} - {NO_JOB}
        pairs = [(self.uses.get(job, {}), counts.get(job, Counter())) for job in jobs]
        return lambda number: max(
            (done.get(number, 0) + now.get(number, 0) for done, now in pairs), default=0
        )
