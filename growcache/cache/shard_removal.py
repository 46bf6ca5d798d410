"""Retire and delete shards without taking one away from a reader that may still open it.

COMMIT retired → read the leases → unlink what no lease holds → row says deleted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from growcache.cache.eviction_policy import Candidate
from growcache.cache.files import CacheLayout
from growcache.cache.folders import remove_shard
from growcache.cache.index.schema import FinishedLease, ShardState, ShardTableRow
from growcache.cache.index.writer import IndexWriter
from growcache.cache.lease_table import LeaseTable
from growcache.cache.lease_views import LeaseView, lease_path
from growcache.cache.shard_refetches import (
    PURGE_META,
    PurgeProgress,
    RefetchQueue,
    purge_progress,
)
from growcache.cache.space import ShardTable, SpaceAccount
from growcache.cache.uses import (
    JOBS_META,
    JobSums,
    add_finished_leases,
    add_gone_shards,
    effective_samples,
    forget_shards,
    jobs_in_index,
)
from growcache.errors import CacheFullError

LEASES_PER_TRANSACTION = 16


class ShardRemover:
    def __init__(
        self,
        layout: CacheLayout,
        index_writer: IndexWriter,
        shard_table: ShardTable,
        space: SpaceAccount,
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
        self._jobs_changed = False  # since the last write to the index
        self.refetch_queue = RefetchQueue(index_writer, shard_table)
        self.purging = PurgeProgress()
        self.load_purging()
        self._candidates: dict[int, Candidate] = {}
        self._deleted: list[int] = []  # shards whose rows do not say so yet
        self._as_of = -1  # the readers' version from which the candidates were made

    def poll(self, now: float) -> None:
        finished = self.lease_table.refresh(now)
        try:
            # A log that cannot be truncated must grow slowly. Then many leases share a
            # transaction.
            if finished and (
                self._index_writer.log_is_short or len(finished) >= LEASES_PER_TRANSACTION
            ):
                self._count_uses(finished)
            self._follow_wishes()
        except CacheFullError:
            self.delete_unheld()  # makes room
            raise
        self.delete_unheld()

    def _follow_wishes(self) -> None:
        retired = len(self._shard_table.retired)
        self.refetch_queue.update_from_leases(self.lease_table.leases)
        if len(self._shard_table.retired) != retired:
            self._as_of = -1  # some of them are live again

    def _count_uses(self, finished: Sequence[LeaseView]) -> None:
        # The names are part of the transaction of the uses, so that a crash before the unlink
        # does not count them twice. They are forgotten after the files are gone.
        index = self._index_writer.index
        names = {lease.name for lease in finished}
        new = [lease for lease in finished if lease.name not in self._finished]
        gone = self._finished - names
        if new:

            def note() -> None:
                index.forget_leases(gone)
                index.finish_leases(counted, time.time())
                self._note_jobs(jobs)

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
            # Another user's folder; the index records that it was counted.
            with suppress(PermissionError):
                lease_path(self._layout, name).unlink(missing_ok=True)

    def candidates(self) -> list[Candidate]:
        if self._as_of != self.lease_table.version:
            self._candidates = {}
            self._as_of = self.lease_table.version
            self.admit(self._shard_table.live.values())
        return list(self._candidates.values())

    def admit(self, rows: Iterable[ShardTableRow]) -> None:
        if self._as_of == self.lease_table.version:
            self._candidates.update((c.number, c) for c in self.lease_table.candidates(rows))

    def start_afresh(self) -> None:
        self.lease_table.uses.clear()
        self.jobs = {}
        self._deleted.clear()
        self.refetch_queue.start_afresh()
        self._as_of = -1

    def retire(self, numbers: Iterable[int]) -> None:
        """Keep live shards out of new snapshots, except those that a refetch needs."""
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

    # --- purged shards ---

    def load_purging(self) -> None:
        self._set_purging(
            purge_progress({PURGE_META: self._index_writer.index.meta(PURGE_META)})
        )

    def _set_purging(self, purging: PurgeProgress) -> None:
        self.purging = purging
        self.refetch_queue.purging = purging.numbers

    def write_purging(
        self, purging: PurgeProgress, change: Callable[[], None] = lambda: None
    ) -> None:
        """Record the progress of a purge, in one transaction with ``change``."""

        def note() -> None:
            change()
            self._index_writer.index.set_meta(PURGE_META, purging.to_meta())

        self._index_writer.write(note)
        self._set_purging(purging)

    def finish_purging(self, numbers: Collection[int]) -> None:
        """Release purged shards. `write_purging` records that, once for many."""
        purging = self.purging
        self._set_purging(
            replace(
                purging,
                rewrite=purging.rewrite.difference(numbers),
                drop=purging.drop.difference(numbers),
            )
        )

    def retire_purged(self, rows: Sequence[ShardTableRow], purging: PurgeProgress) -> None:
        """Keep live shards out of new snapshots until they are rewritten.

        They are not evicted.
        """
        numbers, index = [row.number for row in rows], self._index_writer.index
        self.write_purging(purging, lambda: index.set_state(numbers, ShardState.RETIRED))
        self._shard_table.retire(rows)
        self._as_of = -1

    def came_back(self) -> None:
        self._as_of = -1
        self.refetch_queue.shards_came()

    def evict(self, numbers: Iterable[int]) -> tuple[int, ...]:
        self.retire(numbers)
        self.lease_table.refresh()  # the next poll counts leases that are found finished here
        return self.delete_unheld()

    def delete_unheld(self) -> tuple[int, ...]:
        """Delete retired shards that no lease holds.

        The leases were read after the retirement.
        """
        held = self.lease_table.held
        held = held.difference(self.purging.drop) | self.lease_table.living
        held |= self.purging.rewrite
        free = tuple(number for number in self._shard_table.retired if number not in held)
        if free:
            uses, unfinished = self.lease_table.uses, self.lease_table.unfinished_uses
            before, samples_of = self.jobs, self._shard_table.samples_of
            self.jobs = add_gone_shards(before, free, uses, unfinished, samples_of)
            self._jobs_changed |= self.jobs != before
        for number in free:
            remove_shard(self._layout, number)
            self._shard_table.remove([number])
            self._deleted.append(number)
        forget_shards(self.lease_table.uses, free)
        if self._deleted:
            # On a full disk this may fail although space was freed, because others take it,
            # too.
            self._index_writer.write(self._note_deleted)
            self._deleted.clear()
        return free

    def _note_deleted(self) -> None:
        self._index_writer.index.set_state(self._deleted, ShardState.DELETED)
        if self._jobs_changed:
            self._note_jobs(self.jobs)
            self._jobs_changed = False

    def _note_jobs(self, jobs: Mapping[str, JobSums]) -> None:
        noted = {job: sums.to_json() for job, sums in jobs.items()}
        self._index_writer.index.set_meta(JOBS_META, noted)

    def effective_samples(self, job: str) -> float:
        """Return the effective sample size of all samples that a job ever received."""
        done = self.lease_table.uses.get(job, {})
        unfinished: Mapping[int, int] = self.lease_table.unfinished_uses.get(job, {})
        sums = self.jobs.get(job, JobSums())
        return effective_samples(sums, done, unfinished, self._shard_table.samples_of)
