"""What a group of samples that differ in size may take in memory.

Visits end in any order, yet what is kept must be a function of the group alone. So samples
are admitted in the order of their visits: each that fits into what those before it left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from growcache.remote.store import Entry
from growcache.schema import Sample, sample_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is too much.

    Attributes:
        group_bytes: of the values of all samples of a group.
        sample_bytes: of those of one sample, as far as the cache's format can hold it.
    """

    group_bytes: int
    sample_bytes: int

    @property
    def largest(self) -> int:
        """The bytes that one sample may have."""
        return min(self.group_bytes, self.sample_bytes)


@dataclass(slots=True)
class Visited:
    """What one visit brought.

    Attributes:
        samples: in their order.
        origins: the first row or byte of each, and one past the last.
        hole: why there are none, or not all.
        left_out: whether it is set aside, and its part is drawn later.
        entry: the version of the object that was read, where that is not the listed one.
    """

    samples: list[Sample] = field(default_factory=list)
    origins: list[tuple[int, int]] = field(default_factory=list)
    hole: str | None = None
    left_out: bool = False
    entry: Entry | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(map(sample_bytes, self.samples))


class Allowance:
    """Admits what the visits of one group bring; for one event loop.

    Args:
        visits: how many there will be.
        limits: None where all samples are of one size, so that the sizes of shards say it all.
    """

    def __init__(self, visits: int, limits: Limits | None) -> None:
        self._limits = limits
        self._results: list[Visited | None] = [None] * visits
        self._settled = 0  # visits whose samples were admitted, or not
        self._admitted = 0  # bytes
        self._waiting = 0  # bytes of visits behind one that is still under way
        self._moved = asyncio.Event()

    async def room(self) -> None:
        """Wait until another visit may begin.

        Visits begin in order, so whatever is held back waits for one that is under way.
        """
        while self._limits and self._waiting and self._held > self._limits.group_bytes:
            self._moved.clear()
            await self._moved.wait()

    @property
    def _held(self) -> int:
        return self._admitted + self._waiting

    def put(self, place: int, visited: Visited) -> None:
        """Take what a visit brought."""
        self._results[place] = visited
        if self._limits is not None:
            self._waiting += visited.nbytes
            self._settle(self._limits)
        self._moved.set()

    def _settle(self, limits: Limits) -> None:
        while self._settled < len(self._results):
            visited = self._results[self._settled]
            if visited is None:
                return
            self._waiting -= visited.nbytes
            self._admitted = admit(visited, self._admitted, limits)
            self._settled += 1

    def results(self) -> Sequence[Visited]:
        """Return what was admitted, by visit; all of them must have ended."""
        return [result for result in self._results if result is not None]


def admit(visited: Visited, before: int, limits: Limits) -> int:
    """Keep the samples of a visit that fit, and note a hole for the others.

    Args:
        visited: is changed.
        before: bytes of the samples that were admitted already.
        limits: of the group.

    Returns:
        Bytes of all samples that are admitted now.
    """
    samples, origins = visited.samples, visited.origins
    visited.samples, visited.origins = [], []
    for sample, origin in zip(samples, origins, strict=True):
        nbytes = sample_bytes(sample)
        if nbytes > limits.sample_bytes:
            visited.hole = (
                f"a sample of {nbytes:,} bytes is larger than the {limits.sample_bytes:,} that "
                "one record can hold; cut smaller windows"
            )
        elif before + nbytes > limits.group_bytes:
            visited.hole = (
                f"a sample of {nbytes:,} bytes does not fit into the {limits.group_bytes:,} that "
                f"its group may take in memory, of which {before:,} are used; samples that "
                "differ so much in size need a larger sampling.shard_samples"
            )
        else:
            visited.samples.append(sample)
            visited.origins.append(origin)
            before += nbytes
    return before
