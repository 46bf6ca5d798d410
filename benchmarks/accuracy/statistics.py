"""Statistics of an experiment's runs: paired differences, their intervals, and verdicts by a margin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Verdict = Literal["as good", "worse", "undecided"]
RESAMPLES = 10_000
LEVEL = 0.95


class Interval(NamedTuple):
    """A mean, or another statistic of the seeds, and its bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def paired_differences(arm: Mapping[int, float], reference: Mapping[int, float]) -> Floats:
    """Return arm − reference for each seed that both have."""
    seeds = sorted(arm.keys() & reference.keys())
    return np.array([arm[seed] - reference[seed] for seed in seeds], np.float64)


def resampled(count: int, resamples: int = RESAMPLES) -> npt.NDArray[np.int64]:
    """Return the seeds of each resample, as [resamples, count] places; the same at every call."""
    return np.random.default_rng(0).integers(0, count, (resamples, count))


def mean_interval(values: npt.ArrayLike) -> Interval:
    """Return the mean and its percentile bootstrap interval.

    >>> mean_interval([1.0, 1.0, 1.0])
    Interval(value=1.0, low=1.0, high=1.0)
    """
    array = np.asarray(values, np.float64)
    if not array.size:
        raise ValueError("no interval of no values: the arms have no seed in common")
    means = array[resampled(array.size)].mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(array.mean()), float(low), float(high))


def not_worse(difference: Interval, margin: float) -> Verdict:
    """Judge a difference (arm − reference) of a metric of which more is better.

    An end of the interval that is within a tenth of its width of the margin decides nothing.

    >>> not_worse(Interval(-0.1, -0.3, 0.1), margin=0.5)
    'as good'
    >>> not_worse(Interval(-0.4, -0.6, -0.2), margin=0.5)
    'undecided'
    """
    near = (difference.high - difference.low) / 10
    if difference.low - near > -margin:
        return "as good"
    return "worse" if difference.high + near < -margin else "undecided"


def effective_samples(uses: npt.ArrayLike) -> float:
    """Return (Σu)² / Σu²: as many samples used equally often would be worth about as much.

    >>> effective_samples([3, 3, 3, 0])
    3.0
    """
    counts = np.asarray(uses, np.float64)
    squares = float((counts**2).sum())
    return float(counts.sum()) ** 2 / squares if squares else 0.0


def visit_worth(samples: float, per_visit: float, correlation: float) -> float:
    """Return n / (1 + (k − 1) ρ), which samples in visits of k correlated ones are worth.

    >>> visit_worth(1_000, per_visit=1, correlation=0.5)
    1000.0
    """
    return samples / (1 + (per_visit - 1) * correlation)


def first_reaching(
    curve: Sequence[tuple[float, float]], target: float, at: Callable[[float], float] = float
) -> float | None:
    """Return where (step, seconds or bytes) a curve of (where, metric) first has the target.

    >>> first_reaching([(100, 80.0), (200, 91.0), (300, 89.0)], target=90)
    200.0
    """
    return next((at(where) for where, metric in curve if metric >= target), None)


def crossing(levels: Sequence[float], losses: npt.ArrayLike, margin: float) -> float:
    """Return the level at which the loss first exceeds the margin; infinite if it never does.

    Between two levels it is interpolated on a logarithmic scale of levels.

    >>> crossing([1, 4, 16], [0.0, 0.25, 0.75], margin=0.5)
    8.0
    """
    values = np.asarray(losses, np.float64)
    above = np.flatnonzero(values > margin)
    if not above.size:
        return math.inf
    place = int(above[0])
    if place == 0:
        return float(levels[0])
    before, after = values[place - 1], values[place]
    share = float((margin - before) / (after - before))
    return float(levels[place - 1] * (levels[place] / levels[place - 1]) ** share)


def crossing_interval(levels: Sequence[float], losses: Floats, margin: float) -> Interval:
    """Return the crossing of the mean of losses [seeds, levels], and its interval over seeds."""
    means = losses[resampled(len(losses))].mean(1)
    found = np.sort([crossing(levels, row, margin) for row in means])
    last = len(found) - 1
    low, high = found[round(last * (1 - LEVEL) / 2)], found[round(last * (1 + LEVEL) / 2)]
    return Interval(crossing(levels, losses.mean(0), margin), float(low), float(high))
