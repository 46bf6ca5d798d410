"""Recycled memory for batches.

Fresh memory costs a quarter to a third of a gather in page faults, so buffers go round;
but a user may hold a batch for as long as they like. A buffer is therefore taken again
only when nobody else refers to its base array: every view, tensor or DLPack capsule of
it keeps a reference.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
# Below this a fresh array is cheap, and holding on to a batch's labels must not keep a
# large buffer alive.
RECYCLE_BYTES = 128 * 1024


def _allocate(nbytes: int) -> Bytes:
    return np.empty(nbytes + PAGE, np.uint8)


def _references(bases: list[Bytes], i: int) -> int:
    return sys.getrefcount(bases[i])


# What `_references` counts for an array that only its list holds; interpreters differ.
_UNSHARED = _references([_allocate(0)], 0)


class BufferPool:
    """Equal page-aligned buffers, owned by one thread.

    Args:
        nbytes: of each.
        keep: how many free ones are kept for reuse.
    """

    def __init__(self, nbytes: int, keep: int = 12) -> None:
        self.nbytes = nbytes
        self._keep = keep
        self._bases: list[Bytes] = []

    def take(self) -> Bytes:
        """Return uint8 [nbytes] that nobody else sees; its content is undefined."""
        if self.nbytes < RECYCLE_BYTES:
            return np.empty(self.nbytes, np.uint8)
        # The first free one, not the oldest: few buffers in use stay in the CPU's cache.
        for i in range(len(self._bases)):
            if _references(self._bases, i) == _UNSHARED:
                return self._view(self._bases[i])
        base = _allocate(self.nbytes)
        # Beyond `keep` the user is collecting batches: those live and die with their views.
        if len(self._bases) < self._keep:
            self._bases.append(base)
        return self._view(base)

    def _view(self, base: Bytes) -> Bytes:
        start = -base.ctypes.data % PAGE
        return base[start : start + self.nbytes]
