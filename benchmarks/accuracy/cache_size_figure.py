"""The picture of E2: bits per byte by the size of the cache, and by effective samples."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.accuracy import drawing
from benchmarks.accuracy.cache_size import EXPERIMENT, PERCENTS, POLICY_PERCENTS
from benchmarks.accuracy.drawing import BLUE, GREY, ORANGE, PURPLE
from benchmarks.accuracy.results import Curves
from benchmarks.accuracy.same_disk import TASK, effective_samples
from benchmarks.accuracy.statistics import Interval
from benchmarks.accuracy.tables import Line, lines

TICKS = (0, 1, 2, 5, 10, 20)  # percent; between −1 and 1 the scale is linear
# Names of arms by size, the sizes, colour and label.
KINDS = {
    "frozen {} %": (PERCENTS, GREY, "frozen subset"),
    "growing {} %": (PERCENTS, BLUE, "growing, fifo"),
    "growing {} %, random": (POLICY_PERCENTS, ORANGE, "growing, random"),
    "growing {} %, most_used": (POLICY_PERCENTS, PURPLE, "growing, most_used"),
}


def cache_size_figure(curves: Curves) -> Figure:
    """Draw how many more bits each cache needs than full data."""
    figure, (by_size, by_samples) = drawing.panels(2)
    metric, reference = EXPERIMENT.metric, EXPERIMENT.reference
    found = {line.arm: line for line in lines(curves, TASK, reference, metric)}
    sizes = effective_samples(curves)
    for name, (percents, color, label) in KINDS.items():
        known = {
            percent: found[arm]
            for percent in percents
            if (arm := name.format(percent)) in found
        }
        losses = [_loss(line) for line in known.values()]
        samples = [sizes[line.arm] for line in known.values()]
        drawing.curve(by_size, list(known), losses, color, label)
        drawing.curve(by_samples, samples, losses, color, label, linestyle="")
        for percent, place, loss in zip(known, samples, losses, strict=True):
            _name_point(by_samples, f"{percent} %", place, loss.value)
    drawing.plain_numbers(by_size, PERCENTS)
    by_samples.set_xscale("log")
    by_size.set_xlabel("cache, % of the training windows")
    by_samples.set_xlabel("effective samples (ess_samples of loader.report)")
    by_size.set_ylabel("bits per byte, % above full data")
    for axes in (by_size, by_samples):
        _scale(axes, metric.margin)
    by_size.legend(loc="upper right", fontsize=8)
    return figure


def _loss(line: Line) -> Interval:
    return line.difference or Interval(0.0, 0.0, 0.0)


def _name_point(axes: Axes, name: str, across: float, up: float) -> None:
    axes.annotate(name, (across, up), xytext=(4, 4), textcoords="offset points", fontsize=7)


def _scale(axes: Axes, margin: float) -> None:
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(-1, TICKS[-1])
    axes.set_yticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.axhspan(margin, TICKS[-1], color="#b31d28", alpha=0.06, linewidth=0)
