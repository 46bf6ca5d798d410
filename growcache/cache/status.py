"""The status of a cache. The supervisor writes it about twice a second."""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from growcache.cache.dead_readers import DeadReader
from growcache.cache.files import (
    CacheLayout,
    allocated,
    allocated_tree,
    directory_of,
    generation_in,
    is_full_disk,
    overwrite_in_place,
    write_atomic,
)
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.index.schema import CacheTotals
from growcache.cache.lease_views import ForeignLease, LeaseView, read_leases, survey_all_leases
from growcache.cache.locks import are_pids_ours, is_locked, lock_holder
from growcache.cache.shard_refetches import (
    REFUSED_META,
    pending_refetches,
    purge_progress,
    refused_in_index,
)
from growcache.cache.status_model import (
    ForeignLeaseStatus,
    JobStatus,
    LeaseStatus,
    SetAsideStatus,
    Status,
    WaitsStatus,
)
from growcache.cache.system import is_process_stopped
from growcache.cache.uses import JOBS_META, JobSums, add_open_leases, jobs_in_index
from growcache.errors import CacheMissingError

SILENT_SECONDS = 15.0  # a service writes its status twice a second
READ_TRIES, TORN_SECONDS = 3, 0.005  # a full disk makes the service overwrite the file in place


def delivered_fields(
    sums: Mapping[str, JobSums], leases: Sequence[LeaseView], totals: CacheTotals
) -> dict[str, Any]:
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
            job.batches,
        )
        for name, job in add_open_leases(sums, leases).items()
    ]
    return {"delivered": delivered, "reuse": delivered / drawn, "jobs": jobs}


def lease_statuses(
    leases: Iterable[LeaseView], seconds_left: Mapping[str, float | None] | None = None
) -> list[LeaseStatus]:
    """Return the leases that protect something.

    ``seconds_left`` has the rest of the hold by lease, for dead readers.
    """
    now = time.time()
    return [
        LeaseStatus(
            name=lease.name,
            job=lease.job,
            host=lease.host,
            pid=lease.pid,
            pid_namespace=lease.pid_namespace,
            command=lease.command,
            age_seconds=max(0.0, now - lease.created),
            shards=len(lease.holding() if lease.open else lease.unfinished()),
            open=lease.open,
            seconds_left=(seconds_left or {}).get(lease.name),
            generation=lease.generation,
        )
        for lease in leases
        if lease.open or lease.resumable
    ]


def service_lease_statuses(
    leases: Iterable[LeaseView], kept: Iterable[DeadReader]
) -> list[LeaseStatus]:
    """Return the leases while a service runs, which reports the holds for dead readers."""
    dead = [
        replace(shown, shards=len(one.shards))
        for one in kept
        for shown in lease_statuses([one.lease], {one.lease.name: one.seconds})
    ]
    return lease_statuses(lease for lease in leases if lease.open) + dead


def current_lease_statuses(
    leases: Iterable[LeaseView], told: Iterable[LeaseStatus], *, running: bool
) -> list[LeaseStatus]:
    """Return the current leases.

    Only ``told``, the service's last status, has the dead readers.
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


def write_status(root: str | os.PathLike[str], status: Status) -> None:
    """Replace ``status.json``.

    It need not survive a power cut, nor be written on a full disk.
    """
    path = CacheLayout(root).status
    try:
        write_atomic(path, status.to_json(), durable=False)
    except OSError as error:
        if not is_full_disk(error):
            raise
        overwrite_in_place(path, _shorter_versions(status))


def _shorter_versions(status: Status) -> Iterator[builtins.bytes]:
    """Yield the status with its long lists shortened further and further."""
    yield status.to_json()
    status = replace(status, last_errors=status.last_errors[-1:])
    yield status.to_json()
    spare = replace(status, last_errors=[], leases=[], worker_states=[])
    yield replace(spare, foreign_leases=[], jobs=[], strata=[]).to_json()


def _read_status_file(layout: CacheLayout) -> Status:
    for _ in range(READ_TRIES):
        try:
            return Status.from_json(layout.status.read_bytes())
        except FileNotFoundError:
            break
        except (ValueError, TypeError):
            time.sleep(TORN_SECONDS)
    return Status()


def read_status(root: str | os.PathLike[str]) -> Status:
    """Return the service's last status, corrected by the current state of the cache."""
    while True:
        layout = CacheLayout(root)
        try:
            return _read_status(layout)
        except CacheMissingError:  # also if another generation became the newest
            if CacheLayout(root).root == layout.root:
                raise


def _read_status(layout: CacheLayout) -> Status:
    layout.require()
    told = _read_status_file(layout)
    leases, foreign = survey_all_leases(directory_of(layout.root))
    running = is_locked(layout.supervisor_lock)
    told = replace(
        told,
        path=str(layout.directory),
        leases=current_lease_statuses(leases, told.leases, running=running),
        foreign_leases=foreign_statuses(foreign),
    )
    if not running:
        return _stopped(layout, told)
    holder = lock_holder(layout.supervisor_lock)
    if not _is_of_holder(told, holder):  # a supervisor that has just started
        return replace(_stopped(layout, told), state="running", pid=holder.get("pid"))
    if silence := _silence_now(layout, told):
        told = replace(
            told,
            state="waiting",
            waiting_for=silence,
            waiting_reason="service",
            samples_per_second=0.0,
            bytes_per_second=0.0,
        )
    return told


def forget_errors(root: str | os.PathLike[str]) -> None:
    """Remove texts with keys from the last status of a service that has ended."""
    layout = CacheLayout(root)
    if layout.status.exists():
        told = _read_status_file(layout)
        kept = replace(told, last_errors=[], ended_by=None, set_aside=SetAsideStatus())
        write_status(root, kept)


def service_silence(root: str | os.PathLike[str]) -> str:
    """Return what a silent service must do first, in words; "" if it answers or starts."""
    layout = CacheLayout(root)
    return _silence_now(layout, _last_word(layout))


def _is_of_holder(told: Status, holder: Mapping[str, Any]) -> bool:
    """Whether the holder of the lock wrote that status. In containers pids are often reused."""
    began_before = told.started_at is not None and told.started_at < holder.get("since", 0)
    return told.pid == holder.get("pid") and not began_before


def _last_word(layout: CacheLayout) -> Status:
    """Return the last status by the holder of the lock, or its name while it starts."""
    told, holder = _read_status_file(layout), lock_holder(layout.supervisor_lock)
    if _is_of_holder(told, holder):
        return told
    return Status(pid=holder.get("pid"), host=str(holder.get("host", "")), state="running")


@dataclass(frozen=True, slots=True)
class ServicePulse:
    """The facts about a service that a training process asks for repeatedly."""

    runs: bool
    silence: str = ""  # what a silent service must do first, in words
    state: str = "stopped"
    waiting_for: str | None = None
    drawn: int = 0
    pid: int | None = None
    host: str = ""
    updated_at: float | None = None


def service_pulse(root: str | os.PathLike[str]) -> ServicePulse:
    """Return a service's sign of life.

    Cheaper than `read_status`: it reads no lease and no index.
    """
    layout = CacheLayout(root)
    if not is_locked(layout.supervisor_lock):
        return ServicePulse(runs=False)
    told = _last_word(layout)
    return ServicePulse(
        runs=True,
        silence=_silence_now(layout, told),
        state=told.state,
        waiting_for=told.waiting_for,
        drawn=told.drawn,
        pid=told.pid,
        host=told.host,
        updated_at=told.updated_at,
    )


def _silence_now(layout: CacheLayout, told: Status) -> str:
    namespace = lock_holder(layout.supervisor_lock).get("pid_namespace")
    here = are_pids_ours(told.host, namespace)
    stopped = here and told.pid is not None and is_process_stopped(told.pid)
    return _silence(told, time.time(), stopped=stopped)


def _silence(told: Status, now: float, *, stopped: bool) -> str:
    """Return what a silent service must do first, in words. ``told`` is its last status."""
    if stopped:
        return (
            "the service to continue: its process is stopped by a signal; continue it with: "
            f"kill -CONT {told.pid}"
        )
    seconds = now - told.updated_at if told.updated_at is not None else 0.0
    if seconds < SILENT_SECONDS:
        return ""
    return f"the service to answer: pid {told.pid} on {told.host} has been silent for {seconds:.0f} s"


def _stopped(layout: CacheLayout, told: Status) -> Status:
    leases = read_leases(layout.root)
    view = read_index(layout.root, job="")  # with the names of the leases that it counts
    uncounted = [lease for lease in leases if lease.name not in view.counted]
    live = {row.number for row in view.shards}
    return replace(
        told,
        **index_fields(view),
        **delivered_fields(jobs_in_index(view.meta.get(JOBS_META)), uncounted, view.totals),
        state="stopped",
        waiting_for=None,
        waiting_reason=None,
        bytes=allocated_tree(layout.root),
        catalog_bytes=allocated(layout.catalog),
        workers=0,
        worker_states=[],
        reserved_bytes=0,
        wishes=len(
            pending_refetches(leases, live, refused_in_index(view.meta.get(REFUSED_META)))
        ),
        samples_per_second=0.0,
        bytes_per_second=0.0,
    )


def index_fields(view: IndexView) -> dict[str, Any]:
    totals = view.totals
    return {
        "shards": totals.shards,
        "samples": totals.samples,
        "drawn": totals.drawn,
        "evicted_samples": totals.evicted_samples,
        "refetched_samples": totals.refetched_samples,
        "holes": totals.holes,
        "empty_visits": totals.empty_visits,
        "retired_bytes": totals.retired_bytes,
        "retired_shards": totals.retired_shards,
        "complete": view.complete,
        "fingerprint": view.fingerprint,
        "generation": (generation_in(view.root) if view.root else None) or 0,
        "purging": len(purge_progress(view.meta).numbers),
    }
