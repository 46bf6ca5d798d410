"""The recent past of a cache: for its curve, its growth, and the time that is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from growcache.cache.status import Status

RATE_SECONDS = 30.0
Point = tuple[float, int, int]  # time, samples, bytes


@dataclass
class History:
    """What the cache held at times gone by.

    Points are thinned as the time they span grows, so that it never holds many.
    """

    capacity: int = 240
    points: list[Point] = field(default_factory=list)
    spacing: float = 0.25

    def add(self, at: float, status: Status) -> None:
        """Remember a status, in place of the last one if that was but a moment ago."""
        if self.points and at - self.points[-1][0] < self.spacing:
            at = self.points.pop()[0]
        self.points.append((at, status.samples, status.bytes))
        if len(self.points) > self.capacity:
            self.points = self.points[::2]
            self.spacing *= 2

    def seconds(self) -> float:
        """Return how far back it goes."""
        return self.points[-1][0] - self.points[0][0] if self.points else 0.0

    def growth(self) -> float:
        """Return bytes per second by which the cache grew lately."""
        return self._growth(lambda point: point[2])

    def sample_growth(self) -> float:
        """Return samples per second by which the cache grew lately."""
        return self._growth(lambda point: point[1])

    def samples(self, width: int) -> list[int]:
        """Return the number of cached samples at ``width`` evenly spaced times."""
        if len(self.points) < 2:
            return []
        start, end = self.points[0][0], self.points[-1][0]
        curve, position = [], 0
        for column in range(width):
            at = start + (end - start) * column / max(1, width - 1)
            while position + 1 < len(self.points) and self.points[position + 1][0] <= at:
                position += 1
            curve.append(self.points[position][1])
        return curve

    def _growth(self, amount: Callable[[Point], int]) -> float:
        if not self.points:
            return 0.0
        last = self.points[-1]
        first = next(p for p in self.points if p[0] >= last[0] - RATE_SECONDS)
        elapsed = last[0] - first[0]
        return (amount(last) - amount(first)) / elapsed if elapsed > 0 else 0.0
