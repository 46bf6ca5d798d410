"""Uses and deliveries, by job. Pure.

The index notes what finished leases counted; the unfinished ones add their current counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from growcache.cache.index.schema import KEPT_JOBS
from growcache.cache.lease_views import WAIT_BUCKETS, LeaseCounters, LeaseView, sum_counters

if TYPE_CHECKING:  # a status does not need what it imports
    from growcache.cache.space import ShardTable

UsesByJob = dict[str, dict[int, int]]  # job → shard → how often


# Leases of this job protect what they hold, but its uses are not asked for: somebody who
# only looks (check, peek) must not hold eviction back until everything was looked at.
NO_JOB = ""

UsesOfShard = Callable[[int], int]


def count_uses(
    uses: UsesByJob, finished: Iterable[LeaseView], there: Container[int]
) -> list[int]:
    """Add the uses of finished leases to ``uses``; return every shard of ``there`` once per use."""
    used = []
    for lease in finished:
        mine = uses[lease.job] = uses.pop(lease.job, {})  # it is last now
        for number in filter(there.__contains__, lease.used()):
            mine[number] = mine.get(number, 0) + 1
            used.append(number)
    for job in list(uses)[:-KEPT_JOBS]:  # as the index forgets them
        del uses[job]
    return used


def forget_shards(uses: UsesByJob, numbers: Iterable[int]) -> None:
    for mine in uses.values():
        for number in numbers:
            mine.pop(number, None)


def unfinished_uses(leases: Iterable[LeaseView]) -> dict[str, Counter[int]]:
    counts: dict[str, Counter[int]] = {}
    for lease in leases:
        counts.setdefault(lease.job, Counter()).update(lease.used())
    return counts


def min_job_uses(
    uses: UsesByJob, unfinished: Mapping[str, Counter[int]], live_jobs: Iterable[str]
) -> UsesOfShard:
    """Return the uses by the live job that used it least; without one, by the job that used it most."""
    live = {*live_jobs} - {NO_JOB}
    jobs = live or {*uses, *unfinished} - {NO_JOB}
    choose = min if live else max
    pairs = [(uses.get(job, {}), unfinished.get(job, Counter[int]())) for job in jobs]
    return lambda number: choose(
        (done.get(number, 0) + now.get(number, 0) for done, now in pairs), default=0
    )


JOBS_META = "jobs"  # {job: sums}, in the index


@dataclass(frozen=True, slots=True)
class JobSums:
    """The sums of a job's leases, in the words of `LeaseCounters`."""

    delivered: int = 0
    batches: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    wait_histogram: list[int] = field(default_factory=lambda: [0] * WAIT_BUCKETS)
    epoch: int = 0
    pid: int = 0

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def plus(self, counters: LeaseCounters, pid: int) -> JobSums:
        more = zip(self.wait_histogram, counters.wait_histogram(), strict=True)
        return JobSums(
            self.delivered + counters.delivered,
            self.batches + counters.batches,
            self.waits + counters.waits,
            self.wait_seconds + counters.wait_seconds,
            [a + b for a, b in more],
            counters.epoch if counters.batches else self.epoch,
            pid or self.pid,
        )


def jobs_in_index(meta: Any) -> dict[str, JobSums]:
    names = JobSums.__slots__
    return {
        job: JobSums(**{name: noted[name] for name in names if name in noted})
        for job, noted in (meta or {}).items()
    }


def add_open_leases(
    jobs: Mapping[str, JobSums], leases: Iterable[LeaseView]
) -> dict[str, JobSums]:
    of_job: dict[str, list[LeaseView]] = {}
    for lease in leases:
        if lease.job:
            of_job.setdefault(lease.job, []).append(lease)
    found = dict(jobs)
    for job, mine in of_job.items():
        latest = max(mine, key=lambda lease: (lease.open, lease.created))
        said = [lease.counters for lease in mine if lease.counters is not None]
        sums = found.get(job, JobSums()).plus(sum_counters(said), latest.pid)
        newest = max(said, key=lambda one: one.progress_at, default=None)
        if newest is not None and newest.batches:  # a job that began anew counts from 0 again
            sums = replace(sums, epoch=newest.epoch)
        found[job] = sums
    return found


def add_finished_leases(
    jobs: Mapping[str, JobSums], finished: Iterable[LeaseView], shard_table: ShardTable
) -> dict[str, JobSums]:
    """Add finished leases; one without counters received the samples of the shards it used."""
    found = dict(jobs)
    for lease in sorted(finished, key=lambda lease: lease.created):
        if lease.job:
            sums = found.pop(lease.job, JobSums())
            found[lease.job] = sums.plus(_counters_of_lease(lease, shard_table), lease.pid)
    return dict(list(found.items())[-KEPT_JOBS:])


def _counters_of_lease(lease: LeaseView, shard_table: ShardTable) -> LeaseCounters:
    if lease.counters is not None and lease.counters.counts:
        return lease.counters
    rows = [
        shard_table.live.get(number) or shard_table.retired.get(number)
        for number in lease.used()
    ]
    return LeaseCounters(delivered=sum(row.samples for row in rows if row is not None))
