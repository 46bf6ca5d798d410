"""Retire and delete shards, without a reader losing one that it may still open.

COMMIT retired → read the leases → unlink what no lease holds → row says deleted
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from growcache.cache.eviction_policy import Candidate
from growcache.cache.files import CacheLayout, allocated
from growcache.cache.folders import remove_shard
from growcache.cache.index.schema import KEPT_JOBS, FinishedLease, ShardState, ShardTableRow
from growcache.cache.index.writer import IndexWriter
from growcache.cache.lease_views import (
    DeadReader,
    ForeignLease,
    LeaseView,
    lease_path,
    protected_shards,
    survey_leases,
)
from growcache.cache.refetch import RefetchQueue
from growcache.cache.space import ShardTable, Space
from growcache.cache.uses import (
    JOBS_META,
    NO_JOB,
    UsesByJob,
    add_finished_leases,
    jobs_in_index,
)
from growcache.errors import CacheFullError

_UsesOfShard = Callable[[int], int]


DEAD_READERS_SHARE = 5  # what dead readers keep is at most one part of so many of the bound


class _LeaseSummary(NamedTuple):
    """What all leases together say of the shards.

    Attributes:
        held: shards that must not be deleted.
        kept: of these, those held for dead readers, which may come back.
        reads: how often unfinished leases read each shard.
        least: source of `Candidate.min_job_uses`.
    """

    held: frozenset[int]
    kept: frozenset[int]
    reads: Counter[int]
    least: _UsesOfShard


class LeaseTable:
    """The leases as last read, and the uses of finished ones.

    Attributes:
        leases: the unfinished ones.
        foreign: unreadable files among them.
        uses: of finished leases, per job.
        version: changes whenever `candidates` may change.
    """

    def __init__(
        self,
        layout: CacheLayout,
        resume_seconds: float,
        uses: UsesByJob,
        shard_table: ShardTable,
        space: Space,
    ) -> None:
        self.leases: list[LeaseView] = []
        self.foreign: list[ForeignLease] = []
        self.uses = uses
        self.version = 0
        self._known: _LeaseSummary | None = None
        self._layout = layout
        self._resume_seconds = resume_seconds
        self._shard_table = shard_table
        self._space = space
        self._dead_since: dict[str, float] = {}
        self._there: dict[Path, frozenset[int]] = {}  # when a foreign lease was first seen
        self._kept: dict[str, tuple[int, ...]] = {}  # by the lease of a dead reader
        self._kept_below = 0
        self._now = 0.0

    def refresh(self, now: float | None = None) -> list[LeaseView]:
        """Read the leases; return the finished ones that still have a file. ``now`` is monotonic seconds."""
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
        kept_below = self._space.max_bytes // DEAD_READERS_SHARE
        if unfinished != self.leases or kept_below != self._kept_below:
            self._kept_below = kept_below
            self.leases = unfinished
            self._changed()
        return finished

    def _heed(self, foreign: list[ForeignLease]) -> None:
        """Let each unreadable lease protect every shard that is there when it is first seen."""
        protecting = {lease.path for lease in foreign if lease.protects}
        if protecting != self._there.keys():
            there = frozenset((*self._shard_table.live, *self._shard_table.retired))
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
            return True  # nothing is kept for it: others took the space
        since = self._dead_since.get(lease.name, self._now)
        return self._now - since >= self._resume_seconds

    @property
    def held(self) -> frozenset[int]:
        return self._survey().held

    @property
    def kept(self) -> frozenset[int]:
        """Shards held for dead readers, also where living readers hold them: nothing releases them early."""
        return self._survey().kept

    def kept_for(self) -> list[DeadReader]:
        self._survey()
        return [
            DeadReader(lease, self._kept[lease.name], max(0.0, self._seconds_left(lease)))
            for lease in self.leases
            if not lease.open
        ]

    def _seconds_left(self, lease: LeaseView) -> float:
        return self._dead_since.get(lease.name, self._now) + self._resume_seconds - self._now

    def count(self, finished: Iterable[LeaseView], there: Container[int]) -> list[int]:
        """Add the uses of finished leases; return every shard of ``there`` once per use."""
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
        for mine in self.uses.values():
            for number in numbers:
                mine.pop(number, None)

    def candidates(self, rows: Iterable[ShardTableRow]) -> list[Candidate]:
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

    def _survey(self) -> _LeaseSummary:
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
            self._known = _LeaseSummary(held, kept, reads, least)
        return self._known

    def _keep(self) -> frozenset[int]:
        """Return the shards to hold for dead readers, the latest first, within their limit.

        Shards are taken by number, so that the choice is stable as others are evicted. The leases
        themselves get a fifth of the space of all leases, so that there is space for living readers.
        """
        self._kept, kept, left = {}, set[int](), self._kept_below
        left_for_leases = self._space.budget.leases // DEAD_READERS_SHARE
        dead = [lease for lease in self.leases if not lease.open]
        for lease in sorted(dead, key=lambda lease: (-self._seconds_left(lease), lease.name)):
            mine: list[int] = []
            left_for_leases -= allocated(lease_path(self._layout, lease.name))
            if left_for_leases < 0 and self._kept:  # at least one is kept
                self._kept[lease.name] = ()
                continue
            for number in protected_shards(lease, resumable=True):
                row = self._shard_table.live.get(number) or self._shard_table.retired.get(
                    number
                )
                nbytes = row.allocated if row is not None and number not in kept else 0
                if row is not None and nbytes <= left:
                    left -= nbytes
                    mine.append(number)
            kept.update(mine)
            self._kept[lease.name] = tuple(mine)
        return frozenset(kept)

    def _protected(self, leases: Iterable[LeaseView]) -> frozenset[int]:
        return frozenset().union(*(protected_shards(lease, resumable=True) for lease in leases))

    def _counts(self) -> dict[str, Counter[int]]:
        counts: dict[str, Counter[int]] = {}
        for lease in self.leases:
            counts.setdefault(lease.job, Counter()).update(lease.used())
        return counts

    def _least(self, live: Iterable[str], counts: Mapping[str, Counter[int]]) -> _UsesOfShard:
        pairs = [(self.uses.get(job, {}), counts[job]) for job in live]
        return lambda number: min(
            done.get(number, 0) + now.get(number, 0) for done, now in pairs
        )

    def _most(self, counts: Mapping[str, Counter[int]]) -> _UsesOfShard:
        jobs = {*self.uses, *counts} - {NO_JOB}
        pairs = [(self.uses.get(job, {}), counts.get(job, Counter())) for job in jobs]
        return lambda number: max(
            (done.get(number, 0) + now.get(number, 0) for done, now in pairs), default=0
        )


LEASES_PER_TRANSACTION = 16


class ShardRemover:
    """Counts what readers used, and retires and deletes shards.

    Attributes:
        lease_table: the leases, as of the last poll or eviction.
        jobs: what each job received under finished leases.
        refetch_queue: the shards to refetch.
    """

    def __init__(
        self,
        layout: CacheLayout,
        index_writer: IndexWriter,
        shard_table: ShardTable,
        space: Space,
        resume_seconds: float,
    ) -> None:
        self._layout = layout
        self._index_writer = index_writer
        self._shard_table = shard_table
        self.lease_table = LeaseTable(
            layout, resume_seconds, index_writer.index.uses(), shard_table, space
        )
        self._finished = index_writer.index.finished_leases()
        self.jobs = jobs_in_index(index_writer.index.meta(JOBS_META))
        self.refetch_queue = RefetchQueue(index_writer, shard_table)
        self._candidates: dict[int, Candidate] = {}
        self._deleted: list[int] = []  # whose rows do not say so yet
        self._as_of = -1  # the readers' version that the candidates were made from

    def poll(self, now: float) -> None:
        """Count the uses of finished leases and delete retired shards that no lease holds."""
        finished = self.lease_table.refresh(now)
        try:
            # A log that cannot be cut must grow slowly: then many leases make one transaction.
            if finished and (
                self._index_writer.log_is_short or len(finished) >= LEASES_PER_TRANSACTION
            ):
                self._count_uses(finished)
            self._follow_wishes()
        except CacheFullError:
            self._delete_unheld()  # that makes room
            raise
        self._delete_unheld()

    def _follow_wishes(self) -> None:
        retired = len(self._shard_table.retired)
        self.refetch_queue.follow(self.lease_table.leases)
        if len(self._shard_table.retired) != retired:
            self._as_of = -1  # some of them live again

    def _count_uses(self, finished: Sequence[LeaseView]) -> None:
        # The names go into the transaction of the uses, so that a crash before the unlink
        # does not count them twice. They are forgotten once the files are gone.
        index = self._index_writer.index
        names = {lease.name for lease in finished}
        new = [lease for lease in finished if lease.name not in self._finished]
        gone = self._finished - names
        if new:

            def note() -> None:
                index.forget_leases(gone)
                index.finish_leases(counted, time.time())
                index.set_meta(JOBS_META, {job: sums.to_json() for job, sums in jobs.items()})

            counted = [
                FinishedLease(lease.name, lease.job, lease.used(), lease.delivered)
                for lease in new
            ]
            jobs = add_finished_leases(self.jobs, new, self._shard_table)
            self._index_writer.write(note)
            self.jobs = jobs
            self._finished = (self._finished - gone) | names
            self._shard_table.use(self.lease_table.count(new, self._shard_table))
        for name in names:
            with suppress(
                PermissionError
            ):  # another user's folder; that it is counted is noted
                lease_path(self._layout, name).unlink(missing_ok=True)

    def candidates(self) -> list[Candidate]:
        if self._as_of != self.lease_table.version:
            self._candidates = {}
            self._as_of = self.lease_table.version
            self.admit(self._shard_table.live.values())
        return list(self._candidates.values())

    def admit(self, rows: Iterable[ShardTableRow]) -> None:
        """Add shards that are live now."""
        if self._as_of == self.lease_table.version:
            self._candidates.update((c.number, c) for c in self.lease_table.candidates(rows))

    def start_afresh(self) -> None:
        self.lease_table.uses.clear()
        self.jobs = {}
        self._deleted.clear()
        self.refetch_queue.start_afresh()
        self._as_of = -1

    def retire(self, numbers: Iterable[int]) -> None:
        """Keep live shards out of new snapshots; those that a refetch names stay."""
        live, index = self._shard_table.live, self._index_writer.index
        going = [n for n in dict.fromkeys(numbers) if n not in self.refetch_queue.wanted]
        rows = [live[number] for number in going if number in live]
        if not rows:
            return

        def note() -> None:
            index.set_state([row.number for row in rows], ShardState.RETIRED)
            samples = sum(row.samples for row in rows)
            index.add_totals(evicted_shards=len(rows), evicted_samples=samples)

        self._index_writer.write(note)
        self._shard_table.retire(rows)
        for row in rows:
            self._candidates.pop(row.number, None)

    def evict(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Retire live shards; return the retired shards that could be deleted."""
        self.retire(numbers)
        self.lease_table.refresh()  # the next poll counts those that are found finished here
        return self._delete_unheld()

    def _delete_unheld(self) -> tuple[int, ...]:
        """Delete retired shards, by leases that were read after the shards were retired."""
        held = self.lease_table.held
        free = tuple(number for number in self._shard_table.retired if number not in held)
        for number in free:
            remove_shard(self._layout, number)
            self._shard_table.remove([number])
            self._deleted.append(number)
        self.lease_table.forget(free)
        if self._deleted:
            # On a full disk this may fail, although space was freed, because others take it too.
            index, gone = self._index_writer.index, tuple(self._deleted)
            self._index_writer.write(lambda: index.set_state(gone, ShardState.DELETED))
            self._deleted.clear()
        return free
