"""What a status shows of readers: who holds what, for whom what is kept, what jobs received."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from growcache.cache.foreign_leases import ForeignLease
from growcache.cache.index import Totals
from growcache.cache.jobs import JobSums, current_jobs
from growcache.cache.leases import LeaseView
from growcache.cache.readers import Kept


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
        seconds_left: for which the shards of a dead reader are kept yet; None where it lives,
            or where no service runs that counts them.
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
    """Something among the leases that cannot be read here.

    Attributes:
        name: of the file.
        reason: why it cannot be read.
        uid: of its owner.
        pid: of who holds it, where that can be told.
        held: whether a process holds it; None where that cannot be told.
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
        epoch: the latest that began.
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


def job_counts(
    sums: Mapping[str, JobSums], leases: Sequence[LeaseView], totals: Totals
) -> dict[str, Any]:
    """Return the fields of `Status` that tell what was delivered.

    Args:
        sums: of the jobs, as far as their leases are counted.
        leases: that are not counted.
        totals: of the cache, with what was delivered under leases that are counted.
    """
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
        for name, job in current_jobs(sums, leases).items()
    ]
    return {"delivered": delivered, "reuse": delivered / drawn, "jobs": jobs}


def lease_statuses(
    leases: Iterable[LeaseView], seconds_left: Mapping[str, float | None] | None = None
) -> list[LeaseStatus]:
    """Return what `Status.leases` shows: those that protect something.

    Args:
        leases: as they are now.
        seconds_left: for which the shards of dead readers are kept, by the lease.
    """
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


def told_by_service(leases: Iterable[LeaseView], kept: Iterable[Kept]) -> list[LeaseStatus]:
    """Return what `Status.leases` shows where a service runs, which says what is kept."""
    dead = [
        replace(shown, shards=len(one.shards))
        for one in kept
        for shown in lease_statuses([one.lease], {one.lease.name: one.seconds})
    ]
    return lease_statuses(lease for lease in leases if lease.open) + dead


def seen_now(
    leases: Iterable[LeaseView], told: Iterable[LeaseStatus], *, running: bool
) -> list[LeaseStatus]:
    """Return `Status.leases` as of now; of what is kept for the dead the service knows more.

    Args:
        leases: as they are now.
        told: by the service, a moment ago.
        running: whether it runs still.
    """
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
    """Return what `Status.foreign_leases` shows."""
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
