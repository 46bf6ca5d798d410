"""The leases of a cache as the supervisor sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from growcache.cache.dead_readers import DeadReader, DeadReaders
from growcache.cache.eviction_policy import Candidate
from growcache.cache.files import CacheLayout
from growcache.cache.index.schema import ShardTableRow
from growcache.cache.lease_views import ForeignLease, LeaseView, survey_leases
from growcache.cache.space import ShardTable, SpaceAccount
from growcache.cache.uses import (
    UsesByJob,
    UsesOfShard,
    count_uses,
    min_job_uses,
    unfinished_uses,
)


class _LeaseSummary(NamedTuple):
    held: frozenset[int]  # must not be deleted
    kept: frozenset[int]  # of these, for dead readers, which may return
    living: frozenset[int]  # of these, for readers that live, or may live
    # Uses of each shard by leases that are not counted yet, by job.
    unfinished: dict[str, Counter[int]]
    reads: Counter[int]  # uses of each shard by all jobs
    min_job_uses: UsesOfShard


class LeaseTable:
    """The leases as last read, and the uses of finished ones."""

    def __init__(
        self,
        layout: CacheLayout,
        resume_seconds: float,
        uses: UsesByJob,
        shard_table: ShardTable,
        space: SpaceAccount,
    ) -> None:
        self.leases: list[LeaseView] = []
        self.foreign: list[ForeignLease] = []
        self.uses = uses
        self.version = 0
        self._known: _LeaseSummary | None = None
        self._layout = layout
        self._shard_table = shard_table
        self._dead_readers = DeadReaders(layout, resume_seconds, shard_table, space)
        # Shards that existed when a foreign lease was first seen.
        self._there: dict[Path, frozenset[int]] = {}
        self._max_dead_bytes = 0

    def refresh(self, now: float | None = None) -> list[LeaseView]:
        """Return the finished leases that still have a file.

        ``now`` is in monotonic seconds.
        """
        views, foreign = survey_leases(self._layout.root)
        self._dead_readers.update_from_leases(views, now)
        finished = [view for view in views if self._dead_readers.has_ended(view)]
        over = {view.name for view in finished}
        unfinished = [view for view in views if view.name not in over]
        self._protect_for_foreign(foreign)
        max_dead_bytes = self._dead_readers.max_shard_bytes
        if unfinished != self.leases or max_dead_bytes != self._max_dead_bytes:
            self._max_dead_bytes = max_dead_bytes
            self.leases = unfinished
            self._changed()
        return finished

    def _protect_for_foreign(self, foreign: list[ForeignLease]) -> None:
        """Let each unreadable lease protect every shard that exists when the lease is first seen."""
        protecting = {lease.path for lease in foreign if lease.protects}
        if protecting != self._there.keys():
            there = frozenset((*self._shard_table.live, *self._shard_table.retired))
            self._there = {path: self._there.get(path, there) for path in protecting}
            self._changed()
        self.foreign = foreign

    def _changed(self) -> None:
        self.version += 1
        self._known = None

    @property
    def held(self) -> frozenset[int]:
        return self._summary().held

    @property
    def kept(self) -> frozenset[int]:
        """Shards held for dead readers, even if living readers hold them, too."""
        return self._summary().kept

    @property
    def living(self) -> frozenset[int]:
        """Shards held for readers that live, or may live."""
        return self._summary().living

    @property
    def unfinished_uses(self) -> dict[str, Counter[int]]:
        """Uses of each shard by leases that are not counted yet, by job."""
        return self._summary().unfinished

    def kept_for(self) -> list[DeadReader]:
        self._summary()
        return self._dead_readers.held_for(self.leases)

    def count(self, finished: Iterable[LeaseView], there: Container[int]) -> list[int]:
        """Add the uses of finished leases; return every shard of ``there`` once per use."""
        self._changed()
        return count_uses(self.uses, finished, there)

    def candidates(self, rows: Iterable[ShardTableRow]) -> list[Candidate]:
        summary = self._summary()
        held, reads, job_uses = summary.held, summary.reads, summary.min_job_uses
        return [
            Candidate(
                number=(number := row.number),
                seq=row.seq,
                allocated=row.allocated,
                uses=row.uses + reads.get(number, 0),
                min_job_uses=job_uses(number),
                leased=number in held,
            )
            for row in rows
        ]

    def _summary(self) -> _LeaseSummary:
        if self._known is None:
            unfinished = unfinished_uses(self.leases)
            reads: Counter[int] = Counter()
            for of_job in unfinished.values():
                reads.update(of_job)
            living = [lease for lease in self.leases if lease.open]
            living_shards = [lease.holding() for lease in living]
            kept = self._dead_readers.hold(self.leases)
            may_live = frozenset[int]().union(*living_shards, *self._there.values())
            # A dead reader reads nothing more, so no eviction waits for it.
            live_jobs = {lease.job for lease in living}
            uses = min_job_uses(self.uses, unfinished, live_jobs)
            self._known = _LeaseSummary(
                kept | may_live, kept, may_live, unfinished, reads, uses
            )
        return self._known
