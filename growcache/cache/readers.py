"""Who reads the cache: which shards are protected, and who used what how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

from growcache.cache.eviction import Candidate
from growcache.cache.files import Layout
from growcache.cache.index import KEPT_JOBS, StockRow
from growcache.cache.leases import LeaseView, protected, read_leases

Uses = dict[str, dict[int, int]]  # job → shard → how often
_PerShard = Callable[[int], int]

# Leases of this job protect what they hold, but its uses are not asked for: somebody who
# only looks (check, peek) must not hold eviction back until everything was looked at.
NO_JOB = ""


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


class Readers:
    """The leases as they were last read, and the uses of finished ones.

    Attributes:
        leases: those that are not finished.
        uses: of finished leases, per job.
        version: another whenever what `candidates` says of a shard may be different.
    """

    def __init__(self, layout: Layout, resume_seconds: float, uses: Uses) -> None:
        self.leases: list[LeaseView] = []
        self.uses = uses
        self.version = 0
        self._known: _Survey | None = None
        self._layout = layout
        self._resume_seconds = resume_seconds
        self._dead_since: dict[str, float] = {}
        self._now = 0.0

    def refresh(self, now: float | None = None) -> list[LeaseView]:
        """Read the leases anew; return those that are finished and still have a file.

        Args:
            now: monotonic seconds; as at the last call if None.
        """
        self._now = self._now if now is None else now
        views = read_leases(self._layout.root)
        dead = {view.name for view in views if not view.open and not view.closed}
        self._dead_since = {
            name: since for name, since in self._dead_since.items() if name in dead
        }
        for name in dead:
            self._dead_since.setdefault(name, self._now)
        finished = [view for view in views if self._finished(view)]
        over = {view.name for view in finished}
        unfinished = [view for view in views if view.name not in over]
        if unfinished != self.leases:
            self.leases = unfinished
            self._changed()
        return finished

    def _changed(self) -> None:
        self.version += 1
        self._known = None

    def _finished(self, lease: LeaseView) -> bool:
        if lease.open:
            return False
        since = self._dead_since.get(lease.name, self._now)
        return lease.closed or self._now - since >= self._resume_seconds

    @property
    def held(self) -> frozenset[int]:
        """The shards that must not be deleted, as of the last refresh."""
        return self._survey().held

    @property
    def kept(self) -> frozenset[int]:
        """The shards that readers who died hold, also where others do: none lets them go."""
        return self._survey().kept

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
            running = self._running()
            reads: Counter[int] = Counter()
            for counts in running.values():
                reads.update(counts)
            live = {job: counts for job, counts in running.items() if job != NO_JOB}
            kept = self._protected(lease for lease in self.leases if not lease.open)
            held = kept | self._protected(lease for lease in self.leases if lease.open)
            least = self._least(live) if live else self._most()
            self._known = _Survey(held, kept, reads, least)
        return self._known

    def _protected(self, leases: Iterable[LeaseView]) -> frozenset[int]:
        return frozenset().union(*(protected(lease, resumable=True) for lease in leases))

    def _running(self) -> dict[str, Counter[int]]:
        """Return per living job how often its unfinished leases read which shard."""
        running: dict[str, Counter[int]] = {}
        for lease in self.leases:
            running.setdefault(lease.job, Counter()).update(lease.used())
        return running

    def _least(self, live: Mapping[str, Counter[int]]) -> _PerShard:
        pairs = [(self.uses.get(job, {}), counts) for job, counts in live.items()]
        return lambda number: min(
            done.get(number, 0) + now.get(number, 0) for done, now in pairs
        )

    def _most(self) -> _PerShard:
        jobs = [mine for job, mine in self.uses.items() if job != NO_JOB]
        return lambda number: max((mine.get(number, 0) for mine in jobs), default=0)
