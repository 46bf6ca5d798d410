"""Leases as other processes see them: their bytes, their counters, and unreadable leases.

    magic · u32 length of header · u32 length of counters · counters · header (JSON) ·
    stage · one state per shard

Readers of an earlier version have no counters (`GCLEASE1`), and their leases protect like
others.

A lease may be unreadable because it belongs to another user or another version. It protects
every shard that was in the cache when it was first seen, because its reader cannot have taken
more. It does so while a process holds it, or while that is unknown. Nothing is opened that
could block, and no link is followed.
"""

from __future__ import annotations

import errno
import functools
import itertools
import math
import os
import stat
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from growcache.cache.files import CacheLayout, generation_in, generation_paths
from growcache.cache.folders import is_lease_name
from growcache.cache.locks import (
    _proc_locks,
    are_pids_ours,
    close_owned,
    flock_holder,
    flock_state,
    open_owned,
    try_lock,
)
from growcache.cache.system import is_process_running
from growcache.modes import ONE_USER_OR_GROUP

SUFFIX = ".lease"
MAGIC = b"GCLEASE2"
FIRST_MAGIC = b"GCLEASE1"  # without counters

COUNTERS_AT = len(MAGIC) + 8


MOST_LEASE_BYTES = 1 << 26  # of a valid lease, enough for 60 million shards
MOST_SHARD_NUMBER = 1 << 53
HEADERS_KEPT = 32  # headers never change, and are read ten times a second

# `MAPPED`: read, and its map is kept. `BEGUN`: the same, but a part of it has yet to be read, so
# a reader that dies and returns needs it.
HELD, MAPPED, READ, DROPPED, BEGUN = 0, 1, 2, 3, 4
# The stage of a lease. SETTLED: open, and shards that were retired before it was seen are
# dropped. The stage precedes the states, so a process that reads SETTLED reads states that were
# written before.
STAGE_OPEN, STAGE_CLOSED, STAGE_SETTLED = b"\0", b"\1", b"\2"


@dataclass(frozen=True, slots=True)
class RankNote:
    run: str  # identifies one start of the job
    walk: int  # number within the run
    pass_number: int
    rank: int  # among the ranks that share the cache; 0 leads
    ranks: int  # that share the cache
    follows: str = ""  # lease of rank 0 that this one copies
    settings: Mapping[str, Any] = field(default_factory=dict)  # must be equal on all ranks


class ReaderProcess(NamedTuple):
    host: str
    pid: int
    pid_namespace: int | None

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended.

        Those of other hosts and containers are invisible.
        """
        return are_pids_ours(self.host, self.pid_namespace) and not is_process_running(self.pid)


@dataclass(frozen=True)  # without slots, because of its cached property
class LeaseView:
    """A lease as other processes see it at one moment."""

    name: str  # of the file, without suffix
    job: str
    host: str
    pid: int  # within its namespace
    command: str
    created: float  # wall time
    open: bool  # its reader lives and holds it
    closed: bool  # its reader ended it properly
    numbers: tuple[int, ...]  # of its shards, ascending
    states: bytes  # one per shard, such as `HELD`
    wishes: Mapping[int, str] = field(default_factory=dict)  # digests to refetch, by number
    settled: bool = False  # all shards are present; others may copy that of rank 0
    ranks: RankNote | None = None
    counters: LeaseCounters | None = None  # None for readers of an earlier version
    lengths: Mapping[int, int] = field(default_factory=dict)  # samples of some wished shards
    generation: int = 0  # of the cache
    pid_namespace: int | None = None  # None for readers of an earlier version

    @property
    def process(self) -> ReaderProcess:
        return ReaderProcess(self.host, self.pid, self.pid_namespace)

    @property
    def resumable(self) -> bool:
        """Whether a dead reader may return for the rest, because it saved a state."""
        return not self.closed and (self.counters is None or self.counters.gave_state)

    @property
    def delivered(self) -> int | None:
        return self.counters.delivered if self.counters and self.counters.counts else None

    def holding(self) -> tuple[int, ...]:
        """Return the shards that the reader has mapped, or may still open or read."""
        return self._with(HELD, MAPPED, BEGUN)

    @property
    def holds(self) -> bool:
        return any(state in self.states for state in (HELD, MAPPED, BEGUN))

    def unread(self) -> tuple[int, ...]:
        return self._with(HELD)

    def unfinished(self) -> tuple[int, ...]:
        """Return the shards that the reader may still read, completely or in part."""
        return self._with(HELD, BEGUN)

    def used(self) -> tuple[int, ...]:
        """Return the shards that were read, whether they are still mapped or not.

        All ranks of a job together make one use, which the lease of rank 0 counts.
        """
        if self.ranks is not None and self.ranks.rank:
            return ()
        return self._with(MAPPED, READ, BEGUN)

    def kept(self) -> tuple[int, ...]:
        return self._with(HELD, MAPPED, READ, BEGUN)

    @functools.cached_property
    def wishing(self) -> Mapping[int, str]:
        if not self.open or not self.wishes:
            return {}
        return {
            number: self.wishes[number] for number in self.unread() if number in self.wishes
        }

    def _with(self, *wanted: int) -> tuple[int, ...]:
        # In C, because every poll calls this for every lease, and each may have all shards.
        chosen = self.states.translate(bytes(state in wanted for state in range(256)))
        return tuple(compress(self.numbers, chosen))


def protected_shards(lease: LeaseView, *, resumable: bool) -> tuple[int, ...]:
    """Return the protected shards.

    ``resumable``: the dead reader may return, without its maps.
    """
    if lease.open:
        return lease.holding()
    return lease.unfinished() if resumable and not lease.closed else ()


def read_leases(root: str | os.PathLike[str]) -> list[LeaseView]:
    return survey_leases(root)[0]


def survey_leases(
    root: str | os.PathLike[str],
) -> tuple[list[LeaseView], list[ForeignLease]]:
    """Return all visible leases by name, and the unreadable ones.

    Leases made during the scan are included. Otherwise a reader that makes a new lease before
    it ends the old one could be seen with neither.
    """
    layout, found = CacheLayout(root), dict[str, LeaseView | ForeignLease | None]()
    while new := [name for name in _lease_names(layout.leases) if name not in found]:
        found |= {name: _read_lease(layout, name) for name in new}
    seen = [found[name] for name in sorted(found)]
    return (
        [view for view in seen if isinstance(view, LeaseView)],
        [lease for lease in seen if isinstance(lease, ForeignLease)],
    )


def survey_all_leases(
    root: str | os.PathLike[str],
) -> tuple[list[LeaseView], list[ForeignLease]]:
    """Return the leases of every generation."""
    views: list[LeaseView] = []
    foreign: list[ForeignLease] = []
    for path in generation_paths(Path(root)):
        found = survey_leases(path)
        views += found[0]
        foreign += found[1]
    return views, foreign


def remove_torn_leases(layout: CacheLayout) -> None:
    """Remove unreadable leases that no process holds, as a power cut leaves them."""
    for lease in survey_leases(layout.root)[1]:
        if not is_lease_name(lease.path.name) or lease.protects or not lease.path.is_file():
            continue
        if not lease.path.is_symlink():
            with suppress(PermissionError):
                lease.path.unlink(missing_ok=True)


def lease_path(layout: CacheLayout, name: str) -> Path:
    return layout.leases / (name + SUFFIX)


def _lease_names(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    yield entry.name
    except FileNotFoundError:
        return


def _read_lease(layout: CacheLayout, name: str) -> LeaseView | ForeignLease | None:
    path = layout.leases / name
    try:
        # No link is followed, and a pipe is not waited for, because other users may write here.
        descriptor = open_owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return refused_lease(path, error, layout.supervisor_lock)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return lease_that_is_no_file(path, status)
        # The check whether it is open comes before the read. Otherwise a close in between would
        # look like a dead reader with unread shards.
        is_open = not try_lock(descriptor, shared=True)
        data = os.pread(descriptor, min(status.st_size, MOST_LEASE_BYTES), 0)
    finally:
        close_owned(descriptor)
    return _parse_lease(path, data, is_open) or unreadable_lease(path, status, held=is_open)


def _parse_lease(path: Path, data: bytes, is_open: bool) -> LeaseView | None:
    try:
        start, length, counters = split_lease(data)
        flag, states = data[start + length : start + length + 1], data[start + length + 1 :]
        if not flag:
            return None
        return LeaseView(
            name=path.name.removesuffix(SUFFIX),
            open=is_open,
            closed=flag == STAGE_CLOSED,
            states=states,
            settled=flag == STAGE_SETTLED,
            counters=counters,
            generation=generation_in(path.parent.parent) or 0,
            **parse_header(data[start : start + length], len(states)),
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def split_lease(data: bytes) -> tuple[int, int, LeaseCounters | None]:
    """Return start and length of the header, and the counters. May raise ValueError."""
    magic = data[: len(MAGIC)]
    if magic == FIRST_MAGIC:
        (length,) = struct.unpack_from("<I", data, len(MAGIC))
        return len(MAGIC) + 4, length, None
    if magic != MAGIC:
        raise ValueError("not a lease")
    length, counted = struct.unpack_from("<II", data, len(MAGIC))
    start = COUNTERS_AT + counted
    return start, length, _parse_counters(data[COUNTERS_AT:start])


def _parse_counters(data: bytes) -> LeaseCounters:
    try:
        return LeaseCounters.unpack(data)
    except ValueError:  # a flipped bit there must not cost the reader its shards
        return LeaseCounters(gave_state=True)


@functools.lru_cache(maxsize=HEADERS_KEPT)
def parse_header(data: bytes, states: int) -> Mapping[str, Any]:
    header: dict[str, Any] = orjson.loads(data)
    return {
        "job": _checked_text(header["job"]),
        "host": _checked_text(header["host"]),
        "pid": int(header["pid"]),
        "pid_namespace": header.get("pid_namespace"),
        "command": _checked_text(header["command"]),
        "created": float(header["created"]),
        "numbers": _parse_ranges(header["numbers"], states),
        "wishes": {
            _checked_number(n): _checked_text(digest) for n, digest in header.get("wishes", ())
        },
        "lengths": {
            _checked_number(n): _checked_number(samples)
            for n, samples in header.get("lengths", ())
        },
        "ranks": _parse_rank_note(**header["ranks"]) if header.get("ranks") else None,
    }


def _parse_ranges(ranges: Iterable[tuple[int, int]], expected: int) -> tuple[int, ...]:
    """Return the numbers of ranges [first, count]. A damaged header may claim 10^15 shards."""
    pairs = [(_checked_number(first), _checked_number(count)) for first, count in ranges]
    if sum(count for _, count in pairs) != expected:
        raise ValueError("expected as many numbers as states")
    return tuple(itertools.chain.from_iterable(range(n, n + count) for n, count in pairs))


def _checked_number(value: object) -> int:
    if type(value) is not int or not 0 <= value < MOST_SHARD_NUMBER:
        raise ValueError(f"not the number of a shard: {value!r}")
    return value


def _parse_rank_note(**said: Any) -> RankNote:
    note = RankNote(**said)
    for text in (note.run, note.follows):
        _checked_text(text)
    numbers = (note.walk, note.pass_number, note.rank, note.ranks)
    if not all(type(n) is int for n in numbers) or not isinstance(note.settings, Mapping):
        raise ValueError("not the note of a rank")
    return note


def _checked_text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("not a text")
    return value


# Upper bounds of the histogram of waits, in seconds. One more bucket has the longer waits.
WAIT_BOUNDS = (
    *(100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
WAIT_BUCKETS = len(WAIT_BOUNDS) + 1

# flags · progress_at · epoch · pass · delivered · batches · waits · wait_seconds · buckets. The
# remaining space is for later fields, which read as zeros if they were never written.
_FIELDS = struct.Struct("<Qd5Qd24Q")
COUNTERS_BYTES = 512
_MOST_COUNT = 1 << 53  # larger than any counter of a valid lease

_GAVE_STATE, _COUNTS = 1, 2


@dataclass(slots=True)
class LeaseCounters:
    gave_state: bool = False  # by state_dict(), or resumed, so it may return for the rest
    counts: bool = False  # if False, its uses show what was delivered
    progress_at: float = 0.0  # wall time of the last sample that the loop received
    epoch: int = 0
    pass_number: int = 0
    delivered: int = 0  # samples that the loop received
    batches: int = 0
    waits: int = 0  # batches later than the first of WAIT_BOUNDS
    wait_seconds: float = 0.0  # without a batch, in total
    # Of these waits. The first bucket is empty, because batches without a wait are the
    # difference.
    histogram: list[int] = field(default_factory=lambda: [0] * WAIT_BUCKETS)

    def receive(self, samples: int, now: float) -> None:
        self.delivered += samples
        self.batches += 1
        self.progress_at = now

    def wait(self, seconds: float) -> None:
        """Count a time without a batch.

        >>> counters = LeaseCounters()
        >>> counters.wait(0.00002), counters.wait(0.3), counters.wait(99.0)
        (None, None, None)
        >>> counters.waits, counters.histogram[11], counters.histogram[-1]
        (2, 1, 1)
        """
        self.wait_seconds += seconds
        if seconds > WAIT_BOUNDS[0]:
            self.waits += 1
            self.histogram[bisect_left(WAIT_BOUNDS, seconds)] += 1

    def pack(self) -> bytes:
        flags = _GAVE_STATE * self.gave_state | _COUNTS * self.counts
        buckets = self.histogram + [0] * (24 - WAIT_BUCKETS)
        return _FIELDS.pack(
            *(flags, self.progress_at, self.epoch, self.pass_number, self.delivered),
            *(self.batches, self.waits, self.wait_seconds, *buckets),
        )

    @classmethod
    def unpack(cls, data: bytes) -> LeaseCounters:
        """Return the counters that `pack` wrote.

        Missing fields are zero. May raise ValueError.
        """
        padded = data[: _FIELDS.size].ljust(_FIELDS.size, b"\0")
        fields = _FIELDS.unpack(padded)
        flags, at, epoch, pass_number, delivered, batches, waits, seconds = fields[:8]
        buckets = list(fields[8 : 8 + WAIT_BUCKETS])
        whole = max(epoch, pass_number, delivered, batches, waits, *buckets) < _MOST_COUNT
        if not (whole and math.isfinite(at) and 0 <= seconds < math.inf):
            raise ValueError("not the counters of a reader")
        return cls(
            gave_state=bool(flags & _GAVE_STATE),
            counts=bool(flags & _COUNTS),
            progress_at=at,
            epoch=epoch,
            pass_number=pass_number,
            delivered=delivered,
            batches=batches,
            waits=waits,
            wait_seconds=seconds,
            histogram=buckets,
        )


@dataclass(frozen=True, slots=True)
class ForeignLease:
    path: Path
    reason: str
    uid: int  # of its owner
    pid: int | None  # of the process that holds it, if the kernel tells
    held: bool | None  # whether a process holds it; None if unknown
    opened: bool = False  # its content was readable, but not a lease

    @property
    def protects(self) -> bool:
        """Whether a reader with unknown shards may exist."""
        return self.held is not False

    @property
    def advice(self) -> str:
        if not self.protects:
            return "it protects nothing and may be removed"
        ending = "it protects all samples that were cached before it, until its reader ends"
        if self.uid != os.geteuid():
            ending += f"; this is uid {os.geteuid()}, not {self.uid}: {ONE_USER_OR_GROUP}"
        if self.held is None:
            ending += f"; if its reader is gone, remove it: rm {self.path}"
        return ending

    def __str__(self) -> str:
        pid = f", pid {self.pid}" if self.pid is not None else ""
        return (
            f"the lease {self.path.name} of uid {self.uid}{pid} cannot be read ({self.reason})"
        )


def refused_lease(path: Path, error: OSError, known: Path) -> ForeignLease | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return lease_that_is_no_file(path, status)
    held, pid = flock_state(status, known)
    reason = "no permission" if error.errno in _NO_PERMISSION else os.strerror(error.errno or 0)
    return ForeignLease(path, reason, status.st_uid, pid, held)


_NO_PERMISSION = (errno.EACCES, errno.EPERM)


def unreadable_lease(path: Path, status: os.stat_result, *, held: bool) -> ForeignLease:
    pid = flock_holder(status.st_ino, _proc_locks()) if held else None
    reason = (
        "its content is of another version, or damaged" if status.st_size else "it is empty"
    )
    return ForeignLease(path, reason, status.st_uid, pid, held, opened=True)


def lease_that_is_no_file(path: Path, status: os.stat_result) -> ForeignLease:
    return ForeignLease(path, _kind_of_file(status.st_mode), status.st_uid, None, False)


def _kind_of_file(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "it is a symbolic link",
        stat.S_IFDIR: "it is a directory",
        stat.S_IFIFO: "it is a pipe",
    }
    return kinds.get(stat.S_IFMT(mode), "it is not a file")


def foreign_leases_message(foreign: Sequence[ForeignLease]) -> str:
    holding = [lease for lease in foreign if lease.protects]
    if not holding:
        return ""
    more = f" (and {len(holding) - 1} more like it)" if len(holding) > 1 else ""
    return f"{holding[0]}{more}: {holding[0].advice}"
