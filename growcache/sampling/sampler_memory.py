"""Limit the bytes that a group may have in a sampler's memory.

Visits end in any order, but the content of a group must depend only on the group. So visits are
admitted in order, and from the first that does not fit on, all are deferred, including small
ones. Otherwise groups would take the small visits and leave the large ones to others, and the
cache would have fewer large samples than the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from growcache.schema import Sample, sample_bytes
from growcache.store.contract import Entry


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits on bytes of values."""

    group_bytes: int  # later visits are left out, if they may be
    sample_bytes: int  # as far as the cache's format can hold it
    most_bytes: int  # of a group with one visit, or if no more may be set aside

    @property
    def largest(self) -> int:
        """Bytes of the largest sample that a group with one sample can hold."""
        return min(self.most_bytes, self.sample_bytes)


class YieldEstimate:
    """Estimates the bytes of values per byte in the store, from the visits so far."""

    def __init__(self) -> None:
        self._stored = 0.0
        self._found = 0

    def learn(self, stored: float, found: int) -> None:
        if stored:  # visits without bytes in the store prove nothing about others
            self._stored += stored
            self._found += found

    def expected(self, stored: float) -> float:
        return stored * self._found / self._stored if self._stored else 0.0


@dataclass(slots=True)
class VisitResult:
    samples: list[Sample] = field(default_factory=list)
    # First row or byte of each sample, and one past the last.
    origins: list[tuple[int, int]] = field(default_factory=list)
    hole: str | None = None  # why samples are missing
    hole_kind: str = "other"  # the same as a word, for metrics
    left_out: bool = False  # its part will be drawn later
    entry: Entry | None = None  # version that was read, if it differs from the listed one
    transform_seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(map(sample_bytes, self.samples))


class MemoryBudget:
    """Admits the results of one group's visits in order, for one event loop."""

    def __init__(
        self,
        visits: int,
        limits: GroupLimits | None,
        *,
        defers: bool = False,
        yields: YieldEstimate | None = None,
    ) -> None:
        self._limits = limits
        self._defers = defers
        self._yields = yields or YieldEstimate()
        self._results: list[VisitResult | None] = [None] * visits
        self._sizes = [0] * visits
        self._settled = 0  # visits whose samples were admitted or refused
        self._admitted = 0  # bytes
        self._waiting = 0  # bytes of visits after one that is still in progress
        self._under_way: dict[int, float] = {}  # bytes in the store, by place
        self._is_full = False
        self._moved = asyncio.Event()

    async def begin(self, place: int, stored: float) -> bool:
        """Wait until a visit may start; return False if it is left out.

        The visits in progress may fill the group. Anything fetched beyond that would have to be
        fetched again.
        """
        while self._limits and self._under_way and self._may_outgrow(self._limits, stored):
            self._moved.clear()
            await self._moved.wait()
        if self._is_full:
            self.put(place, VisitResult(left_out=True))
            return False
        self._under_way[place] = stored
        return True

    def stop(self) -> None:
        """Leave out the waiting visits, because a visit that they wait for has failed."""
        self._is_full = True
        self._under_way.clear()
        self._moved.set()

    def _may_outgrow(self, limits: GroupLimits, stored: float) -> bool:
        coming = self._yields.expected(sum(self._under_way.values()) + stored)
        return self._admitted + self._waiting + coming > limits.group_bytes

    def put(self, place: int, visited: VisitResult) -> None:
        self._results[place] = visited
        stored = self._under_way.pop(place, None)
        if self._limits is not None:
            nbytes = self._sizes[place] = visited.nbytes
            self._waiting += nbytes
            if stored is not None and not visited.left_out:
                self._yields.learn(stored, nbytes)
            self._settle(self._limits)
        self._moved.set()

    def _settle(self, limits: GroupLimits) -> None:
        while self._settled < len(self._results):
            visited, nbytes = self._results[self._settled], self._sizes[self._settled]
            if visited is None:
                return
            self._waiting -= nbytes
            self._is_full = self._is_full or self._outgrows(limits, nbytes)
            if self._is_full:
                self._results[self._settled] = VisitResult(left_out=True)
            elif not visited.left_out:
                self._admitted = admit(visited, nbytes, self._admitted, limits)
            self._settled += 1

    def _outgrows(self, limits: GroupLimits, nbytes: int) -> bool:
        """Whether a visit does not fit.

        The first one always fits, or a large one never would.
        """
        grown = self._admitted + nbytes > limits.group_bytes
        return self._defers and self._admitted > 0 and grown

    def results(self) -> Sequence[VisitResult]:
        """Return the admitted results, by visit. All of them must have ended."""
        return [result for result in self._results if result is not None]


def admit(visited: VisitResult, nbytes: int, before: int, limits: GroupLimits) -> int:
    """Admit samples that fit, and record a hole for others; return the bytes admitted so far."""
    if nbytes <= limits.sample_bytes and before + nbytes <= limits.most_bytes:
        return before + nbytes
    samples, origins = visited.samples, visited.origins
    visited.samples, visited.origins = [], []
    for sample, origin in zip(samples, origins, strict=True):
        nbytes = sample_bytes(sample)
        if nbytes > limits.sample_bytes:
            visited.hole = (
                f"a sample of {nbytes:,} bytes is larger than the {limits.sample_bytes:,} that "
                "one record can hold; cut smaller windows"
            )
        elif before + nbytes > limits.most_bytes:
            visited.hole = (
                f"a sample of {nbytes:,} bytes does not fit into the {limits.most_bytes:,} that "
                f"its group may take, of which {before:,} are used; cut smaller windows, or "
                "fill a new cache with a larger cache.max_bytes"
            )
        else:
            visited.samples.append(sample)
            visited.origins.append(origin)
            before += nbytes
    return before
