"""The problems of a plan, and their remedies. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from growcache.errors import ConfigError
from growcache.humanize import as_size, in_bytes, in_count, plural
from growcache.loading.plan import window_samples
from growcache.loading.report_table import WARN_REUSE
from growcache.monitor.plan_figures import Outcome, PlanInputs, Warned
from growcache.sampling.sizing import SizeEstimate, check_bound

FEW_NEIGHBOURS = 4  # samples per visit below which their likeness hardly matters
CORRELATIONS = (0.1, 0.5)
THROTTLED = 0.5  # of the link's samples, below which training limits the samplers


def worth(visit: float, correlation: float) -> float:
    """Return the value of each sample of a visit, in independent samples.

    >>> round(worth(16, 0.1), 2), worth(1, 0.5)
    (0.4, 1.0)
    """
    return 1 / (1 + (visit - 1) * correlation)


def warnings_of(inputs: PlanInputs, outcome: Outcome) -> list[Warned]:
    checks = (
        _bound,
        _disk,
        _min_samples,
        _reuse,
        _throttled,
        _neighbours,
        _windows,
        _jobs,
        _unknown,
    )
    return [found for check in checks for found in check(inputs, outcome)]


def _bound(inputs: PlanInputs, outcome: Outcome) -> Iterator[Warned]:
    estimate = SizeEstimate(inputs.sizing, inputs.record_bytes)
    try:
        check_bound(inputs.config, estimate.full_group_bytes(), inputs.catalog_bytes)
    except ConfigError as error:
        text, _semicolon, remedy = str(error).partition("; ")
        yield Warned("refused", f"the service would not start: {text}", remedy)


def _disk(inputs: PlanInputs, _: Outcome) -> Iterator[Warned]:
    bound, free = int(inputs.config.cache.max_bytes), inputs.free_bytes.number
    if bound > free:
        yield Warned(
            "disk",
            f"cache.max_bytes is {in_bytes(bound)}, but the disk has {in_bytes(free)} for the "
            "cache after cache.min_free",
            f"set cache.max_bytes to {as_size(_rounded(free))} or less, or use a larger disk",
        )


def _rounded(nbytes: float) -> int:
    """Return a size rounded down to two digits."""
    if nbytes < 100:
        return int(nbytes)
    unit = 10 ** (int(math.log10(nbytes)) - 1)
    return int(nbytes // unit * unit)


def _min_samples(inputs: PlanInputs, _: Outcome) -> Iterator[Warned]:
    wanted = min(inputs.min_samples.number, inputs.population_samples.number)
    held = inputs.capacity_samples
    if wanted <= held:
        return
    needed = int(inputs.config.cache.max_bytes) * wanted / max(1, held)
    yield Warned(
        "min_samples",
        f"the cache holds {in_count(held)} samples, fewer than min_samples "
        f"({in_count(wanted)}): training would not start",
        f"set min_samples to less than {held:,}, or cache.max_bytes to {as_size(_rounded_up(needed))}",
    )


def _rounded_up(nbytes: float) -> int:
    unit = 10 ** max(0, int(math.log10(max(1.0, nbytes))) - 1)
    return int(-(-nbytes // unit) * unit)


def _reuse(inputs: PlanInputs, outcome: Outcome) -> Iterator[Warned]:
    reuse = outcome["reuse_when_full"].value
    if reuse is None or reuse <= WARN_REUSE or _is_throttled(inputs, outcome):
        return
    text = f"each sample is used {reuse:.1f} times before it leaves the cache"
    sampling = inputs.config.sampling
    if sampling.max_bytes_per_second is not None:
        remedy = "raise sampling.max_bytes_per_second"
    elif inputs.limited_by == "latency":
        remedy = f"requests limit the samplers, not the link: raise sampling.concurrency ({sampling.concurrency})"
        if inputs.visit_samples.number < FEW_NEIGHBOURS:
            remedy += ", or sampling.samples_per_object where neighbours are not alike"
    elif inputs.limited_by == "processor":
        remedy = f"processors limit the samplers: raise sampling.workers ({sampling.workers}) up to the cores"
    else:
        remedy = (
            "the link is used up: use a faster one, or cache.max_reuse with on_max_reuse: wait"
        )
    yield Warned("reuse", text, remedy)


def _link_samples(inputs: PlanInputs) -> float:
    """Return the samples per second that link, latency and processors allow."""
    sampling, visit = inputs.config.sampling, inputs.visit_seconds.number
    limits = [
        inputs.link_bytes_per_second.number / max(1e-9, inputs.visit_bytes.number),
        sampling.samplers * sampling.concurrency / visit,
        (min(inputs.cores, sampling.workers) + sampling.samplers_elsewhere)
        / inputs.cpu_seconds.number,
    ]
    if sampling.max_bytes_per_second is not None:
        limits.append(int(sampling.max_bytes_per_second) / max(1e-9, inputs.visit_bytes.number))
    return min(limits) * inputs.visit_samples.number


def _is_throttled(inputs: PlanInputs, outcome: Outcome) -> bool:
    turnover, full = outcome["turnover_seconds"].value, outcome["full_seconds"].value
    if turnover is None or full is None or inputs.consumption is None:
        return False
    return inputs.capacity_samples / turnover < THROTTLED * _link_samples(inputs)


def _throttled(inputs: PlanInputs, outcome: Outcome) -> Iterator[Warned]:
    reuse, consumption = outcome["reuse_when_full"].value, inputs.consumption
    if not reuse or consumption is None or not _is_throttled(inputs, outcome):
        return
    drawn = consumption.number / reuse
    yield Warned(
        "throttled",
        f"once the cache is full samplers wait for training: {in_count(drawn)} of "
        f"{in_count(_link_samples(inputs))} samples/s that the store could bring are drawn, because "
        f"snapshots hold their shards, and only a part of each pass is new (reuse {reuse:.1f})",
        "a larger cache.max_bytes delays that; else the link is faster than this training needs",
    )


def _neighbours(inputs: PlanInputs, _: Outcome) -> Iterator[Warned]:
    visit = inputs.visit_samples.number
    if visit <= FEW_NEIGHBOURS:
        return
    low, high = (f"{worth(visit, rho):.2f}" for rho in CORRELATIONS)
    is_whole = all(cut.whole for cut in inputs.sizing.partitionings)
    remedy = "its objects are read whole: this cannot be lowered"
    if not is_whole:
        remedy = "lower sampling.samples_per_object, unless requests limit the samplers"
    yield Warned(
        "neighbours",
        f"a visit brings {in_count(visit)} neighbouring samples: where they correlate by "
        f"{CORRELATIONS[0]:g} each is worth {low} independent ones, by {CORRELATIONS[1]:g} {high}",
        remedy,
    )


def _windows(inputs: PlanInputs, _: Outcome) -> Iterator[Warned]:
    window = window_samples(int(inputs.sample_bytes), inputs.sizing.shard_samples)
    held = inputs.capacity_samples
    if min(held, inputs.population_samples.number) >= 2 * window:
        return
    if inputs.population_samples.number <= held:
        return  # all of it is cached, however little
    needed = int(inputs.config.cache.max_bytes) * 2 * window / max(1, held)
    yield Warned(
        "windows",
        f"the cache holds {in_count(held)} samples, fewer than two windows of a loader "
        f"({plural(window, 'sample')} each), so epochs are short and repetitive",
        f"set cache.max_bytes to {as_size(_rounded_up(needed))} or more",
    )


def _jobs(inputs: PlanInputs, _: Outcome) -> Iterator[Warned]:
    if inputs.jobs < 2:
        return
    yield Warned(
        "jobs",
        f"{inputs.jobs} jobs train on the cache and are planned as one loop, but shards stay until each of them "
        "has used them, so the slowest one sets turnover, coverage and egress",
        "give the slowest job's rate as --consume; where it holds back the others, give each job a cache of its own",
    )


def _unknown(inputs: PlanInputs, _: Outcome) -> Iterator[Warned]:
    if inputs.consumption is None:
        yield Warned(
            "consumption",
            "it is not known how fast training takes samples, so reuse, turnover and coverage "
            "are unknown",
            "give --consume N, in samples per second",
        )
    if not math.isfinite(inputs.population_samples.number):
        yield Warned(
            "population",
            "a user's function draws the samples, so there is no coverage",
            "reuse and effective samples say how varied training is",
        )
    elif not inputs.is_listed:
        yield Warned(
            "listing",
            "the source was listed only in part, so its population is at least "
            f"{in_count(inputs.population_samples.number)} samples",
            "coverage is shown by growcache status once all is listed",
        )
