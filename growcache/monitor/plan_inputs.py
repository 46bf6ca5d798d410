"""The inputs of a plan: measured at source, disk and cache, given by the user, or assumed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

from growcache.cache.files import CacheLayout, allocated_tree
from growcache.cache.space import min_free_bytes
from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.cache.system import memory_bytes
from growcache.config import Config
from growcache.errors import GrowcacheError
from growcache.monitor.plan_figures import Figure, PlanInputs
from growcache.monitor.plan_source import Look
from growcache.monitor.plan_timing import Timings
from growcache.monitor.prices import Price, find_price, usual_price
from growcache.monitor.store_address import store_address
from growcache.store.urls import parse_url
from growcache.usercode import child_environment

# Time from the command to the first permit, in multiples of a single sampler's start. A sampler
# starts after the supervisor, and all start together.
STARTS = Figure(3.5, 2.5, 6.0, "measured")
USUAL_START_SECONDS = 0.5
MIN_SAMPLES = 1000  # a loader's default
RATE_ERROR = 0.1  # of a rate that was measured for some seconds
DISK_BYTES = 32_000_000  # written to measure the disk
USUAL_DISK = Figure(500e6, 100e6, 2e9, "assumed")  # bytes per second
JOB_SECONDS = 3.0  # for which a running job is watched
LEAST_CPU = 20e-6  # seconds per visit, below which a measurement is not reliable


@dataclass(frozen=True, slots=True)
class Given:
    """Values that the user gave; None if measured or assumed."""

    consume: float | None = None  # samples per second
    link: float | None = None  # bytes per second
    min_samples: int | None = None
    horizon_seconds: float = 3600.0
    price: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Measurements of this machine, made once for all compared configurations."""

    disk_bytes_per_second: Figure
    consumption: Figure | None
    startup_seconds: Figure
    jobs: int = 1  # whose samples are in the consumption


def look_at_machine(config: Config, given: Given) -> Machine:
    path = config.cache.path
    consumption = _consumption(path, given.consume)
    jobs = open_jobs(path) if given.consume is None else 1
    return Machine(disk_speed(path), consumption, startup(), max(1, jobs))


def startup() -> Figure:
    """Start a sampler without input, which ends at once; return the start-up time of a service."""
    began = time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-m", "growcache", "sampler"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=True,
            env=child_environment(),
        )
    except (OSError, subprocess.SubprocessError):
        return replace(STARTS.times(USUAL_START_SECONDS), basis="assumed")
    return STARTS.times(time.monotonic() - began)


def inputs_of(config: Config, look: Look, machine: Machine, given: Given) -> PlanInputs:
    """Return the inputs for one configuration, whose source was probed."""
    timings = look.timings
    link, seconds = _link(timings, given.link)
    price = find_price(given.price) if given.price else _usual_price(config)
    return PlanInputs(
        config=config,
        sizing=look.sizing,
        parts=look.parts,
        shard_bytes=look.shard_bytes,
        record_bytes=look.record_bytes,
        sample_bytes=look.sample_bytes,
        catalog_bytes=look.catalog_bytes,
        link_bytes_per_second=link,
        limited_by=timings.limited_by if given.link is None else "link",
        visit_seconds=seconds,
        visit_bytes=Figure.exact(timings.visit_bytes, "measured"),
        visit_requests=Figure.exact(timings.requests / timings.visits, "measured"),
        visit_samples=Figure.exact(max(1e-6, look.samples_of_visit), "measured"),
        cpu_seconds=Figure.exact(max(LEAST_CPU, timings.cpu_seconds), "measured"),
        disk_bytes_per_second=machine.disk_bytes_per_second,
        free_bytes=Figure.exact(free_for_cache(config), "measured"),
        startup_seconds=machine.startup_seconds.plus(_until_drawn(config, look)),
        population_samples=_population(look),
        consumption=machine.consumption,
        jobs=machine.jobs,
        min_samples=Figure.exact(
            given.min_samples or MIN_SAMPLES, "given" if given.min_samples else "assumed"
        ),
        price=price,
        price_basis="given" if given.price else "assumed",
        is_listed=look.is_whole,
        memory_bytes=memory_bytes(),
        cores=len(os.sched_getaffinity(0)),
        horizon_seconds=given.horizon_seconds,
    )


def _until_drawn(config: Config, look: Look) -> float:
    """Return the time of the store before a first draw. Strata need the whole listing."""
    listing = look.first_page_seconds
    if config.sampling.strata is not None:
        listing = look.listing_seconds
    return listing + look.probe_seconds


def _link(timings: Timings, given: float | None) -> tuple[Figure, Figure]:
    """Return the link's bytes per second, and the seconds of a visit without others."""
    alone = timings.alone_seconds
    if given is not None:
        transfer = timings.visit_bytes / given
        return Figure.exact(given, "given"), Figure.exact(max(alone, transfer), "measured")
    rate, low, high = (timings.rate * factor for factor in (1, 1 - RATE_ERROR, 1 + RATE_ERROR))
    rates = Figure(rate, low, high, "measured")
    no_limit = Figure.exact(math.inf, "measured")
    match timings.limited_by:
        case "link":
            return rates.times(timings.visit_bytes), Figure.exact(alone, "measured")
        case "latency":
            return no_limit, rates.dividing(timings.in_flight)
    return no_limit, Figure.exact(alone, "measured")


def _population(look: Look) -> Figure:
    samples = look.population_samples
    if look.is_endless:
        return Figure(math.inf, None, None, "measured")
    return Figure(samples, samples, samples if look.is_whole else None, "measured")


def _usual_price(config: Config) -> Price | None:
    return usual_price(
        [
            store_address(parse_url(url), source.storage_options, os.environ)
            for source in config.sources
            for url in source.url
        ]
    )


# ------------------------------------------------------------------------ this machine


def _existing_parent(path: Path) -> Path:
    absolute = path.absolute()
    return next(one for one in (absolute, *absolute.parents) if one.is_dir())


def free_for_cache(config: Config) -> float:
    """Return the bytes for a cache: free ones without `min_free`, and those that it has already."""
    path = _existing_parent(config.cache.path)
    disk = os.statvfs(path)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    held = allocated_tree(config.cache.path) if config.cache.path.is_dir() else 0
    return float(max(0, free + held - min_free_bytes(config.cache.min_free, total)))


def disk_speed(path: Path) -> Figure:
    """Write and sync some megabytes at the cache's place, without leaving a file."""
    data = os.urandom(1 << 20)
    try:
        with TemporaryFile(dir=_existing_parent(path)) as file:
            began = time.monotonic()
            for _ in range(DISK_BYTES >> 20):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            speed = DISK_BYTES / max(1e-6, time.monotonic() - began)
    except OSError:
        return USUAL_DISK
    return Figure.exact(speed, "measured")


def _consumption(path: Path, given: float | None) -> Figure | None:
    if given is not None:
        return Figure.exact(given, "given")
    measured = running_consumption(path)
    return (
        None
        if measured is None
        else Figure(measured, 0.9 * measured, 1.1 * measured, "measured")
    )


def _waited_seconds(status: Status) -> float:
    return sum(job.waits.seconds for job in status.jobs)


def open_jobs(path: Path) -> int:
    """Return the number of jobs that train on a cache now."""
    with suppress(GrowcacheError, OSError, ValueError):
        if CacheLayout(path).root.is_dir():
            return sum(job.open for job in read_status(path).jobs)
    return 0


def running_consumption(path: Path) -> float | None:
    """Return the samples per second that a cache's jobs consume, or None without jobs."""
    with suppress(GrowcacheError, OSError, ValueError):
        if not CacheLayout(path).root.is_dir():
            return None
        first = read_status(path)
        if not any(job.open for job in first.jobs):
            return None
        time.sleep(JOB_SECONDS)
        last = read_status(path)
        delivered = last.delivered - first.delivered
        # Each time, the service's file is some tenths of a second old.
        seconds = (last.updated_at or 0.0) - (first.updated_at or 0.0)
        seconds -= max(0.0, _waited_seconds(last) - _waited_seconds(first))
        return delivered / seconds if delivered > 0 and seconds > 0 else None
    return None
