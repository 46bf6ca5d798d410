"""Recycled memory for batches.

Fresh memory costs a quarter to a third of a gather in page faults, so buffers go round;
but a user may hold a batch for as long as they like. A buffer is therefore taken again
only when nobody else refers to its base array: every view, tensor or DLPack capsule of
it keeps a reference. Those of a forked child are not seen here.
"""

from __future__ import annotations

import bisect
import mmap
import sys
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.loading import forks

Bytes: TypeAlias = npt.NDArray[np.uint8]

# allocate(nbytes, kept) -> uint8 [at least nbytes], page-aligned or a page longer. ``kept`` is
# the list in which it will be kept for reuse; None: it is used once.
Allocate: TypeAlias = Callable[[int, list[Bytes] | None], Bytes]

PAGE = 4096
ALIGNMENT = 64  # of smaller pieces: TensorFlow copies memory that does not begin so
# Below this a fresh array is cheap, and holding on to a batch's labels must not keep a
# large buffer alive.
RECYCLE_BYTES = 128 * 1024
KEPT_BYTES = 400_000_000
LEAST_KEPT = 6  # one is filled, two wait, the loop holds one or two
HEADROOM = 8  # where sizes vary, an eighth more is allocated than was asked for
MOST_ROOM = 4  # times what is asked for: what has more is kept for what needs it


def allocate_here(nbytes: int, kept: list[Bytes] | None) -> Bytes:
    """Return memory of this process alone: the `Allocate` of everyday."""
    return np.empty(nbytes + PAGE, np.uint8)


def allocate_pages(nbytes: int) -> Bytes:
    """Return memory of this process alone, in pages that nothing else lies in."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)


def _references(bases: list[Bytes], i: int) -> int:
    return sys.getrefcount(bases[i])


# What `_references` counts for an array that only its list holds; interpreters differ.
_UNSHARED = _references([allocate_here(0, None)], 0)


def kept_of(nbytes: int, most: int) -> int:
    """Return how many buffers of a size are kept.

    >>> kept_of(8_000_000, 12), kept_of(72_000_000, 12), kept_of(72_000_000, 4)
    (12, 6, 4)
    """
    return min(most, max(LEAST_KEPT, KEPT_BYTES // max(1, nbytes)))


class BufferPool:
    """Page-aligned buffers, owned by one thread.

    Each is as large as what it was made for, so that one batch that is far larger than the
    others makes one large buffer: shared and page-locked memory is all there, touched or not.

    After a fork all are made anew. The child would see in its batches what is filled into
    shared memory later; private memory would be copied, page by page, as it is written to.

    Args:
        nbytes: what `take` gives if it is not told.
        keep: how many are kept for reuse; of large ones fewer, see `kept_of`.
        allocate: makes them.
        bases: of an earlier pool, see `leave`.
    """

    def __init__(
        self,
        nbytes: int = 0,
        keep: int = 12,
        allocate: Allocate = allocate_here,
        bases: Iterable[Bytes] = (),
    ) -> None:
        self._nbytes = nbytes
        self._allocate = allocate
        self._keep = keep
        self._bases = sorted(bases, key=len)  # the smallest first
        self._begun = forks.moment()

    def take(self, nbytes: int | None = None) -> Bytes:
        """Return uint8 [nbytes] that nobody else sees, aligned; its content is undefined."""
        if nbytes is None:
            nbytes = self._nbytes
        if nbytes < RECYCLE_BYTES:
            return _view(np.empty(nbytes + ALIGNMENT, np.uint8), nbytes, ALIGNMENT)
        return _view(self._free(nbytes), nbytes, PAGE)

    def leave(self) -> list[Bytes]:
        """Return the buffers for another pool, those in use among them; this one has none then."""
        bases, self._bases = self._bases, []
        return bases

    def _free(self, nbytes: int) -> Bytes:
        bases = self._bases
        free = [i for i in range(len(bases)) if _references(bases, i) == _UNSHARED]
        if forks.since(self._begun):  # asked now, for what was in use until now may be seen
            self._begun = forks.moment()
            bases.clear()  # those in use live and die with their views
            free.clear()
        # The first that fits, not the oldest: few buffers in use stay in the CPU's cache.
        for i in free:
            if nbytes <= _room(bases[i]) <= MOST_ROOM * nbytes:
                return bases[i]
        if free and (
            _room(bases[free[0]]) < nbytes or len(bases) >= kept_of(nbytes, self._keep)
        ):
            del bases[free[0]]
        return self._made(nbytes)

    def _made(self, nbytes: int) -> Bytes:
        if len(self._bases) >= kept_of(nbytes, self._keep):
            # The user is collecting batches: those live and die with their views.
            return self._allocate(nbytes, None)
        size = nbytes if nbytes == self._nbytes else nbytes + nbytes // HEADROOM
        base = self._allocate(size, self._bases)
        bisect.insort(self._bases, base, key=len)
        return base


def _room(base: Bytes) -> int:
    address: int = base.__array_interface__["data"][0]
    return len(base) - -address % PAGE


def _view(base: Bytes, nbytes: int, alignment: int) -> Bytes:
    start = -base.ctypes.data % alignment
    return base[start : start + nbytes]
