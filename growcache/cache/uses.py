"""Uses and deliveries by job. Pure.

The index has the counts of finished leases, and unfinished leases add their current counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from growcache.cache.index.schema import KEPT_JOBS
from growcache.cache.lease_views import WAIT_BUCKETS, LeaseCounters, LeaseView

if TYPE_CHECKING:  # a status does not need these imports
    from growcache.cache.space import ShardTable

UsesByJob = dict[str, dict[int, int]]  # job → shard → number of uses


# Leases of this job protect their shards, but their uses do not matter for eviction. An
# inspection (check, peek) must not delay eviction until it has read everything.
NO_JOB = ""

UsesOfShard = Callable[[int], int]


def count_uses(
    uses: UsesByJob, finished: Iterable[LeaseView], there: Container[int]
) -> list[int]:
    """Add the uses of finished leases to ``uses``; return every shard of ``there`` once per use."""
    used = []
    for lease in finished:
        mine = uses[lease.job] = uses.pop(lease.job, {})  # it is the latest now
        for number in filter(there.__contains__, lease.used()):
            mine[number] = mine.get(number, 0) + 1
            used.append(number)
    for job in list(uses)[:-KEPT_JOBS]:  # the index forgets them, too
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
    """Return the fewest uses by a live job, or without live jobs, the most uses by any job."""
    live = {*live_jobs} - {NO_JOB}
    jobs = live or {*uses, *unfinished} - {NO_JOB}
    choose = min if live else max
    pairs = [(uses.get(job, {}), unfinished.get(job, Counter[int]())) for job in jobs]
    return lambda number: choose(
        (done.get(number, 0) + now.get(number, 0) for done, now in pairs), default=0
    )


JOBS_META = "jobs"  # {job: sums}, in the index


@dataclass(frozen=True, slots=True)
class WaitSums:
    """The waits of one rank for its batches."""

    batches: int = 0
    seconds: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * WAIT_BUCKETS)

    def plus(self, counters: LeaseCounters) -> WaitSums:
        batches = self.batches + counters.batches
        histogram = _with_waits(self.histogram, [counters], batches)
        return WaitSums(batches, self.seconds + counters.wait_seconds, histogram)


def _with_waits(histogram: list[int], said: Iterable[LeaseCounters], batches: int) -> list[int]:
    """Add the waits of leases. ``batches`` counts all batches; the remaining ones did not wait.

    A wait may be counted in one lease, and the batch that ends it in the next.
    """
    buckets = zip(histogram, *(counters.histogram for counters in said), strict=True)
    waits = [sum(bucket) for bucket in buckets][1:]
    return [max(0, batches - sum(waits)), *waits]


@dataclass(frozen=True, slots=True)
class JobSums:
    """The sums of a job's leases, with the names of `LeaseCounters`."""

    delivered: int = 0
    batches: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    wait_histogram: list[int] = field(default_factory=lambda: [0] * WAIT_BUCKETS)
    epoch: int = 0
    pid: int = 0
    ranks: Mapping[str, WaitSums] = field(default_factory=dict)  # of all that shared the cache
    # For shards that are gone: the sum of the uses of their samples, and the sum of squares.
    gone_uses: int = 0
    gone_squares: int = 0

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        ranks = {
            rank: [sums.batches, sums.seconds, sums.histogram]
            for rank, sums in self.ranks.items()
        }
        return values | {"ranks": ranks}

    @classmethod
    def from_json(cls, noted: Mapping[str, Any]) -> JobSums:
        """Return the sums that `to_json` wrote. Earlier versions did not separate ranks."""
        found = {name: noted[name] for name in cls.__slots__ if name in noted}
        ranks = {rank: WaitSums(*sums) for rank, sums in found.pop("ranks", {}).items()}
        sums = cls(**found)
        if not ranks and sums.batches:
            whole = WaitSums(sums.batches, sums.wait_seconds, sums.wait_histogram)
            ranks = {str(FIRST_RANK): whole}
        return replace(sums, ranks=ranks)

    def plus(self, said: Sequence[tuple[int, LeaseCounters]], pid: int) -> JobSums:
        """Add the counters of leases with their ranks, oldest first."""
        ranks, counters = dict(self.ranks), [one for _, one in said]
        for rank, one in said:
            ranks[str(rank)] = ranks.get(str(rank), WaitSums()).plus(one)
        batches = self.batches + sum(one.batches for one in counters)
        epochs = [one.epoch for one in counters if one.batches]
        return replace(
            self,
            delivered=self.delivered + sum(one.delivered for one in counters),
            batches=batches,
            waits=self.waits + sum(one.waits for one in counters),
            wait_seconds=self.wait_seconds + sum(one.wait_seconds for one in counters),
            wait_histogram=_with_waits(self.wait_histogram, counters, batches),
            epoch=epochs[-1] if epochs else self.epoch,
            pid=pid or self.pid,
            ranks=ranks,
        )


FIRST_RANK = 0


def rank_of(lease: LeaseView) -> int:
    return FIRST_RANK if lease.ranks is None else lease.ranks.rank


def jobs_in_index(meta: Any) -> dict[str, JobSums]:
    return {job: JobSums.from_json(noted) for job, noted in (meta or {}).items()}


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
        sums = found.get(job, JobSums())
        said = [(rank_of(one), one.counters) for one in mine if one.counters is not None]
        if said:
            sums = sums.plus(said, latest.pid)
        newest = max((one for _, one in said), key=lambda one: one.progress_at, default=None)
        if newest is not None and newest.batches:  # a job that restarted counts from 0 again
            sums = replace(sums, epoch=newest.epoch)
        found[job] = replace(sums, pid=latest.pid or sums.pid)
    return found


def add_finished_leases(
    jobs: Mapping[str, JobSums], finished: Iterable[LeaseView], shard_table: ShardTable
) -> dict[str, JobSums]:
    """Add finished leases.

    A lease without counters counts as having received the samples of its used shards.
    """
    found = dict(jobs)
    for lease in sorted(finished, key=lambda lease: lease.created):
        if lease.job:
            sums, counters = found.pop(lease.job, JobSums()), _counters_of(lease, shard_table)
            found[lease.job] = sums.plus([(rank_of(lease), counters)], lease.pid)
    return dict(list(found.items())[-KEPT_JOBS:])


def _counters_of(lease: LeaseView, shard_table: ShardTable) -> LeaseCounters:
    if lease.counters is not None and lease.counters.counts:
        return lease.counters
    rows = [
        shard_table.live.get(number) or shard_table.retired.get(number)
        for number in lease.used()
    ]
    return LeaseCounters(delivered=sum(row.samples for row in rows if row is not None))


SamplesOf = Callable[[int], int]  # of a shard; 0 if it does not exist


def add_gone_shards(
    jobs: Mapping[str, JobSums],
    numbers: Iterable[int],
    uses: UsesByJob,
    unfinished: Mapping[str, Mapping[int, int]],
    samples_of: SamplesOf,
) -> dict[str, JobSums]:
    """Record the uses of samples in shards that are about to be forgotten."""
    numbers, found = list(numbers), dict(jobs)
    for job in {*uses, *unfinished} - {NO_JOB}:
        done, now = uses.get(job, {}), unfinished.get(job, {})
        total = squares = 0
        for number in numbers:
            if count := done.get(number, 0) + now.get(number, 0):
                total += count * samples_of(number)
                squares += count * count * samples_of(number)
        if total:
            sums = found.get(job, JobSums())
            found[job] = replace(
                sums,
                gone_uses=sums.gone_uses + total,
                gone_squares=sums.gone_squares + squares,
            )
    return found


def effective_samples(
    sums: JobSums,
    done: Mapping[int, int],
    unfinished: Mapping[int, int],
    samples_of: SamplesOf,
) -> float:
    """Return (Σu)² / Σu² over all samples that a job ever received, from uses of whole shards.

    >>> effective_samples(JobSums(), {1: 1, 2: 1}, {2: 1}, lambda number: 10)
    18.0
    """
    total, squares = sums.gone_uses, sums.gone_squares
    for number in done.keys() | unfinished.keys():
        count, samples = done.get(number, 0) + unfinished.get(number, 0), samples_of(number)
        total += count * samples
        squares += count * count * samples
    return total * total / squares if squares else 0.0
