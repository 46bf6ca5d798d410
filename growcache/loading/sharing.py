"""Copies that two threads make together, while the loop waits for them.

A core cannot have all that memory gives: two copy 1.1 to 1.4 times as fast as one
(`benchmarks.copy_limit`). A loop that waits for a batch does not need its own. Where it does
not wait there is no hurry, and a second thread would be in its way.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from growcache.loading.ahead import Hand
from growcache.loading.framework import LONG_ROW_BYTES, Bytes, Framework, Integers

# To wake a thread takes as long as to copy some hundred kilobytes.
LEAST_BYTES = 4_000_000


class SharedCopies:
    """A framework's copies of rows, of which another thread makes half; used by one thread.

    Half of them is the other thread's only once it begins: who is through with the first half
    makes the second one, too, where the other thread has not come to it by then.

    Args:
        framework: whose copies they are.
        waits: whether the loop waits for what is copied.
    """

    def __init__(self, framework: Framework, waits: Callable[[], bool]) -> None:
        self._own = framework
        self._waits = waits
        self._hand: Hand | None = None

    def lent(self) -> Framework:
        """Return the framework, whose copies are these where that can help."""
        if not self._own.frees_lock or len(os.sched_getaffinity(0)) < 2:
            return self._own
        return replace(self._own, take=self._take, take_slices=self._take_slices)

    def close(self) -> None:
        """End the other thread."""
        if self._hand is not None:
            self._hand.close()

    def _take(self, memory: Bytes, starts: Integers, out: Bytes) -> None:
        copy, middle = self._own.take, len(starts) // 2
        if not self._shares(out.nbytes, len(out)):
            copy(memory, starts, out)
            return
        self._both(
            functools.partial(copy, memory, starts[:middle], out[:middle]),
            functools.partial(copy, memory, starts[middle:], out[middle:]),
        )

    def _take_slices(
        self, memory: Bytes, starts: Integers, lengths: Integers, out: Bytes
    ) -> None:
        copy = self._own.take_slices
        if not self._shares(out.nbytes, len(lengths)):
            copy(memory, starts, lengths, out)
            return
        ends = np.cumsum(lengths)
        row = max(1, int(np.searchsorted(ends, len(out) // 2)))
        cut = ends[row - 1]
        self._both(
            functools.partial(copy, memory, starts[:row], lengths[:row], out[:cut]),
            functools.partial(copy, memory, starts[row:], lengths[row:], out[cut:]),
        )

    def _shares(self, nbytes: int, rows: int) -> bool:
        # The loop is busy with batches of short rows, of which there are many.
        long = rows > 1 and nbytes >= LONG_ROW_BYTES * rows
        return long and nbytes >= LEAST_BYTES and self._waits()

    def _both(self, mine: Callable[[], object], other: Callable[[], object]) -> None:
        if self._hand is None:
            self._hand = Hand("copies")
            if self._own.prepare is not None:
                self._hand.ahead(self._own.prepare)
        ahead = self._hand.ahead(other)
        try:
            mine()
        finally:
            ahead.run()
            ahead.result()  # nothing is copied any more behind the caller's back
