"""What a status shows of readers: what each job received, the leases, and shards kept for dead readers. Pure.

Leases come and go with the snapshots. The index notes what finished leases counted; the unfinished
ones add what they say now.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from growcache.cache.index.schema import CacheTotals
from growcache.cache.lease_views import (
    WAIT_BUCKETS,
    DeadReader,
    ForeignLease,
    LeaseCounters,
    LeaseView,
    sum_counters,
)

JOBS_META = "jobs"  # {job: sums}, in the index


@dataclass(frozen=True, slots=True)
class JobSums:
    """What a job received under its leases, in the words of `LeaseCounters`."""

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
    """Return the sums in the index; missing ones are zero."""
    names = JobSums.__slots__
    return {
        job: JobSums(**{name: noted[name] for name in names if name in noted})
        for job, noted in (meta or {}).items()
    }


def add_open_leases(
    jobs: Mapping[str, JobSums], leases: Iterable[LeaseView]
) -> dict[str, JobSums]:
    """Return the sums with unfinished leases added."""
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


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """A reader's hold on a snapshot.

    Attributes:
        name: of the lease.
        job: whose uses it counts.
        host: of the reader.
        pid: of the reader.
        command: of the reader.
        age_seconds: since the snapshot was taken.
        shards: that it still protects.
        open: whether the reader lives.
        seconds_left: for which the shards of a dead reader are still held; None if it lives, or
            without a service.
    """

    name: str
    job: str
    host: str
    pid: int
    command: str
    age_seconds: float
    shards: int
    open: bool
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class ForeignLeaseStatus:
    """A file among the leases that cannot be read here.

    Attributes:
        name: of the file.
        reason: why it cannot be read.
        uid: of its owner.
        pid: of its holder, if known.
        held: whether a process holds it; None if unknown.
        advice: what it keeps, and what to do about it.
    """

    name: str
    reason: str
    uid: int
    pid: int | None
    held: bool | None
    advice: str


@dataclass(frozen=True, slots=True)
class WaitsStatus:
    """How often, and how long in all, the loops of a job waited for a batch."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A training job.

    Attributes:
        name: of the job.
        delivered: samples that its loops received.
        reuse: these, over the samples that were drawn.
        epoch: the latest that was started.
        pid: of its latest reader.
        waits: for batches.
        open: whether a reader of it lives.
    """

    name: str
    delivered: int
    reuse: float
    epoch: int
    pid: int
    waits: WaitsStatus
    open: bool = False


def delivered_fields(
    sums: Mapping[str, JobSums], leases: Sequence[LeaseView], totals: CacheTotals
) -> dict[str, Any]:
    """Return the fields of `Status` about delivery: ``sums`` of counted leases and uncounted ``leases``."""
    delivered = totals.delivered + sum(lease.delivered or 0 for lease in leases if lease.job)
    drawn = max(1, totals.drawn)
    living = {lease.job for lease in leases if lease.open}
    jobs = [
        JobStatus(
            name,
            job.delivered,
            job.delivered / drawn,
            job.epoch,
            job.pid,
            WaitsStatus(job.waits, job.wait_seconds),
            name in living,
        )
        for name, job in add_open_leases(sums, leases).items()
    ]
    return {"delivered": delivered, "reuse": delivered / drawn, "jobs": jobs}


def lease_statuses(
    leases: Iterable[LeaseView], seconds_left: Mapping[str, float | None] | None = None
) -> list[LeaseStatus]:
    """Return `Status.leases`: those that protect something; ``seconds_left`` is by lease, for dead readers."""
    now = time.time()
    return [
        LeaseStatus(
            name=lease.name,
            job=lease.job,
            host=lease.host,
            pid=lease.pid,
            command=lease.command,
            age_seconds=max(0.0, now - lease.created),
            shards=len(lease.holding() if lease.open else lease.unfinished()),
            open=lease.open,
            seconds_left=(seconds_left or {}).get(lease.name),
        )
        for lease in leases
        if lease.open or lease.resumable
    ]


def service_lease_statuses(
    leases: Iterable[LeaseView], kept: Iterable[DeadReader]
) -> list[LeaseStatus]:
    """Return `Status.leases` while a service runs, which says what is held for the dead."""
    dead = [
        replace(shown, shards=len(one.shards))
        for one in kept
        for shown in lease_statuses([one.lease], {one.lease.name: one.seconds})
    ]
    return lease_statuses(lease for lease in leases if lease.open) + dead


def current_lease_statuses(
    leases: Iterable[LeaseView], told: Iterable[LeaseStatus], *, running: bool
) -> list[LeaseStatus]:
    """Return `Status.leases` of now; ``told`` are the service's a moment ago, which knows the dead."""
    shown = lease_statuses(leases)
    if not running:
        return shown
    kept = {lease.name: lease for lease in told if not lease.open}
    known = [
        replace(
            lease, shards=kept[lease.name].shards, seconds_left=kept[lease.name].seconds_left
        )
        if not lease.open and lease.name in kept
        else lease
        for lease in shown
    ]
    return [lease for lease in known if lease.open or lease.shards]


def foreign_statuses(foreign: Iterable[ForeignLease]) -> list[ForeignLeaseStatus]:
    return [
        ForeignLeaseStatus(
            name=lease.path.name,
            reason=lease.reason,
            uid=lease.uid,
            pid=lease.pid,
            held=lease.held,
            advice=lease.advice,
        )
        for lease in foreign
    ]
