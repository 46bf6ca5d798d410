"""Recycled memory for batches.

Fresh memory costs a quarter to a third of a gather in page faults, so buffers go round;
but a user may hold a batch for as long as they like. A buffer is therefore taken again
only when nobody else refers to its base array: every view, tensor or DLPack capsule of
it keeps a reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

# allocate(nbytes, kept) -> uint8 [at least nbytes], page-aligned or a page longer. ``kept`` is
# the list in which it will be kept for reuse; None: it is used once.
Allocate: TypeAlias = Callable[[int, list[Bytes] | None], Bytes]

PAGE = 4096
ALIGNMENT = 64  # of smaller pieces: TensorFlow copies memory that does not begin so
# Below this a fresh array is cheap, and holding on to a batch's labels must not keep a
# large buffer alive.
RECYCLE_BYTES = 128 * 1024
HEADROOM = 8  # where sizes vary, an eighth more is allocated than was asked for


def allocate_here(nbytes: int, kept: list[Bytes] | None) -> Bytes:
    """Return memory of this process alone: the `Allocate` of everyday."""
    return np.empty(nbytes + PAGE, np.uint8)


def _references(bases: list[Bytes], i: int) -> int:
    return sys.getrefcount(bases[i])


# What `_references` counts for an array that only its list holds; interpreters differ.
_UNSHARED = _references([allocate_here(0, None)], 0)


class BufferPool:
    """Equal page-aligned buffers, owned by one thread.

    Where more is asked for than they hold, larger ones take their place. All are as large
    as the largest was: pages that nobody touches cost nothing.

    Args:
        nbytes: of each; more where `take` asks for it.
        keep: how many free ones are kept for reuse.
        allocate: makes them.
    """

    def __init__(
        self, nbytes: int = 0, keep: int = 12, allocate: Allocate = allocate_here
    ) -> None:
        self.nbytes = nbytes
        self._allocate = allocate
        self._keep = keep
        self._bases: list[Bytes] = []

    def take(self, nbytes: int | None = None) -> Bytes:
        """Return uint8 [nbytes] that nobody else sees, aligned; its content is undefined."""
        if nbytes is None:
            nbytes = self.nbytes
        if nbytes < RECYCLE_BYTES:
            return _view(np.empty(nbytes + ALIGNMENT, np.uint8), nbytes, ALIGNMENT)
        if nbytes > self.nbytes:
            self.nbytes = nbytes + nbytes // HEADROOM
            self._bases.clear()  # those in use live and die with their views
        return _view(self._free(), nbytes, PAGE)

    def _free(self) -> Bytes:
        # The first free one, not the oldest: few buffers in use stay in the CPU's cache.
        for i in range(len(self._bases)):
            if _references(self._bases, i) == _UNSHARED:
                return self._bases[i]
        # Beyond `keep` the user is collecting batches: those live and die with their views.
        kept = self._bases if len(self._bases) < self._keep else None
        base = self._allocate(self.nbytes, kept)
        if kept is not None:
            kept.append(base)
        return base


def _view(base: Bytes, nbytes: int, alignment: int) -> Bytes:
    start = -base.ctypes.data % alignment
    return base[start : start + nbytes]
