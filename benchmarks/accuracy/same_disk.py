"""E2's growing caches against frozen subsets on the same disk, and effective samples as a predictor of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.stats import spearmanr

from benchmarks.accuracy.cache_size import EXPERIMENT, PERCENTS
from benchmarks.accuracy.results import Curves, figures_of, final_metrics
from benchmarks.accuracy.statistics import Interval, mean_interval
from benchmarks.accuracy.tables import MIN_SEEDS

TASK = "cache size"
HEAD = "| cache | growing − frozen | verdict | peak disk, MB | effective samples |"


class Pair(NamedTuple):
    """A growing cache and a frozen subset of the same share, over the seeds that both have."""

    percent: int
    seeds: int
    difference: Interval

    @property
    def verdict(self) -> str:
        """Whether the growing cache is better beyond the interval."""
        if self.seeds < MIN_SEEDS:
            return "too few seeds"
        if EXPERIMENT.metric.is_better(self.difference):
            return "better"
        worse = EXPERIMENT.metric.gain(self.difference).high < 0
        return "worse" if worse else "no difference shown"


def pairs(curves: Curves) -> Iterator[Pair]:
    """Yield the pairs that have results, by size."""
    metrics = final_metrics(curves, TASK)
    for percent in PERCENTS:
        growing, frozen = (
            metrics.get(f"{kind} {percent} %", {}) for kind in ("growing", "frozen")
        )
        if both := growing.keys() & frozen.keys():
            differences = EXPERIMENT.metric.differences(growing, frozen)
            yield Pair(percent, len(both), mean_interval(differences))


def mean_figure(curves: Curves, arm: str, figure: str) -> float:
    """Return the mean over seeds of another figure of an arm."""
    found = [
        figures_of(rows)[figure]
        for run, rows in curves.items()
        if run.experiment == TASK and run.arm == arm
    ]
    return float(np.mean(found))


def pairs_table(curves: Curves) -> str:
    """Return a table of the pairs."""
    rows = [
        f"| {pair.percent} % | {pair.difference} % | {pair.verdict} "
        f"| {_both(curves, pair.percent, 'disk_bytes', 1e6, '.2f')} "
        f"| {_both(curves, pair.percent, 'ess_samples', 1, ',.0f')} |"
        for pair in pairs(curves)
    ]
    return "\n".join([HEAD, "| --- | --- | --- | --- | --- |", *rows])


def _both(curves: Curves, percent: int, figure: str, unit: float, form: str) -> str:
    growing, frozen = (
        format(mean_figure(curves, f"{kind} {percent} %", figure) / unit, form)
        for kind in ("growing", "frozen")
    )
    return f"{growing}, frozen {frozen}"


def effective_samples(curves: Curves) -> dict[str, float]:
    """Return the effective samples of each arm that has a cache."""
    arms = [arm for arm in final_metrics(curves, TASK) if arm != EXPERIMENT.reference]
    return {arm: mean_figure(curves, arm, "ess_samples") for arm in arms}


def rank_correlation(curves: Curves) -> float:
    """Return Spearman's rank correlation of effective samples and the difference from full data, over the arms."""
    metrics, sizes = final_metrics(curves, TASK), effective_samples(curves)
    full = metrics[EXPERIMENT.reference]
    worse = [float(EXPERIMENT.metric.differences(metrics[arm], full).mean()) for arm in sizes]
    return float(spearmanr(list(sizes.values()), worse).statistic)
