"""The pictures of docs/evidence.md, each from the results of an experiment alone."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.accuracy import drawing, hard_case, reuse
from benchmarks.accuracy.cache_size_figure import cache_size_figure
from benchmarks.accuracy.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE
from benchmarks.accuracy.metrics import ACCURACY
from benchmarks.accuracy.results import Curves, final_metrics
from benchmarks.accuracy.statistics import Interval, mean_interval
from benchmarks.accuracy.tables import Line, lines
from benchmarks.accuracy.target_figures import to_target_figure
from benchmarks.accuracy.worths import predicted_worths


def reuse_figure(curves: Curves) -> Figure:
    """Draw the loss against the reuse that was measured, plain and shifted."""
    figure, axes = drawing.panels(len(reuse.VARIANTS))
    for one, title in zip(axes, reuse.VARIANTS, strict=True):
        found = {line.arm: line for line in lines(curves, title, "growing 1")}
        _ladder(one, found, "growing", BLUE, "growing cache")
        _ladder(one, found, "echo", ORANGE, "data echoing")
        _single(one, found, "min_uses 4", PURPLE, "fast link, min_uses: 4")
        _single(one, found, "frozen", GREY, "frozen subset, same disk")
        if "full" in found and (difference := found["full"].difference):
            drawing.level(one, difference.value, GREEN, "full data")
        drawing.plain_numbers(one, [1, 2, 4, 8, 16, 32, 96])
        one.set_xlabel("reuse: deliveries of each drawn sample")
        one.set_title(title.replace("reuse of ", ""), fontsize=10)
    for one in axes:
        drawing.margin(one, -ACCURACY.margin)
    axes[0].set_ylabel("accuracy, points from reuse 1")
    axes[0].legend(loc="lower left", fontsize=8, frameon=False)
    return figure


def _ladder(axes: Axes, found: dict[str, Line], kind: str, color: str, label: str) -> None:
    rungs = [line for arm, line in found.items() if re.fullmatch(rf"{kind} \d+", arm)]
    rungs.sort(key=lambda line: line.reuse or 0)
    places = [line.reuse or 1.0 for line in rungs]
    if rungs:
        drawing.curve(axes, places, [_difference(line) for line in rungs], color, label)


def _single(axes: Axes, found: dict[str, Line], arm: str, color: str, label: str) -> None:
    if arm in found:
        line = found[arm]
        drawing.curve(
            axes,
            [line.reuse or 1.0],
            [_difference(line)],
            color,
            label,
            marker="s",
            linestyle="",
        )


def _difference(line: Line) -> Interval:
    return line.difference or Interval(0.0, 0.0, 0.0)


EVICTION_COLORS = dict(zip(hard_case.EVICTIONS, (BLUE, ORANGE, PURPLE), strict=True))


def hard_case_figure(curves: Curves) -> Figure:
    """Draw accuracy by the samples of a visit, and against what such samples are worth."""
    figure, (by_visit, by_worth) = drawing.panels(2)
    metrics = final_metrics(curves, next(iter(hard_case.VARIANTS)))
    for eviction, color in EVICTION_COLORS.items():
        arms = {
            per_visit: metrics[arm]
            for per_visit in hard_case.PER_VISIT
            if (arm := f"visits of {per_visit}, {eviction}") in metrics
        }
        found = [mean_interval(list(by_seed.values())) for by_seed in arms.values()]
        if arms:
            drawing.curve(by_visit, list(arms), found, color, f"growing, {eviction}")
    for arm, color in (("block shuffle", GREY), ("shuffle buffer", "#b31d28"), ("full", GREEN)):
        if arm in metrics:
            drawing.level(by_visit, float(np.mean(list(metrics[arm].values()))), color, arm)
    by_visit.set_xscale("log")
    by_visit.set_xticks(hard_case.PER_VISIT, [str(k) for k in hard_case.PER_VISIT])
    by_visit.minorticks_off()
    by_visit.set_xlabel("samples of a visit (samples_per_object)")
    by_visit.set_ylabel("accuracy, %")
    by_visit.legend(loc="lower left", fontsize=8, frameon=False)
    for arm, worth in predicted_worths(curves).items():
        eviction = arm.split(", ")[1]
        by_worth.plot(
            worth, np.mean(list(metrics[arm].values())), "o", color=EVICTION_COLORS[eviction]
        )
        by_worth.annotate(
            arm.split(",")[0].removeprefix("visits of "),
            (worth, float(np.mean(list(metrics[arm].values())))),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8,
        )
    by_worth.set_xscale("log")
    by_worth.set_xticks([300, 1_000, 3_000], ["300", "1,000", "3,000"])
    by_worth.minorticks_off()
    by_worth.set_xlabel("predicted worth: effective samples / (1 + (k − 1) ρ)")
    return figure


FIGURES: dict[str, Callable[[Curves], Figure]] = {
    "reuse": reuse_figure,
    "hard_case": hard_case_figure,
    "cache_size": cache_size_figure,
    "to_target": to_target_figure,
}


def draw(name: str, curves: Curves) -> None:
    """Write the picture of an experiment, if it has one."""
    if name in FIGURES and curves:
        print(f"wrote {drawing.save(FIGURES[name](curves), name)}")
