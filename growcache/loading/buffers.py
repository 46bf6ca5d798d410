"""Recycled memory for blocks of batches.

Page faults of new memory cost a quarter to a third of a gather. A user may keep a batch for any
time. So a buffer is reused only after nothing else refers to its base array; every view, tensor
or DLPack capsule does. The references of a forked child are invisible, so a fork replaces all
buffers.
"""

from __future__ import annotations

import bisect
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_forking: set[int] = set()  # of the threads that are forking
_latest_fork = object()  # replaced at the start and at the end of each fork


def fork_mark() -> object:
    return _latest_fork


def forked_since(then: object) -> bool:
    """Whether a fork has happened. Call it after everything that the answer covers."""
    # In this order, because a fork may end meanwhile.
    return bool(_forking) or then is not _latest_fork


def _begin_fork() -> None:
    global _latest_fork
    _forking.add(threading.get_ident())
    _latest_fork = object()


def _end_fork() -> None:
    global _latest_fork
    _latest_fork = object()
    _forking.discard(threading.get_ident())


def _end_fork_in_child() -> None:
    _forking.clear()  # a child does not have its parent's other threads
    _end_fork()


os.register_at_fork(
    before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork_in_child
)


BufferBytes: TypeAlias = npt.NDArray[np.uint8]

# allocate(nbytes, kept) -> uint8 [at least nbytes], page-aligned or a page longer. ``kept`` is
# the list that keeps it for reuse; None means a single use.
Allocate: TypeAlias = Callable[[int, list[BufferBytes] | None], BufferBytes]

PAGE = 4096
ALIGNMENT = 64  # of smaller pieces, because TensorFlow copies unaligned memory
# Below this size a new array is cheap. A batch's labels, which a user keeps, must not keep a
# large buffer alive.
RECYCLE_BYTES = 128 * 1024
# Of all blocks of a loader in flight: one is being filled, two wait, and the loop has one and
# the batch before it. If blocks are small, more are in flight.
BUFFER_BYTES = 176_000_000
MIN_IN_FLIGHT, MAX_IN_FLIGHT = 5, 12
# Size of a block, unless a batch is larger. Each new block costs the copying thread and the
# receiving loop some tenths of a millisecond, because the CPU's caches are cold.
BLOCK_BYTES = BUFFER_BYTES // MIN_IN_FLIGHT
# For a thread, which also waits for the interpreter's lock after each block. A gather process
# itself takes 90 MB.
THREAD_BLOCK_BYTES = 72_000_000
HEADROOM_DIVISOR = 8  # if sizes vary, an eighth more than requested is allocated
MAX_OVERSIZE = 4  # times the requested size; larger buffers are kept for larger requests


def allocate_private(nbytes: int, kept: list[BufferBytes] | None) -> BufferBytes:
    return np.empty(nbytes + PAGE, np.uint8)


def allocate_pages(nbytes: int) -> BufferBytes:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)


def _references(bases: list[BufferBytes], i: int) -> int:
    return sys.getrefcount(bases[i])


# Count of `_references` for an array that only its list refers to, which differs between
# interpreters.
_UNSHARED = _references([allocate_private(0, None)], 0)


def blocks_in_flight(nbytes: int) -> int:
    """Return the number of blocks of a size in flight, each in its buffer.

    >>> blocks_in_flight(64_000), blocks_in_flight(16_000_000), blocks_in_flight(72_000_000)
    (12, 11, 5)
    """
    return min(MAX_IN_FLIGHT, max(MIN_IN_FLIGHT, BUFFER_BYTES // max(1, nbytes)))


class BufferPool:
    """A pool of buffers for one use.

    Each buffer keeps its size, because shared and page-locked memory is resident even if it is
    not touched.
    """

    def __init__(
        self,
        nbytes: int = 0,
        keep: int | None = None,
        allocate: Allocate = allocate_private,
    ) -> None:
        self._nbytes = nbytes
        self._allocate = allocate
        self._keep = keep
        self._bases: list[BufferBytes] = []  # smallest first
        self._begun = fork_mark()

    def take(self, nbytes: int | None = None) -> BufferBytes:
        """Return uint8 [nbytes] with undefined content."""
        if nbytes is None:
            nbytes = self._nbytes
        if nbytes < RECYCLE_BYTES:
            return _aligned_view(np.empty(nbytes + ALIGNMENT, np.uint8), nbytes, ALIGNMENT)
        return _aligned_view(self._free(nbytes), nbytes, PAGE)

    def _free(self, nbytes: int) -> BufferBytes:
        bases = self._bases
        free = [i for i in range(len(bases)) if _references(bases, i) == _UNSHARED]
        # Checked here, because a child sees the buffers in use so far.
        if forked_since(self._begun):
            self._begun = fork_mark()
            bases.clear()  # those in use live as long as their views
            free.clear()
        # The first that fits rather than the oldest, because a few buffers stay in the CPU's
        # cache.
        for i in free:
            if nbytes <= _usable_bytes(bases[i]) <= MAX_OVERSIZE * nbytes:
                return bases[i]
        if free and (
            _usable_bytes(bases[free[0]]) < nbytes or len(bases) >= self._most(nbytes)
        ):
            del bases[free[0]]
        return self._made(nbytes)

    def _most(self, nbytes: int) -> int:
        # One more, because the user keeps a batch a moment longer.
        return self._keep or blocks_in_flight(nbytes) + 1

    def _made(self, nbytes: int) -> BufferBytes:
        if len(self._bases) >= self._most(nbytes):
            # The user is collecting batches, which live as long as their views.
            return self._allocate(nbytes, None)
        size = nbytes if nbytes == self._nbytes else nbytes + nbytes // HEADROOM_DIVISOR
        base = self._allocate(size, self._bases)
        bisect.insort(self._bases, base, key=len)
        return base


def _usable_bytes(base: BufferBytes) -> int:
    address: int = base.__array_interface__["data"][0]
    return len(base) - -address % PAGE


def _aligned_view(base: BufferBytes, nbytes: int, alignment: int) -> BufferBytes:
    start = -base.ctypes.data % alignment
    return base[start : start + nbytes]
