"""A status as text: a sentence, lines for a log, JSON for programs. It needs no terminal library.

`StatusHistory` remembers what the cache held, for its growth and the time that is left.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Self, TextIO

from growcache.cache.status import Status
from growcache.cli.humanize import in_bytes, in_count, in_percent, in_time, plural
from growcache.cli.terminal import fold_to_width

GROWTH_SECONDS = 30.0
HistoryPoint = tuple[float, int, int]  # time, samples, bytes


@dataclass
class StatusHistory:
    """What the cache held at times gone by.

    Points are thinned as the time they span grows, so that it never holds many.
    """

    capacity: int = 240
    points: list[HistoryPoint] = field(default_factory=list)
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

    def _growth(self, amount: Callable[[HistoryPoint], int]) -> float:
        if not self.points:
            return 0.0
        last = self.points[-1]
        first = next(p for p in self.points if p[0] >= last[0] - GROWTH_SECONDS)
        elapsed = last[0] - first[0]
        return (amount(last) - amount(first)) / elapsed if elapsed > 0 else 0.0


FULL_COVERAGE = 0.9999


STARVED_SECONDS = 10.0  # twice as long as rates look back


def status_sentence(status: Status) -> str:
    """Return a status in one line of plain text."""
    parts = [
        f"{status.state}: {state_meaning(status, None)}",
        f"{plural(status.samples, 'sample')} in {plural(status.shards, 'shard')}",
        f"{in_bytes(status.bytes)} of {in_bytes(status.max_bytes)}",
        f"{in_count(status.drawn)} drawn",
    ]
    if status.coverage is not None:
        parts.append(f"{in_percent(status.coverage)} covered")
    if status.failures:
        parts.append(plural(status.failures, "failed attempt"))
    if status.holes:
        parts.append(plural(status.holes, "hole"))
    if status.set_aside.parts:
        parts.append(f"{plural(status.set_aside.parts, 'part')} set aside")
    return " · ".join(parts)


def state_meaning(status: Status, history: StatusHistory | None) -> str:
    """Say in a sentence what the state means, and what ends it."""
    if status.state == "waiting":
        return f"for {status.waiting_for}" if status.waiting_for else "for the next report"
    if status.state == "stopped":
        if status.complete:
            return f"no service runs, and none is needed: {_why_complete(status)}"
        return "no service runs on this cache; start one: growcache run CONFIG"
    if status.state == "complete":
        return f"{_why_complete(status)}; nothing more is drawn"
    if status.state == "shrinking":
        awaited = f"; it waits for {status.waiting_for}" if status.waiting_for else ""
        return f"max_bytes was lowered to {in_bytes(status.target_bytes)}{awaited}"
    if status.waiting_for:
        return f"samplers wait for {status.waiting_for}"
    if _is_starved(status):
        return "nothing has come from the store lately; samplers keep trying"
    if status.state == "full" or status.full:
        return "at its bound; " + _full_meaning(status)
    return _filling_meaning(status, history)


def _why_complete(status: Status) -> str:
    """Say why nothing will ever be added: there is no more, or it may hold no more."""
    if status.coverage is not None and status.coverage < FULL_COVERAGE:
        return "it holds all that it may, and nothing leaves"
    return "everything that can be read is cached" if status.holes else "everything is cached"


def _is_starved(status: Status) -> bool:
    """Whether samplers read, and have got nothing for some time."""
    return (
        status.uptime_seconds > STARVED_SECONDS
        and not status.bytes_per_second
        and not status.samples_per_second
        and any(worker.state == "reading" for worker in status.worker_states)
    )


def _full_meaning(status: Status) -> str:
    if status.retired_bytes and any(w.state == "waiting" for w in status.worker_states):
        leaving = plural(status.retired_shards or 1, "old shard")
        return f"samplers wait until readers have let go of {leaving}"
    return "each new shard takes the place of an old one"


def _filling_meaning(status: Status, history: StatusHistory | None) -> str:
    if history is not None and history.seconds() >= 3 and history.growth() > 0:
        full = (status.max_bytes - status.bytes - status.reserved_bytes) / history.growth()
        whole = _samples_left(status) / max(1e-9, history.sample_growth())
        end = "all of it cached" if whole < full else "full"
        return f"filling; {end} in about {in_time(max(1, min(whole, full)))}"
    return "filling; the first shards are small, to start soon" if status.ramping else "filling"


def _samples_left(status: Status) -> float:
    """Return how many samples were never drawn; infinity where nobody knows."""
    if status.coverage is None or not status.population_samples:
        return math.inf
    return status.population_samples * (1 - status.coverage)


JSON_SECONDS = 1.0
PLAIN_SECONDS = 10.0


class StatusReporter:
    """What is told of every status, several times a second; it ends with its block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def show(self, status: Status) -> None:
        """Take notice of the newest status."""
        raise NotImplementedError


class _StatusLines(StatusReporter):
    """A line at every change of state, one every so often between, and the last one."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: Status | None = None
        self._written: Status | None = None
        self._written_at = 0.0

    def __exit__(self, *exception: object) -> None:
        if self._last is not None and self._last is not self._written:
            self._put(self._last)

    def show(self, status: Status) -> None:
        """Write the status, if it tells something new or enough time has passed."""
        self._last = status
        if (
            self._written is None
            or (status.state, status.waiting_for)
            != (self._written.state, self._written.waiting_for)
            or time.monotonic() - self._written_at >= self._seconds
        ):
            self._put(status)

    def _put(self, status: Status) -> None:
        self.write(status)
        self._written = status
        self._written_at = time.monotonic()

    def write(self, status: Status) -> None:
        """Write one line."""
        raise NotImplementedError


class JsonStatusLines(_StatusLines):
    """One JSON object per line, for programs: at least one a second."""

    def __init__(self, stream: IO[bytes] | None = None, seconds: float = JSON_SECONDS) -> None:
        super().__init__(seconds)
        self._stream = stream or sys.stdout.buffer

    def write(self, status: Status) -> None:
        """Write one line."""
        self._stream.write(status.to_json() + b"\n")
        self._stream.flush()


class PlainStatusLines(_StatusLines):
    """One sentence per line, for people at a terminal that cannot redraw."""

    def __init__(self, stream: TextIO | None = None, seconds: float = PLAIN_SECONDS) -> None:
        super().__init__(seconds)
        self._stream = stream or sys.stdout

    def write(self, status: Status) -> None:
        """Write one line."""
        self._stream.write(fold_to_width(status_sentence(status), self._stream) + "\n")
        self._stream.flush()
