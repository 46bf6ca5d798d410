"""What each training job received, and how long it waited: sums over its leases. Pure.

Leases come and go with the snapshots. What finished ones counted is noted in the index; to it
comes what the others say now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from growcache.cache.index import KEPT_JOBS
from growcache.cache.lease_counters import BUCKETS, Counters, summed
from growcache.cache.leases import LeaseView
from growcache.cache.stock import Stock

JOBS_META = "jobs"  # {job: sums}, in the index


@dataclass(frozen=True, slots=True)
class JobSums:
    """What a job received under its leases.

    Attributes:
        delivered: samples that its loops received.
        batches: that they received.
        waits: batches that they had to wait for.
        wait_seconds: that they had no batch, in all.
        wait_histogram: batches by the bucket of their wait, see `WAIT_BOUNDS`.
        epoch: the latest that began.
        pid: of the latest reader.
    """

    delivered: int = 0
    batches: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    wait_histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    epoch: int = 0
    pid: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return what the index notes."""
        return {name: getattr(self, name) for name in self.__slots__}

    def plus(self, counters: Counters, pid: int) -> JobSums:
        """Return the sums with what was received besides."""
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


def noted_jobs(meta: Any) -> dict[str, JobSums]:
    """Return the sums that the index notes; what it never noted counts as nothing."""
    names = JobSums.__slots__
    return {
        job: JobSums(**{name: noted[name] for name in names if name in noted})
        for job, noted in (meta or {}).items()
    }


def with_finished(
    jobs: Mapping[str, JobSums], finished: Iterable[LeaseView], stock: Stock
) -> dict[str, JobSums]:
    """Return the sums with what was received under finished leases.

    Of a reader that does not count, the shards that it used tell what was delivered, as far as
    they are there.

    Args:
        jobs: the sums before; the job that ended a lease last is last.
        finished: the leases.
        stock: the shards that are there.
    """
    found = dict(jobs)
    for lease in sorted(finished, key=lambda lease: lease.created):
        if lease.job:
            sums = found.pop(lease.job, JobSums())
            found[lease.job] = sums.plus(_counters(lease, stock), lease.pid)
    return dict(list(found.items())[-KEPT_JOBS:])


def _counters(lease: LeaseView, stock: Stock) -> Counters:
    if lease.counters is not None and lease.counters.counts:
        return lease.counters
    rows = [stock.live.get(number) or stock.retired.get(number) for number in lease.used()]
    return Counters(delivered=sum(row.samples for row in rows if row is not None))


def current_jobs(
    jobs: Mapping[str, JobSums], leases: Iterable[LeaseView]
) -> dict[str, JobSums]:
    """Return the sums with what is received under leases that are not finished."""
    of_job: dict[str, list[LeaseView]] = {}
    for lease in leases:
        if lease.job:
            of_job.setdefault(lease.job, []).append(lease)
    found = dict(jobs)
    for job, mine in of_job.items():
        latest = max(mine, key=lambda lease: (lease.open, lease.created))
        said = [lease.counters for lease in mine if lease.counters is not None]
        sums = found.get(job, JobSums()).plus(summed(said), latest.pid)
        newest = max(said, key=lambda one: one.progress_at, default=None)
        if newest is not None and newest.batches:  # a job that began anew counts from 0 again
            sums = replace(sums, epoch=newest.epoch)
        found[job] = sums
    return found
