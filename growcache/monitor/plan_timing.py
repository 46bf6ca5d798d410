"""Time a few visits of a source: alone, and with the reads in flight of all samplers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import TypeAlias

from growcache.config import Config
from growcache.errors import SamplingError
from growcache.sampling.fill import GroupFiller
from growcache.sampling.messages import PartVisit, Permit
from growcache.sampling.sampler_memory import VisitResult
from growcache.sampling.sizing import takes_some_samples
from growcache.schema import Schema

ALONE_VISITS = 4  # one after another; the first one opens the connection
TIMED_SECONDS = 3.0
TIMED_BYTES = 32_000_000
MOST_TIMED = 1024  # visits
WAVES = 1.5  # of reads in flight, at least, among the timed visits
# Of the rate that latency or one processor allows; the rest is for the link.
MEASURED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of visits."""

    alone_seconds: float
    rate: float  # visits per second
    cpu_seconds: float  # of a visit
    visits: int
    nbytes: int
    requests: int
    samples: int
    in_flight: int

    @property
    def visit_bytes(self) -> float:
        return self.nbytes / self.visits

    @property
    def limited_by(self) -> str:
        """The limit of the measured rate: ``latency``, ``processor`` or ``link``."""
        rate = self.rate
        if rate * self.cpu_seconds > MEASURED_SHARE:
            return "processor"
        reachable = self.in_flight / self.alone_seconds
        if not self.nbytes:  # growcache does not see a Dataset's own reads
            return "latency"
        return "latency" if rate > MEASURED_SHARE * reachable else "link"


@dataclass(slots=True)
class ReadCounter:
    nbytes: int = 0
    requests: int = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.requests += 1


Visited: TypeAlias = list[tuple[PartVisit, VisitResult]]


async def time_visits(
    config: Config,
    filler: GroupFiller,
    visits: Iterator[PartVisit],
    schema: Schema,
    read: ReadCounter,
) -> tuple[Timings, Visited]:
    sampling = config.sampling
    in_flight = sampling.samplers * sampling.concurrency
    take = None
    if takes_some_samples(sampling):
        take = 1 if sampling.samples_per_object == "auto" else sampling.samples_per_object

    async def fill(count: int) -> tuple[Visited, ReadCounter, float]:
        """Make the next visits; return them, the bytes that they read, and their seconds."""
        some, before, began = list(islice(visits, count)), replace(read), time.monotonic()
        results = await filler.visit_all(plan_permit(some, take), schema, lambda: None)
        spent = ReadCounter(read.nbytes - before.nbytes, read.requests - before.requests)
        return list(zip(some, results, strict=True)), spent, time.monotonic() - began

    alone = [await fill(1) for _ in range(ALONE_VISITS)]
    wave = await fill(in_flight)  # opens all connections
    each = wave[1].nbytes / max(1, len(wave[0]))
    cpu = time.process_time()
    timed = await fill(_how_many(len(wave[0]), in_flight, wave[2], each))
    cpu = time.process_time() - cpu
    found = [*(one for some, _, _ in alone for one in some), *wave[0], *timed[0]]
    if not found:
        raise SamplingError("there is no part to draw", code="GC217")
    seconds = [took for some, _, took in alone if some]
    alone_seconds = median(seconds[1:] or seconds)
    if not timed[0]:  # a source so small that all of it was read before
        timed = found, read, alone_seconds * len(found) / in_flight
    return _timings(timed, alone_seconds, cpu, in_flight), found


def _timings(
    timed: tuple[Visited, ReadCounter, float], alone: float, cpu: float, in_flight: int
) -> Timings:
    visited, spent, took = timed
    return Timings(
        alone,
        _rate(len(visited), took, alone),
        cpu / len(visited),
        len(visited),
        spent.nbytes,
        spent.requests,
        sum(len(result.samples) for _, result in visited),
        in_flight,
    )


def _how_many(wave: int, in_flight: int, seconds: float, each: float) -> int:
    """Return the number of visits that can be timed in some seconds, by those of one wave."""
    if not wave:
        return 0
    fit = wave * TIMED_SECONDS / max(1e-3, seconds)
    return int(max(WAVES * in_flight, min(fit, TIMED_BYTES / max(1.0, each), MOST_TIMED)))


def _rate(count: int, seconds: float, alone: float) -> float:
    """Return visits per second, without the time in which the first visits had only started."""
    rate = count / max(1e-6, seconds)
    latency = max(0.0, alone - 1 / rate)
    return count / max(seconds / 2, seconds - latency)


def plan_permit(visits: Sequence[PartVisit], take: int | None) -> Permit:
    return Permit("plan", 0, 0, 0, (0,), tuple(visits), take)
