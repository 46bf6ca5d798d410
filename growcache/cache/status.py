"""The status of a cache; the supervisor writes it about twice a second."""

from __future__ import annotations

import builtins
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import orjson

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
from growcache.cache.system import is_process_stopped
from growcache.cache.uses import JOBS_META, JobSums, add_open_leases, jobs_in_index
from growcache.errors import CacheMissingError


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    name: str
    job: str
    host: str
    pid: int
    command: str
    age_seconds: float  # since the snapshot was taken
    shards: int  # that it still protects
    open: bool  # whether the reader lives
    seconds_left: float | None = None  # of the hold, once the reader is dead
    generation: int = 0  # of the samples that it reads


@dataclass(frozen=True, slots=True)
class ForeignLeaseStatus:
    name: str
    reason: str
    uid: int  # of its owner
    pid: int | None  # of its holder, if known
    held: bool | None  # None if unknown
    advice: str  # what it keeps, and what to do about it


@dataclass(frozen=True, slots=True)
class WaitsStatus:
    """How often, and how long in all, the loops of a job waited for a batch."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    name: str
    delivered: int  # samples that its loops received
    reuse: float  # these, over the samples that were drawn
    epoch: int  # the latest that was started
    pid: int  # of its latest reader
    waits: WaitsStatus
    open: bool = False  # whether a reader of it lives
    batches: int = 0  # that its loops received


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
    """Return the leases that protect something; ``seconds_left`` is by lease, for dead readers."""
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
            generation=lease.generation,
        )
        for lease in leases
        if lease.open or lease.resumable
    ]


def service_lease_statuses(
    leases: Iterable[LeaseView], kept: Iterable[DeadReader]
) -> list[LeaseStatus]:
    """Return the leases, while a service runs and says what is held for dead readers."""
    dead = [
        replace(shown, shards=len(one.shards))
        for one in kept
        for shown in lease_statuses([one.lease], {one.lease.name: one.seconds})
    ]
    return lease_statuses(lease for lease in leases if lease.open) + dead


def current_lease_statuses(
    leases: Iterable[LeaseView], told: Iterable[LeaseStatus], *, running: bool
) -> list[LeaseStatus]:
    """Return the leases of now; only ``told``, the service's last word, knows the dead readers."""
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


SILENT_SECONDS = 15.0  # a service tells its status twice a second
READ_TRIES, TORN_SECONDS = 3, 0.005  # a file that is being written over on a full disk
State = Literal["running", "complete", "full", "waiting", "shrinking", "stopped"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    id: int  # its place, from 0; a restarted worker keeps it
    pid: int | None = None  # None while it is (re)started
    state: str = "starting"  # or idle, reading, writing, waiting, stopping, restarting
    permit: str | None = None  # None when idle
    parts_done: int = 0  # visits made for the current permit
    parts: int = 0  # visits that it asks for
    node: str | None = None  # of a Ray cluster; None on this machine


@dataclass(frozen=True, slots=True)
class SourceStatus:
    url: str
    share: float  # of the samples that are drawn
    objects: int
    samples: float  # estimated
    rounds: float  # how often each of its samples was drawn, on average


@dataclass(frozen=True, slots=True)
class StratumStatus:
    name: str  # empty where the row sums up several
    parts: int  # that this machine may draw
    drawn: int  # visits, since the cache began
    coverage: float  # the share of the parts that were drawn
    strata: int = 1  # that the row is about


@dataclass(frozen=True, slots=True)
class SubsetStatus:
    name: str
    used: bool  # whether this cache is drawn from it
    objects: int
    groups: int  # that its objects are of
    samples: float  # estimated


@dataclass(frozen=True, slots=True)
class SetAsideStatus:
    """Objects that keep failing while the rest of the store answers."""

    parts: int = 0  # drawn, in no shard yet; they come when their objects answer
    objects: int = 0
    key: str = ""  # of the object that was noted last
    reason: str = ""
    seconds: float = 0.0  # until the first of them is tried again

    @property
    def words(self) -> str:
        objects = "1 object keeps" if self.objects == 1 else f"{self.objects:,} objects keep"
        verb = "is" if self.objects == 1 else "are"
        parts = "1 part" if self.parts == 1 else f"{self.parts:,} parts"
        if self.objects:
            return f"{objects} failing and {verb} set aside, {parts} so far ({self.key}: {self.reason})"
        return f"{parts} set aside" if self.parts else ""


@dataclass(frozen=True, slots=True)
class MovedStatus:
    """Parts whose lane became this node's in the middle of a pass: its owner before may have drawn them, too."""

    parts: int = 0  # that this node drew
    left: int = 0  # that it has still to draw in this pass

    @property
    def words(self) -> str:
        if not self.parts and not self.left:
            return ""
        parts = "1 part" if self.parts == 1 else f"{self.parts:,} parts"
        more = f"; {self.left:,} more to come" if self.left else ""
        return f"{parts} drawn of lanes that another node had earlier in the pass and may have drawn, too{more}"


@dataclass(frozen=True, slots=True)
class Status:
    """Everything that ``growcache status --json`` prints."""

    state: State = "stopped"  # stopped: no supervisor lives
    waiting_for: str | None = None  # the event that lets the next permit out
    waiting_reason: str | None = None  # the same in one of a few words
    shards: int = 0  # live ones
    samples: int = 0  # of live shards
    bytes: int = 0  # allocated bytes that count against max_bytes
    max_bytes: int = 0  # in force; while the cache shrinks an earlier, larger one
    drawn: int = 0  # samples ever
    population: int | None = None  # parts; None while it is being listed, or endless
    population_samples: float | None = None  # estimated
    coverage: float | None = None  # 0..1
    evicted_samples: int = 0
    holes: int = 0  # visits that permanently yielded nothing
    empty_visits: int = 0  # objects too short for a window, or left out by a user's code
    failures: int = 0  # transient, per attempt
    reuse: float = 0.0  # samples delivered over samples drawn
    workers: int = 0  # living samplers
    samples_per_second: float = 0.0  # drawn lately
    bytes_per_second: float = 0.0  # read from the store lately
    leases: list[LeaseStatus] = field(default_factory=list)
    listing_complete: bool = False
    fingerprint: str | None = None
    generation: int = 0  # it grows with every replacement
    older_samples: int = 0  # that a replacement has not removed yet

    path: str = ""
    pid: int | None = None
    host: str = ""
    command: str = ""
    started_at: float | None = None
    updated_at: float | None = None
    uptime_seconds: float = 0.0

    target_bytes: int = 0  # the bound that the configuration asks for
    budget_bytes: int = 0  # the part of max_bytes for index, leases and ballast
    catalog_bytes: int = 0
    retired_bytes: int = 0  # on their way out, still held by readers
    retired_shards: int = 0
    reserved_bytes: int = 0  # promised to samplers that are writing now
    egress_bytes: int = 0  # read from the store in this run
    delivered: int = 0
    objects: int = 0
    retries: int = 0
    restarts: int = 0
    last_errors: list[str] = field(default_factory=list)
    worker_states: list[WorkerStatus] = field(default_factory=list)
    sample_bytes: int | None = None
    full: bool = False  # eviction, or its absence, keeps the cache at its bound
    complete: bool = False  # the whole population is cached
    ramping: bool = False  # shards are still smaller than later ones will be
    endless: bool = False  # the user's function draws: the number of samples is unknown
    wishes: int = 0  # shards that are refetched for readers
    purging: int = 0  # retired shards with purged samples, held by readers
    refetched_samples: int = 0
    subsets: list[SubsetStatus] = field(default_factory=list)  # of the split, once listed
    sources: list[SourceStatus] = field(default_factory=list)  # of several, once listed
    strata: list[StratumStatus] = field(
        default_factory=list
    )  # once listed, the most drawn first
    unmatched: int = 0  # objects without labels or partners (source.on_missing)
    left_out: dict[str, int] = field(
        default_factory=dict
    )  # by the listing: `.DS_Store`, empty …
    catalogs: list[str] = field(default_factory=list)  # shared ones that this run read or wrote
    set_aside: SetAsideStatus = field(default_factory=SetAsideStatus)
    moved: MovedStatus = field(default_factory=MovedStatus)
    foreign_leases: list[ForeignLeaseStatus] = field(default_factory=list)
    jobs: list[JobStatus] = field(default_factory=list)
    restart_for: list[str] = field(default_factory=list)  # changed settings

    def to_json(self) -> builtins.bytes:
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, data: builtins.bytes) -> Status:
        """Return what `to_json` wrote, without fields of another version. ValueError: it is damaged."""
        return _status_from_json(orjson.loads(data))


def left_out_text(counts: Mapping[str, int]) -> str:
    """Return counts in words.

    >>> left_out_text({"empty": 1, ".DS_Store": 2})
    '3 (.DS_Store 2, empty 1)'
    """
    rows = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    return (
        f"{sum(counts.values()):,} ({', '.join(f'{name} {count:,}' for name, count in rows)})"
    )


_NESTED: dict[str, type] = {
    "LeaseStatus": LeaseStatus, "WorkerStatus": WorkerStatus, "SubsetStatus": SubsetStatus,
    "SourceStatus": SourceStatus, "SetAsideStatus": SetAsideStatus, "JobStatus": JobStatus,
    "ForeignLeaseStatus": ForeignLeaseStatus, "WaitsStatus": WaitsStatus,
    "MovedStatus": MovedStatus, "StratumStatus": StratumStatus,
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),),
    "State": (str,),
}  # fmt: skip


def _status_from_json(values: object) -> Status:
    found: Status = _dataclass_from_json(Status, values)
    return found


def _dataclass_from_json(kind: type, values: object) -> Any:
    if type(values) is not dict:
        raise ValueError(f"expected a mapping of {kind.__name__}")
    declared = {f.name: str(f.type) for f in fields(kind)}
    kept = {k: _checked_value(declared[k], v) for k, v in values.items() if k in declared}
    try:
        return kind(**kept)
    except TypeError as error:  # something that has no default is missing
        raise ValueError(str(error)) from None


def _checked_value(kind: str, value: Any) -> Any:
    if kind in _NESTED:
        return _dataclass_from_json(_NESTED[kind], value)
    if kind.startswith("list["):
        if type(value) is not list:
            raise ValueError(f"expected a {kind}")
        return [_checked_value(kind[5:-1], item) for item in value]
    if kind == "dict[str, int]":
        if type(value) is not dict or any(type(count) is not int for count in value.values()):
            raise ValueError(f"expected a {kind}")
        return value
    known = [_TYPES[name] for name in kind.split(" | ") if name in _TYPES]
    if known and type(value) not in itertools.chain.from_iterable(known):
        raise ValueError(f"expected {kind}, found {type(value).__name__}")
    return value


def write_status(root: str | os.PathLike[str], status: Status) -> None:
    """Replace ``status.json``; it need not survive a power cut, nor be written on a full disk."""
    path = CacheLayout(root).status
    try:
        write_atomic(path, status.to_json(), durable=False)
    except OSError as error:
        if not is_full_disk(error):
            raise
        overwrite_in_place(path, _shorter_versions(status))


def _shorter_versions(status: Status) -> Iterator[builtins.bytes]:
    """Yield the status with ever fewer of its long lists."""
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
    """Return the service's last status, corrected by what can be seen now."""
    while True:
        layout = CacheLayout(root)
        try:
            return _read_status(layout)
        except CacheMissingError:  # also where another generation became the newest
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
    if not _is_of_holder(told, holder):  # a supervisor that has only just started
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
    """Remove what names keys from the last status of a service that runs no more."""
    layout = CacheLayout(root)
    if layout.status.exists():
        told = _read_status_file(layout)
        write_status(root, replace(told, last_errors=[], set_aside=SetAsideStatus()))


def service_silence(root: str | os.PathLike[str]) -> str:
    """Return in words what a silent service has to do first; empty where it answers, or begins."""
    layout = CacheLayout(root)
    return _silence_now(layout, _last_word(layout))


def _is_of_holder(told: Status, holder: Mapping[str, Any]) -> bool:
    """Whether the holder of the lock wrote that status. In containers one pid comes again and again."""
    began_before = told.started_at is not None and told.started_at < holder.get("since", 0)
    return told.pid == holder.get("pid") and not began_before


def _last_word(layout: CacheLayout) -> Status:
    """Return the status that the holder of the lock wrote last; of one that begins, who it is."""
    told, holder = _read_status_file(layout), lock_holder(layout.supervisor_lock)
    if _is_of_holder(told, holder):
        return told
    return Status(pid=holder.get("pid"), host=str(holder.get("host", "")), state="running")


@dataclass(frozen=True, slots=True)
class ServicePulse:
    """What a process that trains asks of the service, again and again."""

    runs: bool
    silence: str = ""  # in words what a silent service has to do first
    state: str = "stopped"
    waiting_for: str | None = None
    drawn: int = 0
    pid: int | None = None
    host: str = ""
    updated_at: float | None = None


def service_pulse(root: str | os.PathLike[str]) -> ServicePulse:
    """Return a service's sign of life. Cheaper than `read_status`: no lease and no index is read."""
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
    """Return in words what a silent service has to do first; ``told`` is its last status."""
    if stopped:
        return (
            f"the service to go on: its process is stopped by a signal; let it go on with: "
            f"kill -CONT {told.pid}"
        )
    seconds = now - told.updated_at if told.updated_at is not None else 0.0
    if seconds < SILENT_SECONDS:
        return ""
    return f"the service to answer: pid {told.pid} on {told.host} has said nothing for {seconds:.0f} s"


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
