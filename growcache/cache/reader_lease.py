"""Leases from the reader's side, which protect the shards of a snapshot from eviction.

A lease is a file that its reader holds with flock, so the kernel releases it when the reader
dies. It has one byte per shard, which the reader updates as its epoch proceeds. The bound
reserves room for leases. A reader therefore takes the lock of their directory, and makes no
lease without room for it.

The reader owns the file's content, and the supervisor its removal. No lock is needed between
them. The reader makes its lease visible, *then* reads the index again and drops the retired
shards. The supervisor commits *retired*, *then* reads the leases. Until it has dropped those
shards, a lease may list shards that are being deleted. Then its reader *settles* it, and other
readers may rely on the shards that it holds.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

from growcache.cache.files import CacheLayout, allocated, is_full_disk, whole_blocks
from growcache.cache.lease_views import (
    BEGUN,
    COUNTERS_AT,
    COUNTERS_BYTES,
    DROPPED,
    MAGIC,
    MAPPED,
    READ,
    STAGE_CLOSED,
    STAGE_OPEN,
    STAGE_SETTLED,
    SUFFIX,
    LeaseCounters,
    RankNote,
    survey_leases,
)
from growcache.cache.locks import (
    LEASES_VERSION,
    FileLock,
    close_owned,
    is_locked,
    lock_holder,
    open_owned,
    pid_namespace,
    this_process,
    try_lock,
)
from growcache.cache.system import at_sigterm, release_at_sigterm
from growcache.errors import CacheError, CacheFullError, LeasesFullError
from growcache.modes import ONE_USER_OR_GROUP

COUNTERS_SECONDS = 0.2  # between two updates of the counters
WAIT_FOR_ROOM_SECONDS = 1.0  # while a reader waits for finished leases to be removed
WAIT_FOR_LOCK_SECONDS = 10.0  # while a reader waits for others to make their leases
PAUSE_SECONDS = 0.02


class Lease:
    """A reader's hold on shards. It ends with `close`, garbage collection or the process."""

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
        lengths: Mapping[int, int] | None = None,
        ranks: RankNote | None = None,
        max_bytes: int | None = None,
        counters: LeaseCounters | None = None,
    ) -> Lease:
        """Return a lease that the supervisor sees from now on.

        Next, the caller must read the index again and drop the shards that are no longer live.
        Only then may it open the others. It keeps the shards of ``wishes`` (digests by number):
        they are drawn or refused, and stay if they are live. ``lengths`` has the samples of
        wished shards, which a cache that never had them does not know.

        Raises:
            LeasesFullError: All leases together would exceed ``max_bytes``.
        """
        wished = dict(sorted((wishes or {}).items()))
        wanted = tuple(sorted({*numbers, *wished}))
        layout = CacheLayout(root)
        _refuse_old_service(layout)
        release_at_sigterm()
        header = orjson.dumps(
            {
                **this_process(),
                "pid_namespace": pid_namespace(),
                "job": job,
                "created": time.time(),
                "numbers": _ranges(wanted),
                "wishes": list(wished.items()),
                "lengths": list((lengths or {}).items()),
                "ranks": ranks,
            }
        )
        start = COUNTERS_AT + COUNTERS_BYTES + len(header)
        sizes = struct.pack("<II", len(header), COUNTERS_BYTES)
        said = (counters or LeaseCounters()).pack().ljust(COUNTERS_BYTES, b"\0")
        body = MAGIC + sizes + said + header + STAGE_OPEN + bytes(len(wanted))
        if wished and max_bytes is not None and whole_blocks(len(body)) > max_bytes:
            raise CacheError(
                f"a lease that asks for {len(wished):,} shards to be drawn again takes "
                f"{len(body):,} bytes, but {layout.root} has {max_bytes:,} for all leases; "
                "raise cache.max_bytes, or continue with other shards: load_state_dict(state, "
                "missing='substitute')",
                code="GC412",
            )
        try:
            path, descriptor = _publish_lease(layout, body, max_bytes)
        except LeasesFullError:
            raise
        except OSError as error:
            raise _creation_error(layout, error) from error
        file = _LeaseFile(layout, path, descriptor, start, len(wanted), counters)
        return cls(file, wanted, wished)

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(SUFFIX)

    def drop(self, numbers: Iterable[int]) -> None:
        self._set(numbers, DROPPED)

    def mark_begun(self, *numbers: int) -> None:
        """Count a use of mapped shards that will be read further."""
        self._set(numbers, BEGUN)

    def mark_read(self, *numbers: int, mapped: bool) -> None:
        """Count a use of the shards, once. They stay protected while they are mapped."""
        self._set(numbers, MAPPED if mapped else READ)

    def settle(self) -> None:
        """Declare that all shards it still holds are present and stay, for others to rely on."""
        self._file.settle()

    def count(self, samples: int) -> None:
        self._file.count(samples)

    def keep_for_service(self) -> None:
        """Keep the file for the next supervisor, so that limits on reuse hold meanwhile."""
        self._file.kept = True

    def _set(self, numbers: Iterable[int], state: int) -> None:
        self._file.write_states([self._places[number] for number in numbers], state)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """End the lease; the supervisor counts its uses. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _publish_lease(layout: CacheLayout, body: bytes, max_bytes: int | None) -> tuple[Path, int]:
    deadline = time.monotonic() + WAIT_FOR_ROOM_SECONDS
    while True:
        # One after the other, because two readers that each find room for one lease would make
        # two.
        with FileLock.of_directory(layout.leases, WAIT_FOR_LOCK_SECONDS):
            taken = _leases_allocated(layout) if max_bytes is not None else 0
            if max_bytes is None or taken + whole_blocks(len(body)) <= max_bytes:
                return _make_lease(layout, body)
        if time.monotonic() >= deadline:  # finished leases are removed within a moment
            raise LeasesFullError(_no_room_message(layout, max_bytes))
        time.sleep(PAUSE_SECONDS)


def _make_lease(layout: CacheLayout, body: bytes) -> tuple[Path, int]:
    name = uuid.uuid4().hex
    hidden, path = layout.leases / f".{name}.tmp", layout.leases / (name + SUFFIX)
    descriptor = open_owned(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        # Locked and filled before it becomes visible, because an unlocked or half-written lease
        # would look like that of a dead reader.
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


def _give_to_owner(layout: CacheLayout, descriptor: int) -> None:
    """Let the supervisor, which may be another user, read a lease that root made in a container."""
    if os.geteuid() == 0 and (owner := layout.leases.stat()).st_uid != 0:
        with suppress(PermissionError):  # a root without this right
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _leases_allocated(layout: CacheLayout) -> int:
    """Return the bytes of all leases, including blocks that the disk has only promised."""
    with os.scandir(layout.leases) as entries:
        paths = [entry.path for entry in entries]
    return sum(map(allocated, map(Path, paths)))


def _no_room_message(layout: CacheLayout, max_bytes: int | None) -> str:
    views, _ = survey_leases(layout.root)
    held = sum(view.open for view in views)
    return (
        f"no room for another lease in {layout.leases}: {held} snapshots are held"
        f"{_and_ended(len(views) - held)}, and the bound of this cache leaves {max_bytes:,} bytes "
        "for leases; close snapshots, or raise cache.max_bytes"
    )


def _and_ended(number: int) -> str:
    return f" ({number} more have ended, see growcache release)" if number else ""


def _refuse_old_service(layout: CacheLayout) -> None:
    told = lock_holder(layout.supervisor_lock)
    if told.get("leases", LEASES_VERSION if not told else 1) >= LEASES_VERSION:
        return
    if is_locked(layout.supervisor_lock):
        raise CacheError(
            f"the service that fills {layout.root} (pid {told.get('pid')} on "
            f"{told.get('host')}) runs an earlier growcache and would ignore this reader; stop "
            "it, then start it again with: growcache run CONFIG",
            code="GC408",
        )


def _creation_error(layout: CacheLayout, error: OSError) -> CacheError:
    if is_full_disk(error):
        return CacheFullError(f"no room for a lease in {layout.leases}: {error}")
    text = f"cannot write a lease in {layout.leases}: {error.strerror}; "
    if error.errno == errno.EROFS:
        return CacheError(
            f"{text}a reader records there what it reads, so mount the cache's folder writable "
            "(docker run -v HOST:CACHE, without :ro)",
            code="GC417",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        owner = _owner_text(layout)
        return CacheError(
            f"{text}this process runs as uid {os.geteuid()}, and the folder {owner}; "
            + ONE_USER_OR_GROUP,
            code="GC417",
        )
    return CacheError(
        f"{text}a reader must be able to write there, because the supervisor looks there for "
        "readers",
        code="GC417",
    )


def _owner_text(layout: CacheLayout) -> str:
    try:
        found = layout.leases.stat()
    except OSError:
        return "cannot be inspected"
    return f"belongs to uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}"


class _LeaseFile:
    """The open file of a lease, separate from `Lease` so that a finalizer can hold it.

    In a forked child it is inert, because the lease belongs to the parent. A lock keeps threads
    from writing into a file that another thread just closed. A finalizer may run inside either.
    """

    def __init__(
        self,
        layout: CacheLayout,
        path: Path,
        descriptor: int,
        start: int,
        shards: int,
        counters: LeaseCounters | None,
    ) -> None:
        self.path = path
        self._counters = counters
        self._counted_at = time.monotonic()
        self._uncounted = False  # whether something has yet to be counted
        self._states = bytearray(shards)
        self._layout = layout
        self._descriptor = descriptor
        self._start = start
        self._pid = os.getpid()
        self._open = True
        self.kept = False  # although no service counts it
        self._turn = threading.RLock()
        _open_files.add(self)

    def write_states(self, places: Sequence[int], state: int) -> None:
        if self._pid != os.getpid() or not places:
            return
        first, stop = min(places), max(places) + 1
        with self._turn:
            for place in places:
                self._states[place] = state
            if self._open:  # in one call, because each releases the GIL and may wait for it
                os.pwrite(self._descriptor, self._states[first:stop], self._start + 1 + first)

    def settle(self) -> None:
        if self._pid != os.getpid():
            return
        with self._turn:
            if self._open:
                os.pwrite(self._descriptor, STAGE_SETTLED, self._start)

    def count(self, samples: int) -> None:
        if self._pid != os.getpid() or self._counters is None:
            return
        with self._turn:
            self._counters.receive(samples, time.time())
            self._uncounted = True
            if time.monotonic() - self._counted_at >= COUNTERS_SECONDS:
                self._note_counters()

    def _note_counters(self) -> None:
        if self._open and self._uncounted and self._counters is not None:
            os.pwrite(self._descriptor, self._counters.pack(), COUNTERS_AT)
            self._uncounted, self._counted_at = False, time.monotonic()

    def end_at_sigterm(self) -> None:
        """Record a proper end. Wait briefly for another thread that uses the file."""
        if self._pid == os.getpid() and self._turn.acquire(timeout=PAUSE_SECONDS):
            if self._open:
                self._note_counters()
                os.pwrite(self._descriptor, STAGE_CLOSED, self._start)
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
                os.pwrite(self._descriptor, STAGE_CLOSED, self._start)
            finally:
                self._open = False
                close_owned(self._descriptor)
        # While a supervisor lives, the file is its receipt for the uses.
        if not self.kept and not is_locked(self._layout.supervisor_lock):
            self.path.unlink(missing_ok=True)


_open_files: weakref.WeakSet[_LeaseFile] = weakref.WeakSet()


def _end_all_at_sigterm() -> None:
    for file in list(_open_files):
        file.end_at_sigterm()


at_sigterm(_end_all_at_sigterm)


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return [first, count] of runs, so that the lease of a large cache fits one block.

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
