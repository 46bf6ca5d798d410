"""Leases: how a reader keeps the shards of its snapshot from being evicted.

A lease is a file that its reader holds with flock, so the kernel frees it when the reader
dies. It has one byte per shard, which the reader moves on as its epoch does. It may name
shards that are not there, with their digests: its *wishes* (`growcache.cache.wishes`).
Where several ranks of a job read one snapshot, it says so.

    magic · u32 length of header · u32 length of counters · counters · header (JSON) ·
    stage · one state per shard

Readers of an earlier version have no counters (`GCLEASE1`); theirs protect as any do. What
cannot be read at all is a `ForeignLease`. Leases take room that the bound sets aside for them,
so a reader takes the lock of their directory, and makes none that finds no room.

The reader owns the file's content, the supervisor its removal. What makes the pair safe
without a lock between them: the reader makes its lease visible, *then* reads the index
again and drops what was retired; the evictor commits *retired*, *then* reads the leases.
Until it has dropped that, a lease may name shards that are being deleted; then its reader
*settles* it, and others may rely on what it holds.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import stat
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import orjson

from growcache.cache.ballast import is_full_disk
from growcache.cache.files import Layout, allocated, block_bytes
from growcache.cache.foreign_leases import ForeignLease, no_file, refused, unintelligible
from growcache.cache.lease_counters import COUNTERS_BYTES, Counters
from growcache.cache.locks import (
    LEASES_VERSION,
    FileLock,
    close_owned,
    holder,
    is_held,
    open_owned,
    this_process,
    try_lock,
)
from growcache.cache.names import is_lease
from growcache.cache.sigterm import at_sigterm, release_at_sigterm
from growcache.errors import CacheError, CacheFullError, LeasesFullError

SUFFIX = ".lease"
MAGIC = b"GCLEASE2"
FIRST_MAGIC = b"GCLEASE1"  # without counters

COUNTERS_AT = len(MAGIC) + 8

COUNT_SECONDS = 0.2  # between two notes of what was delivered
ROOM_SECONDS = 1.0  # for which a reader waits for the room of leases that are over
CREATE_SECONDS = 10.0  # for which it waits for others that make theirs
PAUSE_SECONDS = 0.02

MOST_BYTES = 1 << 26  # of a lease that is believed: it names 60 million shards
MOST_NUMBER = 1 << 53
HEADERS_KEPT = 32  # they never change, and are looked at ten times a second

# MAPPED: read, and its map is kept. BEGUN: the same, but a part of it is still to be read,
# so that a reader which dies and comes back needs it.
HELD, MAPPED, READ, DROPPED, BEGUN = 0, 1, 2, 3, 4
# The stage of a lease. SETTLED: open, and what was retired before it was seen is dropped.
# It stands before the states: who finds it there reads states that were written before.
_OPEN, _CLOSED, _SETTLED = b"\0", b"\1", b"\2"


@dataclass(frozen=True, slots=True)
class RankNote:
    """What the lease of one rank of a job says to the other ranks.

    Attributes:
        run: names one start of the job; a job that is started anew has another.
        walk: the how-manieth walk over the cache of this run it is.
        pass_number: the pass that the lease is for.
        rank: of its reader, among those that share the cache; 0 leads.
        ranks: how many share the cache.
        follows: the name of the lease of rank 0 that this one copies; empty for rank 0.
        settings: what must be alike on all ranks, by the names of the arguments.
    """

    run: str
    walk: int
    pass_number: int
    rank: int
    ranks: int
    follows: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class Lease:
    """A reader's hold on shards; it ends with `close`, garbage collection or the process.

    Attributes:
        numbers: the shards it was made for, ascending, those it wishes for among them.
        wishes: the digest that each of the shards must have that it wishes for.
        path: of its file.
    """

    def __init__(
        self, file: _LeaseFile, numbers: tuple[int, ...], wishes: Mapping[int, str]
    ) -> None:
        self.numbers = numbers
        self.wishes = wishes
        self.path = file.path
        self._file = file
        self._places = {number: place for place, number in enumerate(numbers)}
        self._finalizer = weakref.finalize(self, file.close)

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str],
        job: str,
        numbers: Iterable[int],
        *,
        wishes: Mapping[int, str] | None = None,
        ranks: RankNote | None = None,
        room_bytes: int | None = None,
        counters: Counters | None = None,
    ) -> Lease:
        """Return a lease that the supervisor sees from now on.

        Afterwards the caller reads the index (again) and drops the shards that are not
        live any more; only then may it open the others. What it wished for it keeps: those
        shards come, or are refused (`growcache.cache.wishes.outcomes`).

        Args:
            root: of the cache.
            job: whose uses are counted.
            numbers: the shards to protect; those of ``wishes`` are added.
            wishes: the digest by shard number. Shards that are live may be named too: they
                stay so, and come back where they were just retired.
            ranks: for the other ranks of the job.
            room_bytes: that all leases together may take; None: as many as there are.
            counters: of the reader, where it counts what it delivers.

        Raises:
            CacheError: the leases directory cannot be written, or the service heeds no leases
                of this version.
            LeasesFullError: others take all the room that there is for leases.
            CacheFullError: the disk has not one block left.
        """
        wished = dict(sorted((wishes or {}).items()))
        wanted = tuple(sorted({*numbers, *wished}))
        layout = Layout(root)
        _refuse_old_service(layout)
        release_at_sigterm()
        header = orjson.dumps(
            {
                **this_process(),
                "job": job,
                "created": time.time(),
                "numbers": _ranges(wanted),
                "wishes": list(wished.items()),
                "ranks": ranks,
            }
        )
        start = COUNTERS_AT + COUNTERS_BYTES + len(header)
        sizes = struct.pack("<II", len(header), COUNTERS_BYTES)
        said = (counters or Counters()).pack().ljust(COUNTERS_BYTES, b"\0")
        body = MAGIC + sizes + said + header + _OPEN + bytes(len(wanted))
        try:
            path, descriptor = _show(layout, body, room_bytes)
        except LeasesFullError:
            raise
        except OSError as error:
            raise _creation_error(layout, error) from error
        file = _LeaseFile(layout, path, descriptor, start, len(wanted), counters)
        return cls(file, wanted, wished)

    @property
    def name(self) -> str:
        """The name of its file, without suffix, as `LeaseView` has it."""
        return self.path.name.removesuffix(SUFFIX)

    def drop(self, numbers: Iterable[int]) -> None:
        """Let go of shards that were not read (retired ones, or those left out)."""
        self._set(numbers, DROPPED)

    def mark_begun(self, *numbers: int) -> None:
        """Count a use of the shards, of which more will be read; they are mapped."""
        self._set(numbers, BEGUN)

    def mark_read(self, *numbers: int, mapped: bool) -> None:
        """Count a use of the shards, once; they are protected for as long as they are mapped."""
        self._set(numbers, MAPPED if mapped else READ)

    def settle(self) -> None:
        """Say that all it still holds is there, and stays: others may rely on that."""
        self._file.settle()

    def count(self, samples: int) -> None:
        """Count samples as delivered; that is noted a few times a second, and at the end."""
        self._file.count(samples)

    def keep_for_service(self) -> None:
        """Leave the file to the next service even where none runs when it is closed.

        Until then it says itself what was used, so that limits on reuse hold without a service.
        """
        self._file.kept = True

    def _set(self, numbers: Iterable[int], state: int) -> None:
        self._file.write_states([self._places[number] for number in numbers], state)

    @property
    def closed(self) -> bool:
        """Whether it protects nothing any more."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End the lease; its uses are counted by the supervisor. Twice is harmless."""
        self._finalizer()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _show(layout: Layout, body: bytes, room_bytes: int | None) -> tuple[Path, int]:
    """Return the path of a new lease that everybody can see, and the descriptor that holds it."""
    deadline = time.monotonic() + ROOM_SECONDS
    while True:
        # One at a time: two that each find room for one lease would make two.
        with FileLock.of_directory(layout.leases, CREATE_SECONDS):
            taken = _allocated(layout) if room_bytes is not None else 0
            if room_bytes is None or taken + block_bytes(len(body)) <= room_bytes:
                return _make(layout, body)
        if time.monotonic() >= deadline:  # those that are over are removed within a moment
            raise LeasesFullError(_no_room(layout, room_bytes))
        time.sleep(PAUSE_SECONDS)


def _make(layout: Layout, body: bytes) -> tuple[Path, int]:
    name = uuid.uuid4().hex
    hidden, path = layout.leases / f".{name}.tmp", layout.leases / (name + SUFFIX)
    descriptor = open_owned(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        # Locked and filled before anybody can see it: an unlocked or half-written
        # lease would be taken for that of a dead reader.
        try_lock(descriptor)
        if os.pwrite(descriptor, body, 0) != len(body):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _give_to_owner(layout, descriptor)
        hidden.rename(path)
    except BaseException:
        close_owned(descriptor)
        hidden.unlink(missing_ok=True)
        raise
    return path, descriptor


def _give_to_owner(layout: Layout, descriptor: int) -> None:
    """Let the service read what root made, as in a container: it may run as another user."""
    if os.geteuid() == 0 and (owner := layout.leases.stat()).st_uid != 0:
        with suppress(PermissionError):  # a root that may not do that
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _allocated(layout: Layout) -> int:
    """Return what all leases take; blocks that the disk has promised, and not given, count."""
    with os.scandir(layout.leases) as entries:
        paths = [entry.path for entry in entries]
    return sum(map(allocated, map(Path, paths)))


def _no_room(layout: Layout, room_bytes: int | None) -> str:
    views, _ = survey_leases(layout.root)
    held = sum(view.open for view in views)
    return (
        f"no room for another lease in {layout.leases}: {held} snapshots are held"
        f"{_and_dead(len(views) - held)}, and the bound of this cache leaves {room_bytes:,} bytes "
        "for leases; close snapshots, or raise cache.max_bytes"
    )


def _and_dead(number: int) -> str:
    return f" ({number} more have ended, see growcache release)" if number else ""


def _refuse_old_service(layout: Layout) -> None:
    """Refuse a service that would not heed this lease, and delete shards under its reader.

    Raises:
        CacheError: such a service runs.
    """
    told = holder(layout.supervisor_lock)
    if told.get("leases", LEASES_VERSION if not told else 1) >= LEASES_VERSION:
        return
    if is_held(layout.supervisor_lock):
        raise CacheError(
            f"the service that fills {layout.root} (pid {told.get('pid')} on {told.get('host')}) "
            "is of an earlier growcache and would not heed this reader; stop it and start it "
            "again with: growcache run CONFIG"
        )


def _creation_error(layout: Layout, error: OSError) -> CacheError:
    """Return what it means that no lease can be made, and what to do."""
    if is_full_disk(error):
        return CacheFullError(f"no room for a lease in {layout.leases}: {error}")
    text = f"cannot write a lease in {layout.leases}: {error.strerror}; "
    if error.errno == errno.EROFS:
        return CacheError(
            f"{text}a reader notes there what it reads, so mount the cache's folder writable "
            "(docker run -v HOST:CACHE, without :ro)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        owner = _owner(layout)
        return CacheError(
            f"{text}this process is of uid {os.geteuid()}, and the folder {owner}; run reader and "
            "service as one user (docker run --user UID:GID)"
        )
    return CacheError(
        f"{text}a reader must be able to write there, or the supervisor cannot know of it"
    )


def _owner(layout: Layout) -> str:
    try:
        found = layout.leases.stat()
    except OSError:
        return "cannot be looked into"
    return f"of uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}"


class _LeaseFile:
    """The open file of a lease, apart from `Lease` so that a finalizer can hold it.

    In a forked child it is inert: the lease stays the parent's. Threads take turns, or one
    would write into what another just closed; a finalizer may run in the midst of either.
    """

    def __init__(
        self,
        layout: Layout,
        path: Path,
        descriptor: int,
        start: int,
        shards: int,
        counters: Counters | None,
    ) -> None:
        self.path = path
        self._counters = counters
        self._counted_at = time.monotonic()
        self._uncounted = False  # whether something is to be noted yet
        self._states = bytearray(shards)
        self._layout = layout
        self._descriptor = descriptor
        self._start = start
        self._pid = os.getpid()
        self._open = True
        self.kept = False  # though no service counts it
        self._turn = threading.RLock()
        _open_files.add(self)

    def write_states(self, places: Sequence[int], state: int) -> None:
        if self._pid != os.getpid() or not places:
            return
        first, stop = min(places), max(places) + 1
        with self._turn:
            for place in places:
                self._states[place] = state
            if (
                self._open
            ):  # in one call: each lets go of the GIL, which may be long in coming back
                os.pwrite(self._descriptor, self._states[first:stop], self._start + 1 + first)

    def settle(self) -> None:
        if self._pid != os.getpid():
            return
        with self._turn:
            if self._open:
                os.pwrite(self._descriptor, _SETTLED, self._start)

    def count(self, samples: int) -> None:
        if self._pid != os.getpid() or self._counters is None:
            return
        with self._turn:
            self._counters.receive(samples, time.time())
            self._uncounted = True
            if time.monotonic() - self._counted_at >= COUNT_SECONDS:
                self._note_counters()

    def _note_counters(self) -> None:
        if self._open and self._uncounted and self._counters is not None:
            os.pwrite(self._descriptor, self._counters.pack(), COUNTERS_AT)
            self._uncounted, self._counted_at = False, time.monotonic()

    def end_at_sigterm(self) -> None:
        """Note that the reader ended in good order; the process dies at once, and frees the rest.

        What another thread does with the file at this moment is waited for, though not long.
        """
        if self._pid == os.getpid() and self._turn.acquire(timeout=PAUSE_SECONDS):
            if self._open:
                self._note_counters()
                os.pwrite(self._descriptor, _CLOSED, self._start)
            self._turn.release()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._turn:
            if not self._open:
                return
            try:
                self._note_counters()
                self._open = False
                os.pwrite(self._descriptor, _CLOSED, self._start)
            finally:
                self._open = False
                close_owned(self._descriptor)
        # While a supervisor lives the file is its receipt for the uses.
        if not self.kept and not is_held(self._layout.supervisor_lock):
            self.path.unlink(missing_ok=True)


_open_files: weakref.WeakSet[_LeaseFile] = weakref.WeakSet()


def _end_all_at_sigterm() -> None:
    for file in list(_open_files):
        file.end_at_sigterm()


at_sigterm(_end_all_at_sigterm)


@dataclass(frozen=True)  # without slots, for the sake of what is found once and kept
class LeaseView:
    """A lease as others see it at one moment.

    Attributes:
        name: of the file, without suffix.
        job: whose uses it counts for.
        host: where its reader runs or ran.
        pid: of the reader; for messages only.
        command: of the reader.
        created: wall time.
        open: whether its reader lives and holds it.
        closed: whether the reader ended it in good order.
        numbers: its shards, ascending.
        states: one of HELD, MAPPED, READ, DROPPED, BEGUN per shard.
        wishes: the digests of those that must come, or come back, by number.
        settled: whether all that it holds is there, as `growcache.loading.resume` proves; of
            rank 0 of a job besides, whether the others may copy its list.
        ranks: what it says to other ranks of its job; None where it is of none.
        counters: what its reader received; None where a reader of an earlier version has it.
    """

    name: str
    job: str
    host: str
    pid: int
    command: str
    created: float
    open: bool
    closed: bool
    numbers: tuple[int, ...]
    states: bytes
    wishes: Mapping[int, str] = field(default_factory=dict)
    settled: bool = False
    ranks: RankNote | None = None
    counters: Counters | None = None

    @property
    def resumable(self) -> bool:
        """Whether its reader, if it died, may come back for the rest: it gave a state."""
        return not self.closed and (self.counters is None or self.counters.gave_state)

    @property
    def delivered(self) -> int | None:
        """The samples that its loop received; None where its reader does not count them."""
        return self.counters.delivered if self.counters and self.counters.counts else None

    def holding(self) -> tuple[int, ...]:
        """Return the shards that the reader would still open or read, or has mapped."""
        return self._with(HELD, MAPPED, BEGUN)

    @property
    def holds(self) -> bool:
        """Whether there is any shard that `holding` returns."""
        return any(state in self.states for state in (HELD, MAPPED, BEGUN))

    def unread(self) -> tuple[int, ...]:
        """Return the shards that were neither read nor dropped."""
        return self._with(HELD)

    def unfinished(self) -> tuple[int, ...]:
        """Return the shards of which the reader would still read all or a part."""
        return self._with(HELD, BEGUN)

    def used(self) -> tuple[int, ...]:
        """Return the shards that were read, mapped still or not.

        Each rank of a job reads a part of every shard. Together that is one use, which the
        lease of rank 0 counts; the others protect, and count nothing.
        """
        if self.ranks is not None and self.ranks.rank:
            return ()
        return self._with(MAPPED, READ, BEGUN)

    def kept(self) -> tuple[int, ...]:
        """Return the shards that were not dropped."""
        return self._with(HELD, MAPPED, READ, BEGUN)

    @functools.cached_property
    def wishing(self) -> Mapping[int, str]:
        """The wishes that its reader still waits for, or has not read yet."""
        if not self.open or not self.wishes:
            return {}
        return {
            number: self.wishes[number] for number in self.unread() if number in self.wishes
        }

    def _with(self, *wanted: int) -> tuple[int, ...]:
        # In C, for every poll asks this of every lease, and each may name all shards.
        chosen = self.states.translate(bytes(state in wanted for state in range(256)))
        return tuple(compress(self.numbers, chosen))


def protected(lease: LeaseView, *, resumable: bool) -> tuple[int, ...]:
    """Return the shards that must not be deleted because of this lease.

    Args:
        lease: as it was just read.
        resumable: whether its reader died so lately that it may come back for the rest;
            its maps died with it.
    """
    if lease.open:
        return lease.holding()
    return lease.unfinished() if resumable and not lease.closed else ()


def read_leases(root: str | os.PathLike[str]) -> list[LeaseView]:
    """Return all leases that can be read, in order of name; see `survey_leases`."""
    return survey_leases(root)[0]


def survey_leases(
    root: str | os.PathLike[str],
) -> tuple[list[LeaseView], list[ForeignLease]]:
    """Return all leases that are visible now, in order of name, and those that cannot be read.

    Those that come meanwhile are among them: a reader that makes a new lease and then ends
    the old one would else be seen with neither, where the new one was made after the look
    into the directory, and the old one ended before it was read.
    """
    layout, found = Layout(root), dict[str, LeaseView | ForeignLease | None]()
    while new := [name for name in _names(layout.leases) if name not in found]:
        found |= {name: _read(layout, name) for name in new}
    seen = [found[name] for name in sorted(found)]
    return (
        [view for view in seen if isinstance(view, LeaseView)],
        [lease for lease in seen if isinstance(lease, ForeignLease)],
    )


def remove_torn_leases(layout: Layout) -> None:
    """Remove leases that say nothing and that nobody holds: a power cut leaves such."""
    for lease in survey_leases(layout.root)[1]:
        if not is_lease(lease.path.name) or lease.protects or not lease.path.is_file():
            continue
        if not lease.path.is_symlink():
            with suppress(PermissionError):
                lease.path.unlink(missing_ok=True)


def end_dead_lease(layout: Layout, name: str) -> bool:
    """End the lease of a dead reader, as it would have itself; False where nobody died.

    Raises:
        PermissionError: it is another user's.
    """
    try:
        descriptor = open_owned(lease_path(layout, name), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if not try_lock(descriptor, shared=True):
            return False
        start, length, _ = _opened(data)
        os.pwrite(descriptor, _CLOSED, start + length)
        return True
    finally:
        close_owned(descriptor)


def lease_path(layout: Layout, name: str) -> Path:
    """Return the file of the lease with that name."""
    return layout.leases / (name + SUFFIX)


def _names(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    yield entry.name
    except FileNotFoundError:
        return


def _read(layout: Layout, name: str) -> LeaseView | ForeignLease | None:
    path = layout.leases / name
    try:
        # Neither a link is followed, nor is waited for who may write into a pipe.
        descriptor = open_owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return refused(path, error, layout.supervisor_lock)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return no_file(path, status)
        # Whether it is open is asked first: were it read first, a close in between would
        # show a dead reader with shards unread instead of a closed lease.
        is_open = not try_lock(descriptor, shared=True)
        data = os.pread(descriptor, min(status.st_size, MOST_BYTES), 0)
    finally:
        close_owned(descriptor)
    return _parse(path, data, is_open) or unintelligible(path, status, held=is_open)


def _parse(path: Path, data: bytes, is_open: bool) -> LeaseView | None:
    try:
        start, length, counters = _opened(data)
        flag, states = data[start + length : start + length + 1], data[start + length + 1 :]
        if not flag:
            return None
        return LeaseView(
            name=path.name.removesuffix(SUFFIX),
            open=is_open,
            closed=flag == _CLOSED,
            states=states,
            settled=flag == _SETTLED,
            counters=counters,
            **_header(data[start : start + length], len(states)),
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _opened(data: bytes) -> tuple[int, int, Counters | None]:
    """Return (where the header begins, its length, the counters) of a lease.

    Raises:
        ValueError: it is none, or of a version that is not known here.
    """
    magic = data[: len(MAGIC)]
    if magic == FIRST_MAGIC:
        (length,) = struct.unpack_from("<I", data, len(MAGIC))
        return len(MAGIC) + 4, length, None
    if magic != MAGIC:
        raise ValueError("no lease")
    length, counted = struct.unpack_from("<II", data, len(MAGIC))
    start = COUNTERS_AT + counted
    return start, length, _counters(data[COUNTERS_AT:start])


def _counters(data: bytes) -> Counters:
    try:
        return Counters.unpack(data)
    except ValueError:  # a flipped bit there must not cost the reader its shards
        return Counters(gave_state=True)


@functools.lru_cache(maxsize=HEADERS_KEPT)
def _header(data: bytes, states: int) -> Mapping[str, Any]:
    """Return what a header says of a lease with so many states, by attribute of the view."""
    header: dict[str, Any] = orjson.loads(data)
    return {
        "job": _text(header["job"]),
        "host": _text(header["host"]),
        "pid": int(header["pid"]),
        "command": _text(header["command"]),
        "created": float(header["created"]),
        "numbers": _numbers(header["numbers"], states),
        "wishes": {_number(n): _text(digest) for n, digest in header.get("wishes", ())},
        "ranks": _note(**header["ranks"]) if header.get("ranks") else None,
    }


def _numbers(ranges: Iterable[tuple[int, int]], expected: int) -> tuple[int, ...]:
    """Return the numbers of ranges [first, count], counted before they are believed.

    A damaged header may claim 10^15 shards, and the supervisor reads it.

    Raises:
        ValueError: they are not as many as there are states, or no shards' numbers.
    """
    pairs = [(_number(first), _number(count)) for first, count in ranges]
    if sum(count for _, count in pairs) != expected:
        raise ValueError("as many numbers as states were expected")
    return tuple(itertools.chain.from_iterable(range(n, n + count) for n, count in pairs))


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < MOST_NUMBER:
        raise ValueError(f"no number of a shard: {value!r}")
    return value


def _note(**said: Any) -> RankNote:
    """Return what the header says to other ranks, if it is of the kinds that they expect."""
    note = RankNote(**said)
    for text in (note.run, note.follows):
        _text(text)
    numbers = (note.walk, note.pass_number, note.rank, note.ranks)
    if not all(type(n) is int for n in numbers) or not isinstance(note.settings, Mapping):
        raise ValueError("no note of a rank")
    return note


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("no text of a lease")
    return value


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return [first, count] of runs, so that the lease of a large cache still is one block.

    >>> _ranges([3, 4, 5, 9])
    [[3, 3], [9, 1]]
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
