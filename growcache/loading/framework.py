"""The functions that a framework provides to the loader: row copies, and conversion to its tensors.

One system call copies many long rows and releases the GIL once. NumPy would release it for each
row, and wait each time to get it back from a busy thread. While the consumer waits, two threads
copy half of the rows each, because one core cannot use the whole memory bandwidth.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.cache.formats import mapped
from growcache.errors import CorruptShardError
from growcache.loading.buffers import THREAD_BLOCK_BYTES, Allocate, allocate_private
from growcache.schema import Array
from growcache.threads import DaemonThread

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]

# Rows per call. IOV_MAX is 1024, but NumPy releases the GIL for computations on more than 500
# numbers.
MAX_IOVEC_ROWS = 500


def copy_rows(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> bool:
    """Copy rows (int64 [n]) of uint8 [k] back to back; return False if the system cannot.

    This is a tenth to a sixth slower than ``memcpy``. But a row that cannot be read (truncated
    file, failing disk) raises CorruptShardError instead of a SIGBUS.
    """
    if process_vm_readv is None:
        return False
    if sum(lengths.tolist()) != len(out):  # the kernel would write beyond the end
        raise ValueError(f"rows of {sum(lengths.tolist())} bytes for {len(out)}")
    done = 0
    for first in range(0, len(starts), MAX_IOVEC_ROWS):
        some = slice(first, first + MAX_IOVEC_ROWS)
        rows = _iovec(memory, starts[some], lengths[some])
        wanted = sum(rows[:, 1].tolist())
        if not _readv_all(process_vm_readv, rows, out.ctypes.data + done, wanted):
            return False
        done += wanted
    return True


def _iovec(memory: Bytes, starts: Integers, lengths: Integers) -> Integers:
    """Return the kernel's ``iovec``, with address and length of each row: int64 [n, 2]."""
    rows = np.empty((len(starts), 2), np.int64)
    rows[:, 0], rows[:, 1] = starts, lengths
    first, last = int(starts.min()), int((starts + lengths).max())
    if first < 0 or last > len(memory):
        raise IndexError(f"rows from {first} to {last} of {len(memory)} bytes")
    rows[:, 0] += memory.ctypes.data
    return rows


def _readv_all(read: _ReadvCall, rows: Integers, target: int, wanted: int) -> bool:
    while wanted:
        into = (ctypes.c_size_t * 2)(target, wanted)
        copied = read(os.getpid(), into, 1, rows.ctypes.data, len(rows), 0)
        if copied == wanted:
            break
        if copied < 0 and ctypes.get_errno() == errno.EFAULT:
            mapped.mark_map_damaged(int(rows[0, 0]))
            raise CorruptShardError(
                "a mapped shard cannot be read, because its file was cut short or the disk "
                "fails; run growcache check"
            )
        if copied <= 0:
            return False
        rows = _remaining_iovec(rows, copied)
        target, wanted = target + copied, wanted - copied
    return True


def _remaining_iovec(rows: Integers, copied: int) -> Integers:
    """Return the remaining rows. A call copies at most 2 GB, or up to an unreadable page."""
    ends = np.cumsum(rows[:, 1])
    first = int(np.searchsorted(ends, copied, side="right"))
    rest = rows[first:].copy()
    over = int(rest[0, 1]) - (int(ends[first]) - copied)
    rest[0] += (over, -over)
    return rest


_ReadvCall: TypeAlias = Callable[[int, Any, int, int, int, int], int]


def _load_process_vm_readv() -> _ReadvCall | None:
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    if ctypes.sizeof(size) != np.int64().itemsize:
        return None  # numbers of an iovec have this size
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None  # another operating system
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, pointer, size, pointer, size, size]
    found: _ReadvCall = call
    return found


process_vm_readv = _load_process_vm_readv()


# take(memory, starts, out): out[i] = memory[starts[i] : starts[i] + nbytes]. memory is uint8
# [k], of which nothing else may be touched; starts int64 [n]; out uint8 [n, nbytes], contiguous
# and not empty.
Take: TypeAlias = Callable[[Bytes, Integers, Bytes], None]

# take_slices(memory, starts, lengths, out): the same for rows of different lengths, int64 [n],
# at least one. They are back to back in out, uint8 [all lengths], not empty.
TakeSlices: TypeAlias = Callable[[Bytes, Integers, Integers, Bytes], object]

# join(parts, out): copy the parts, uint8 [k_i] each, at least one, back to back.
Join: TypeAlias = Callable[[Sequence[Bytes], Bytes], object]

# Copying longer rows takes longer than a step of Python, or a system call's item.
LONG_ROW_BYTES = 16 * 1024


def take_rows(memory: Bytes, starts: Integers, out: Bytes) -> None:
    """Copy rows with arbitrary starts (int64 [n]) into ``out``, uint8 [n, nbytes].

    `numpy.take` needs rows without gaps, so short rows are copied twice, as items of their
    length. Pieces of the CPU's cache size would be a sixth faster, but each would release the
    GIL and wait to get it back.
    """
    nbytes = out.shape[1]
    if nbytes >= LONG_ROW_BYTES:
        take_slices(memory, starts, np.full(len(starts), nbytes), out.reshape(-1))
        return
    if starts.min() < 0 or starts.max() > len(memory) - nbytes:
        raise IndexError(f"rows at {starts.min()} to {starts.max()} of {len(memory)} bytes")
    item = f"V{nbytes}"
    rows: Array = np.ndarray((len(memory) - nbytes + 1,), item, memory, 0, (1,))
    out.view(item)[:, 0] = rows[starts]


def take_slices(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> None:
    long = len(out) >= LONG_ROW_BYTES * len(lengths)
    if long and copy_rows(memory, starts, lengths, out):
        return
    np.concatenate(slices(memory, starts, lengths), out=out)


def slices(memory: Bytes, starts: Integers, lengths: Integers) -> list[Bytes]:
    stops = starts + lengths
    if starts.min() < 0 or stops.max() > len(memory):
        raise IndexError(f"rows from {starts.min()} to {stops.max()} of {len(memory)} bytes")
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return [memory[start:stop] for start, stop in pairs]


def join_parts(parts: Sequence[Bytes], out: Bytes) -> None:
    np.concatenate(parts, out=out)


class Transfer(Protocol):
    """The transfer of batches to a device."""

    def begin(self) -> None:
        """Prepare for an epoch, in the loop's thread."""

    def enter(self) -> None:
        """Prepare a thread that makes batches. It is called repeatedly.

        The thread's work on the device is done before a batch arrives.
        """

    def lock(self, buffer: Bytes) -> None:
        """Page-lock recycled memory."""

    def allocate(self, nbytes: int, kept: list[Bytes] | None) -> Bytes: ...

    def send(self, batch: Any, origin: object = None) -> Any:
        """Start to copy a batch. Its memory and origin must not change until it arrives."""

    def receive(self, sent: Any) -> Any:
        """Return the batch on the device, in the loop's thread."""


@dataclass(frozen=True, slots=True)
class Framework:
    take: Take = take_rows
    take_slices: TakeSlices = take_slices
    join: Join = join_parts
    # (field, array) -> the value in a batch
    deliver: Callable[[str, Any], Any] = lambda _, array: array
    prepare: Callable[[], None] | None = None  # called first in each thread that copies
    # -> (rank, world size), None: unknown
    ranks: Callable[[], tuple[int, int] | None] = lambda: None
    allocate: Allocate = allocate_private
    transfer: Transfer | None = None
    # (LoaderOptions) -> Agreement of ranks on several machines; called in the loop's thread
    agreement: Callable[[Any], Any] | None = None
    batches_at_once: int = 1  # batches passed on in one piece, which the framework cuts
    block_bytes: int = THREAD_BLOCK_BYTES
    frees_lock: bool = False  # long copies release the GIL, so threads may share them


NUMPY = Framework(frees_lock=True)


# Waking a thread takes as long as copying some hundred kilobytes.
MIN_PARALLEL_BYTES = 4_000_000

FixedHalf: TypeAlias = tuple[Integers, Bytes]  # starts, out
RaggedHalf: TypeAlias = tuple[Integers, Integers, Bytes]  # starts, lengths, out


class ParallelCopies:
    """Copies in two threads.

    The second copies half of the rows, unless the first is done before.
    """

    def __init__(self, framework: Framework, waits: Callable[[], bool]) -> None:
        self._own = framework
        self._waits = waits
        self._thread: DaemonThread | None = None
        self.waited_seconds = 0.0

    def lent(self) -> Framework:
        if not self._own.frees_lock or len(os.sched_getaffinity(0)) < 2:
            return self._own
        return replace(self._own, take=self._take, take_slices=self._take_slices)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def _take(self, memory: Bytes, starts: Integers, out: Bytes) -> None:
        copy = functools.partial(self._own.take, memory)
        if not self._shares(out, len(starts)):
            copy(starts, out)
            return
        first, rest = _fixed_halves(starts, out)
        self._both(functools.partial(copy, *first), functools.partial(copy, *rest))

    def _take_slices(
        self, memory: Bytes, starts: Integers, lengths: Integers, out: Bytes
    ) -> None:
        copy = functools.partial(self._own.take_slices, memory)
        if not self._shares(out, len(starts)):
            copy(starts, lengths, out)
            return
        first, rest = _ragged_halves(starts, lengths, out)
        # They would be copied in another way.
        if not (_has_long_rows(first) and _has_long_rows(rest)):
            copy(starts, lengths, out)
            return
        self._both(functools.partial(copy, *first), functools.partial(copy, *rest))

    def _shares(self, out: Bytes, rows: int) -> bool:
        # The loop is busy with its many batches of short rows.
        least = max(MIN_PARALLEL_BYTES, LONG_ROW_BYTES * rows)
        return out.nbytes >= least and self._waits()

    def _both(self, mine: Callable[[], object], other: Callable[[], object]) -> None:
        try:
            ahead = self._other_thread().submit(other)
        except RuntimeError:  # the user's threads take all that the system allows
            mine()
            other()
            return
        try:
            mine()
        finally:
            ahead.run()
            began = time.perf_counter()
            try:
                ahead.result()  # so that no copy continues after this call
            finally:
                self.waited_seconds += time.perf_counter() - began

    def _other_thread(self) -> DaemonThread:
        if self._thread is None:
            thread = DaemonThread("copies")
            if self._own.prepare is not None:
                thread.submit(self._own.prepare)
            self._thread = thread
        return self._thread


def _fixed_halves(starts: Integers, out: Bytes) -> tuple[FixedHalf, FixedHalf]:
    rows, nbytes = out.shape
    if rows == 1:
        cut = nbytes // 2
        return (starts, out[:, :cut]), (starts + cut, out[:, cut:])
    middle = rows // 2
    return (starts[:middle], out[:middle]), (starts[middle:], out[middle:])


def _ragged_halves(
    starts: Integers, lengths: Integers, out: Bytes
) -> tuple[RaggedHalf, RaggedHalf]:
    """Cut the rows where one ends near the middle, and a single row in its own middle."""
    ends = np.cumsum(lengths)
    middle = len(out) // 2
    if len(starts) == 1:
        return (
            (starts, lengths - (len(out) - middle), out[:middle]),
            (starts + middle, lengths - middle, out[middle:]),
        )
    row = max(1, bisect_left(ends, middle))
    cut = ends[row - 1]
    return (starts[:row], lengths[:row], out[:cut]), (starts[row:], lengths[row:], out[cut:])


def _has_long_rows(half: RaggedHalf) -> bool:
    _, lengths, out = half
    return len(out) >= LONG_ROW_BYTES * len(lengths)
