"""The measurements of `growcache doctor` as plain values.

`doctor_measure` fills them in, and `doctor` judges them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from growcache.sampling.sizing import (
    ALIKE,
    GROUP_BYTES,
    SHARD_BYTES,
    SHARDS_IN_CACHE,
    shards_per_group,
)

StoreTrouble = Literal[
    "", "refused", "missing", "empty", "unreachable", "throttled", "unreadable"
]

SAMPLER_BYTES = 150_000_000  # of a sampler process without samples
GROUPS_HELD = 2  # per sampler: one is fetched while the other is written


@dataclass(frozen=True, slots=True)
class StoreFacts:
    url: str
    share: float = 1.0  # of the samples, if sources are mixed
    trouble: StoreTrouble = ""
    message: str = ""  # error, or reason why something is not measured
    listing_seconds: float | None = None  # to the first page
    objects: int = 0  # listed within the time limit
    first_byte_seconds: float | None = None  # latency of one byte on an open connection
    read_seconds: float | None = None  # of one read without others
    loaded_read_seconds: float | None = None  # of one read among others
    concurrency: int = 1  # reads in flight together
    reads: int = 0
    bytes: int = 0
    seconds: float = 0.0
    samples: float | None = None  # None: bytes were read, rather than samples
    sample_bytes: float | None = None  # of a sample's values
    read_bytes: int = 0  # of the largest read
    samples_per_read: float = 1.0
    cpu_share: float = 0.0  # of the time in which a process was busy with the reads
    throttled: int = 0  # answers 503, 429 and similar
    # Reads that failed permanently, by reason.
    failures: dict[str, int] = field(default_factory=dict)
    # Reads that got no answer or broke off, by reason.
    unanswered: dict[str, int] = field(default_factory=dict)
    clock_skew_seconds: float | None = None  # the store's clock minus this machine's

    @property
    def bytes_per_second(self) -> float | None:
        return self.bytes / self.seconds if self.seconds and self.bytes else None

    @property
    def samples_per_second(self) -> float | None:
        if self.samples is None or not self.seconds or not self.samples:
            return None
        return self.samples / self.seconds

    @property
    def throttled_share(self) -> float:
        return self.throttled / max(1, self.throttled + self.reads)


@dataclass(frozen=True, slots=True)
class DiskFacts:
    path: str  # of the cache
    measured_in: str = ""  # folder whose disk was measured; empty: none
    message: str = ""  # reason why something is not measured
    may_write: bool = True
    foreign: str = ""  # reason why the folder cannot be a cache
    file_system: str = "unknown"
    is_network: bool = False
    allows_network: bool = False
    write_bytes_per_second: float | None = None  # with a sync at the end
    read_bytes_per_second: float | None = None  # not from memory, if the system allows
    sync_seconds: float | None = None  # of a small write
    written_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    min_free_bytes: int = 0
    held_bytes: int = 0  # of the cache so far
    max_bytes: int = 0
    free_inodes: int | None = None  # None: the file system makes them as needed


@dataclass(frozen=True, slots=True)
class MachineFacts:
    cores: int = 1
    workers: int = 1  # on this machine
    workers_elsewhere: int = 0  # on nodes of a cluster, with a processor each
    concurrency: int = 1  # of one worker
    memory_bytes: int = 0  # of the machine, or of the control group
    available_bytes: int = 0
    needed_bytes: int = 0  # for the samplers
    files_limit: int = 1024  # RLIMIT_NOFILE, soft
    files_hard_limit: int = 1024
    now: float = 0.0  # wall clock, seconds since the epoch
    installed_at: float = 0.0  # time at which growcache's files were written
    node: str = ""  # with nodes: auto, the number of this machine and its launcher
    node_trouble: str = ""  # or the reason why there is none
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    consumed_per_second: float | None = None  # samples
    given: bool = False  # by --consume, and not measured
    job: str = ""
    wait_share: float | None = None  # of the time in which the loop waited for batches
    service_runs: bool = False
    drawn_per_second: float = 0.0  # by a service that ran during the measurement
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class DoctorFacts:
    stores: tuple[StoreFacts, ...]
    disk: DiskFacts
    machine: MachineFacts
    training: TrainingFacts = TrainingFacts()
    max_bytes_per_second: int | None = None  # a setting

    @property
    def sample_bytes(self) -> float | None:
        known = [(one.sample_bytes, one.share) for one in self.stores if one.sample_bytes]
        total = sum(share for _, share in known)
        return sum(size * share for size, share in known) / total if total else None


def needed_memory_bytes(
    *, workers: int, concurrency: int, max_bytes: int, read_bytes: int, samples_per_read: float
) -> int:
    """Return the approximate memory of samplers: two groups each, and the reads in flight.

    >>> round(needed_memory_bytes(workers=2, concurrency=16, max_bytes=10**10, read_bytes=65_536,
    ...     samples_per_read=1) / 1e6)
    558
    """
    shard = min(SHARD_BYTES, max_bytes // SHARDS_IN_CACHE)
    shards = shards_per_group(max(1, round(samples_per_read)), max(1, max_bytes))
    group = min(GROUP_BYTES, shard * min(shards, ALIKE))
    return workers * (SAMPLER_BYTES + GROUPS_HELD * group + concurrency * read_bytes)
