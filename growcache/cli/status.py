"""A status as text: a sentence, lines for a log, JSON for programs.

No terminal library is needed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Self, TextIO

from growcache.cache.status_model import Status, left_out_text
from growcache.cli.terminal import fold_to_width, print_json
from growcache.humanize import in_bytes, in_count, in_percent, in_time, plural

GROWTH_SECONDS = 30.0  # period over which growth is measured
STARVED_SECONDS = 10.0  # twice the period of rates
FULL_COVERAGE = 0.9999
JSON_SECONDS = 1.0
PLAIN_SECONDS = 10.0
MAX_POINTS = 240


@dataclass
class StatusHistory:
    """Points (time, samples, bytes) of the cache, which are thinned as their time span grows."""

    points: list[tuple[float, int, int]] = field(default_factory=list)
    spacing: float = 0.25

    def add(self, at: float, status: Status) -> None:
        if self.points and at - self.points[-1][0] < self.spacing:
            at = self.points.pop()[0]
        self.points.append((at, status.samples, status.bytes))
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self.spacing *= 2

    def span_seconds(self) -> float:
        return self.points[-1][0] - self.points[0][0] if self.points else 0.0

    def samples_per_second(self) -> float:
        return self._growth(1)

    def bytes_per_second(self) -> float:
        return self._growth(2)

    def curve(self, width: int) -> list[int]:
        last = len(self.points) - 1
        count = max(1, min(width - 1, last))
        return [self.points[i * last // count][1] for i in range(count + 1)] if last > 0 else []

    def _growth(self, column: int) -> float:
        if not self.points:
            return 0.0
        last = self.points[-1]
        first = next(p for p in self.points if p[0] >= last[0] - GROWTH_SECONDS)
        elapsed = last[0] - first[0]
        return (last[column] - first[column]) / elapsed if elapsed > 0 else 0.0


def status_sentence(status: Status) -> str:
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
    if status.moved.parts:
        parts.append(f"{plural(status.moved.parts, 'part')} of moved lanes")
    return " · ".join(parts)


def state_meaning(status: Status, history: StatusHistory | None) -> str:
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
    states = {worker.state for worker in status.worker_states}
    is_idle = not status.bytes_per_second and not status.samples_per_second
    if status.uptime_seconds > STARVED_SECONDS and is_idle and "reading" in states:
        return "nothing has come from the store lately; samplers keep trying"
    if status.state == "full" or status.full:
        if status.retired_bytes and "waiting" in states:
            leaving = plural(status.retired_shards or 1, "old shard")
            return f"at its bound; samplers wait until readers release {leaving}"
        return "at its bound; each new shard replaces an old one"
    return _filling_meaning(status, history)


def _why_complete(status: Status) -> str:
    if status.coverage is not None and status.coverage < FULL_COVERAGE:
        return "it is at its limit, and nothing is evicted"
    return "everything that can be read is cached" if status.holes else "everything is cached"


def _filling_meaning(status: Status, history: StatusHistory | None) -> str:
    if history is not None and history.span_seconds() >= 3 and history.bytes_per_second() > 0:
        free = status.max_bytes - status.bytes - status.reserved_bytes
        full = free / history.bytes_per_second()
        left = math.inf  # samples that were never drawn
        if status.coverage is not None and status.population_samples:
            left = status.population_samples * (1 - status.coverage)
        whole = left / max(1e-9, history.samples_per_second())
        end = "all of it cached" if whole < full else "full"
        return f"filling; {end} in about {in_time(max(1, min(whole, full)))}"
    return (
        "filling; the first shards are small, so that training starts soon"
        if status.ramping
        else "filling"
    )


def coverage_text(status: Status) -> tuple[str, float | None]:
    found = status.objects - status.unmatched
    objects = plural(next((one.objects for one in status.subsets if one.used), found), "object")
    if status.unmatched:
        objects += f", {status.unmatched:,} unmatched ones left out"
    if status.left_out:
        objects += f" (left out: {left_out_text(status.left_out)})"
    if status.endless:
        return "unknown, because your function draws the samples itself", None
    if not status.listing_complete:
        if status.state != "stopped":
            return f"known when the listing is complete; {objects} so far", None
        seen = f"; {objects} so far" if status.objects else ""
        return f"not known, because no listing was completed{seen}", None
    if status.coverage is None or not status.population_samples:
        return f"not known yet; {objects}", None
    samples = f"about {in_count(status.population_samples)} samples in {objects}"
    return f"{in_percent(status.coverage)} of {samples}", status.coverage


def trouble_texts(status: Status) -> list[str]:
    counts = (
        (status.failures, "failed attempt", " (tried again)"),
        (status.holes, "hole", " (unreadable, left out)"),
        (status.empty_visits, "object", " without a sample"),
        (status.restarts, "sampler restart", ""),
        (status.purging, "shard", " with purged samples (held by readers)"),
    )
    return [f"{plural(count, noun)}{more}" for count, noun, more in counts if count]


class StatusReporter:
    # Takes the samplers' error output. None leaves it on this process's error stream.
    on_stderr: Callable[[bytes], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def show(self, status: Status) -> None:
        raise NotImplementedError


class StatusLines(StatusReporter):
    def __init__(self, write: Callable[[Status], None], seconds: float) -> None:
        self._write = write
        self._seconds = seconds
        self._last: Status | None = None
        self._written: Status | None = None
        self._written_at = 0.0

    def __exit__(self, *exception: object) -> None:
        if self._last is not None and self._last is not self._written:
            self._write(self._last)

    def show(self, status: Status) -> None:
        self._last = status
        if (
            self._written is None
            or (status.state, status.waiting_for)
            != (self._written.state, self._written.waiting_for)
            or time.monotonic() - self._written_at >= self._seconds
        ):
            self._write(status)
            self._written, self._written_at = status, time.monotonic()


def json_lines(stream: IO[bytes] | None = None, seconds: float = JSON_SECONDS) -> StatusLines:
    return StatusLines(lambda status: print_json(status.to_json(), stream), seconds)


def plain_lines(stream: TextIO | None = None, seconds: float = PLAIN_SECONDS) -> StatusLines:
    to = stream or sys.stdout

    def write(status: Status) -> None:
        to.write(fold_to_width(status_sentence(status), to) + "\n")
        to.flush()

    return StatusLines(write, seconds)
