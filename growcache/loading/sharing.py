"""Copies that two threads make together, while the loop waits for them.

A core cannot have all that memory gives: two copy 1.1 to 1.4 times as fast as one
(`benchmarks.copy_limit`). A loop that waits for a batch does not need its own. Where it does
not wait there is no hurry, and a second thread would be in its way.
"""

from __future__ import annotations

import functools
import os
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from growcache.loading.ahead import Hand
from growcache.loading.framework import LONG_ROW_BYTES, Bytes, Framework, Integers

# To wake a thread takes as long as to copy some hundred kilobytes.
LEAST_BYTES = 4_000_000

Half: TypeAlias = tuple[Integers, Bytes]  # starts, out
VariedHalf: TypeAlias = tuple[Integers, Integers, Bytes]  # starts, lengths, out


class SharedCopies:
    """A framework's copies of rows, of which another thread makes half; used by one thread.

    Half of them is the other thread's only once it begins: who is through with the first half
    makes the second one, too, where the other thread has not come to it by then.

    Args:
        framework: whose copies they are.
        waits: whether the loop waits for what is copied.

    Attributes:
        waited_seconds: for the other thread's halves.
    """

    def __init__(self, framework: Framework, waits: Callable[[], bool]) -> None:
        self._own = framework
        self._waits = waits
        self._hand: Hand | None = None
        self.waited_seconds = 0.0

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
        copy = functools.partial(self._own.take, memory)
        if not self._shares(out, len(starts)):
            copy(starts, out)
            return
        first, rest = _halves(starts, out)
        self._both(functools.partial(copy, *first), functools.partial(copy, *rest))

    def _take_slices(
        self, memory: Bytes, starts: Integers, lengths: Integers, out: Bytes
    ) -> None:
        copy = functools.partial(self._own.take_slices, memory)
        if not self._shares(out, len(starts)):
            copy(starts, lengths, out)
            return
        first, rest = _varied_halves(starts, lengths, out)
        if not (_long(first) and _long(rest)):  # they would be copied in another way
            copy(starts, lengths, out)
            return
        self._both(functools.partial(copy, *first), functools.partial(copy, *rest))

    def _shares(self, out: Bytes, rows: int) -> bool:
        # The loop is busy with batches of short rows, of which there are many.
        least = max(LEAST_BYTES, LONG_ROW_BYTES * rows)
        return out.nbytes >= least and self._waits()

    def _both(self, mine: Callable[[], object], other: Callable[[], object]) -> None:
        try:
            ahead = self._other_thread().ahead(other)
        except RuntimeError:  # no more threads can be started, as the user's have them all
            mine()
            other()
            return
        try:
            mine()
        finally:
            ahead.run()
            began = time.perf_counter()
            try:
                ahead.result()  # nothing is copied any more behind the caller's back
            finally:
                self.waited_seconds += time.perf_counter() - began

    def _other_thread(self) -> Hand:
        if self._hand is None:
            hand = Hand("copies")
            if self._own.prepare is not None:
                hand.ahead(self._own.prepare)
            self._hand = hand
        return self._hand


def _halves(starts: Integers, out: Bytes) -> tuple[Half, Half]:
    """Cut rows of one length in the middle, and a single one in its own."""
    rows, nbytes = out.shape
    if rows == 1:
        cut = nbytes // 2
        return (starts, out[:, :cut]), (starts + cut, out[:, cut:])
    middle = rows // 2
    return (starts[:middle], out[:middle]), (starts[middle:], out[middle:])


def _varied_halves(
    starts: Integers, lengths: Integers, out: Bytes
) -> tuple[VariedHalf, VariedHalf]:
    """Cut rows of different lengths where one ends near the middle, and a single one in its own."""
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


def _long(half: VariedHalf) -> bool:
    _, lengths, out = half
    return len(out) >= LONG_ROW_BYTES * len(lengths)
