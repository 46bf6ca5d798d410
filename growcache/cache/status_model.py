"""The content of a status, as ``growcache status --json`` prints it, and its parser. Pure."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import orjson

State = Literal["running", "complete", "full", "waiting", "shrinking", "stopped"]


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
    seconds_left: float | None = None  # of the hold, if the reader is dead
    generation: int = 0  # of the samples that it reads
    # In which the pid is valid; each container of a pod has its own.
    pid_namespace: int | None = None


@dataclass(frozen=True, slots=True)
class ForeignLeaseStatus:
    name: str
    reason: str
    uid: int  # of its owner
    pid: int | None  # of the process that holds it, if known
    held: bool | None  # None if unknown
    advice: str  # what it keeps, and what to do about it


@dataclass(frozen=True, slots=True)
class WaitsStatus:
    """How often, and how long in total, the loops of a job waited for batches."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    name: str
    delivered: int  # samples that its loops received
    reuse: float  # the same, divided by the drawn samples
    epoch: int  # latest one that was started
    pid: int  # of its latest reader
    waits: WaitsStatus
    open: bool = False  # whether a reader of the job lives
    batches: int = 0  # that its loops received


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    id: int  # its place, from 0; a restarted worker keeps it
    pid: int | None = None  # None while it is (re)started
    state: str = "starting"  # or idle, reading, writing, waiting, stopping, restarting
    permit: str | None = None  # None when idle
    parts_done: int = 0  # visits made for the current permit
    parts: int = 0  # visits in the permit
    node: str | None = None  # of a Ray cluster; None on this machine


@dataclass(frozen=True, slots=True)
class SourceStatus:
    url: str
    share: float  # of the drawn samples
    objects: int
    samples: float  # estimated
    rounds: float  # how often each of its samples was drawn, on average


@dataclass(frozen=True, slots=True)
class StratumStatus:
    name: str  # empty if the row sums up several
    parts: int  # that this machine may draw
    drawn: int  # visits, since the cache began
    coverage: float  # share of its parts that were drawn
    strata: int = 1  # in the row


@dataclass(frozen=True, slots=True)
class SubsetStatus:
    name: str
    used: bool  # whether this cache draws from it
    objects: int
    groups: int  # groups of its objects
    samples: float  # estimated


@dataclass(frozen=True, slots=True)
class SetAsideStatus:
    """Objects that keep failing while the store serves others."""

    parts: int = 0  # drawn, but in no shard yet; they follow when their objects answer
    objects: int = 0
    key: str = ""  # of the latest such object
    reason: str = ""
    seconds: float = 0.0  # until the first of them is retried

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
    """Parts whose lane moved to this node within a pass.

    The previous owner may have drawn them, too.
    """

    parts: int = 0  # that this node drew
    left: int = 0  # that this node has yet to draw in this pass

    @property
    def words(self) -> str:
        if not self.parts and not self.left:
            return ""
        parts = "1 part" if self.parts == 1 else f"{self.parts:,} parts"
        more = f"; {self.left:,} more to come" if self.left else ""
        return f"{parts} drawn from lanes that another node owned earlier in the pass and may have drawn as well{more}"


@dataclass(frozen=True, slots=True)
class Status:
    """Everything that ``growcache status --json`` prints."""

    state: State = "stopped"  # stopped: no supervisor lives
    waiting_for: str | None = None  # event that allows the next permit
    waiting_reason: str | None = None  # the same as one of a few words
    shards: int = 0  # live ones
    samples: int = 0  # of live shards
    bytes: int = 0  # allocated bytes that count against max_bytes
    max_bytes: int = 0  # in force; while the cache shrinks, the earlier, larger one
    drawn: int = 0  # samples ever
    population: int | None = None  # parts; None during the listing, or if endless
    population_samples: float | None = None  # estimated
    coverage: float | None = None  # 0..1
    evicted_samples: int = 0
    holes: int = 0  # visits that permanently yielded nothing
    empty_visits: int = 0  # objects too short for a window, or left out by user code
    failures: int = 0  # transient, per attempt
    reuse: float = 0.0  # samples delivered over samples drawn
    workers: int = 0  # living samplers
    samples_per_second: float = 0.0  # drawn recently
    bytes_per_second: float = 0.0  # read from the store recently
    leases: list[LeaseStatus] = field(default_factory=list)
    listing_complete: bool = False
    fingerprint: str | None = None
    generation: int = 0  # grows with every replacement
    older_samples: int = 0  # that a replacement has not removed yet

    path: str = ""
    pid: int | None = None
    host: str = ""
    command: str = ""
    started_at: float | None = None
    updated_at: float | None = None
    uptime_seconds: float = 0.0

    target_bytes: int = 0  # bound in the configuration
    budget_bytes: int = 0  # part of max_bytes for index, leases and ballast
    catalog_bytes: int = 0
    retired_bytes: int = 0  # being removed, but still held by readers
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
    ramping: bool = False  # shards are still smaller than later ones
    endless: bool = False  # user code draws, so the number of samples is unknown
    wishes: int = 0  # shards that are being refetched for readers
    purging: int = 0  # retired shards with purged samples, held by readers
    refetched_samples: int = 0
    subsets: list[SubsetStatus] = field(default_factory=list)  # of the split, after the listing
    sources: list[SourceStatus] = field(default_factory=list)  # of several, after the listing
    # After the listing, most drawn first.
    strata: list[StratumStatus] = field(default_factory=list)
    unmatched: int = 0  # objects without labels or partners (source.on_missing)
    # From the listing: `.DS_Store`, empty …
    left_out: dict[str, int] = field(default_factory=dict)
    catalogs: list[str] = field(default_factory=list)  # shared ones that this run read or wrote
    set_aside: SetAsideStatus = field(default_factory=SetAsideStatus)
    moved: MovedStatus = field(default_factory=MovedStatus)
    foreign_leases: list[ForeignLeaseStatus] = field(default_factory=list)
    jobs: list[JobStatus] = field(default_factory=list)
    restart_for: list[str] = field(default_factory=list)  # changed settings
    ended_by: str | None = None  # the error that ended the service

    def to_json(self) -> builtins.bytes:
        return orjson.dumps(self)

    def loop_count(self, job: str) -> int:
        """Return the number of processes that read the cache for a job."""
        open_leases = (lease for lease in self.leases if lease.open and lease.job == job)
        return len({(one.host, one.pid_namespace, one.pid) for one in open_leases})

    @classmethod
    def from_json(cls, data: builtins.bytes) -> Status:
        """Return the status that `to_json` wrote, without fields of another version.

        Raises:
            ValueError: The data are damaged.
        """
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
    except TypeError as error:  # a field without a default is missing
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
