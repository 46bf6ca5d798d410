"""The table of an experiment, from its results alone: every arm against a reference arm, by seed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.metrics import ACCURACY, Metric
from benchmarks.accuracy.results import Curves, Run, figures_of, final_metrics
from benchmarks.accuracy.statistics import Interval, crossing_interval, mean_interval

MIN_SEEDS = 5  # below which nothing is decided


class Line(NamedTuple):
    """An arm's figures; means over seeds."""

    arm: str
    seeds: int
    metric: Metric
    value: float
    difference: Interval | None
    reuse: float | None
    egress_bytes: float

    def cells(self) -> tuple[str, ...]:
        """Return the text of each column."""
        compared = ("reference", "") if self.difference is None else self._compared()
        reuse = "" if self.reuse is None else f"{self.reuse:.3g}"
        megabytes = f"{self.egress_bytes / 1e6:,.1f}"
        return (
            self.arm,
            str(self.seeds),
            f"{self.value:.{self.metric.decimals}f}",
            *compared,
            reuse,
            megabytes,
        )

    def _compared(self) -> tuple[str, str]:
        assert self.difference is not None
        text = f"{self.difference} %" if self.metric.relative else str(self.difference)
        if self.seeds < MIN_SEEDS:
            return text, "too few seeds"
        return text, self.metric.verdict(self.difference)


COMPARISONS = ("against reference", "verdict", "reuse", "egress, MB")


def lines(
    curves: Curves, experiment: str, reference: str, metric: Metric = ACCURACY
) -> Iterator[Line]:
    """Yield a line per arm, in the order of the results."""
    metrics = final_metrics(curves, experiment)
    base = metrics[reference]
    for arm, by_seed in metrics.items():
        ends = [curves[Run(experiment, arm, seed)] for seed in by_seed]
        reuses = [found["reuse"] for rows in ends if "reuse" in (found := figures_of(rows))]
        yield Line(
            arm,
            len(by_seed),
            metric,
            float(np.mean(list(by_seed.values()))),
            None if arm == reference else mean_interval(metric.differences(by_seed, base)),
            float(np.mean(reuses)) if reuses else None,
            float(np.mean([rows[-1].egress_bytes for rows in ends])),
        )


def markdown(curves: Curves, experiment: str, reference: str, metric: Metric = ACCURACY) -> str:
    """Return the table of an experiment."""
    head = ("arm", "seeds", metric.heading, *COMPARISONS)
    rows = [line.cells() for line in lines(curves, experiment, reference, metric)]
    return "\n".join(_row(cells) for cells in (head, ("---",) * len(head), *rows))


def reuse_limit(curves: Curves, experiment: str, kind: str) -> Interval:
    """Return the reuse at which arms `kind` 1, 2, 4, … lose more than the margin against the first.

    The reuse is the measured one, and only seeds that all of these arms have count.
    """
    arms = [
        line
        for line in lines(curves, experiment, f"{kind} 1")
        if re.fullmatch(rf"{kind} \d+", line.arm) and line.reuse is not None
    ]
    arms.sort(key=lambda line: line.reuse or 0.0)
    metrics = final_metrics(curves, experiment)
    found = [metrics[line.arm] for line in arms]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in found)))
    values = np.array([[by_seed[seed] for by_seed in found] for seed in seeds])
    return crossing_interval(
        [line.reuse or 0.0 for line in arms], values[:, :1] - values, ACCURACY.margin
    )


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
