"""The style of the pictures in docs/evidence.md: colours, intervals, a light background that is legible on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.accuracy.statistics import Interval

FOLDER = Path(__file__).parents[2] / "docs/evidence"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0366d6", "#d9730d", "#22863a", "#6f42c1", "#6a737d"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "growcache",  # the same picture at every run
    "svg.fonttype": "none",  # text stays text
    "font.family": ["sans-serif"],
    "font.size": 10,
    "figure.facecolor": "#fafafa",
    "axes.facecolor": "#fafafa",
    "savefig.facecolor": "#fafafa",
    "text.color": "#24292e",
    "axes.labelcolor": "#24292e",
    "axes.edgecolor": "#959da5",
    "xtick.color": "#444d56",
    "ytick.color": "#444d56",
    "axes.grid": True,
    "grid.color": "#e1e4e8",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def panels(count: int, *, share: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a figure with that many axes in a row."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * max(count, 1.4), 3.6), layout="constrained")
        axes = figure.subplots(1, count, sharey=share, squeeze=False)
    return figure, list(axes[0])


def curve(
    axes: Axes,
    places: Sequence[float],
    found: Sequence[Interval],
    color: str,
    label: str,
    **style: Any,
) -> None:
    """Draw means, joined by a line, with the interval of each."""
    below = [each.value - each.low for each in found]
    above = [each.high - each.value for each in found]
    values = [each.value for each in found]
    look = {"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1.6, **style}
    axes.errorbar(places, values, yerr=[below, above], color=color, label=label, **look)


def level(axes: Axes, value: float, color: str, label: str) -> None:
    """Draw what does not depend on the x-axis."""
    axes.axhline(value, color=color, linestyle="--", linewidth=1.4, label=label)


def margin(axes: Axes, value: float) -> None:
    """Shade what is worse than the margin."""
    bottom, top = axes.get_ylim()
    axes.axhspan(bottom, value, color="#b31d28", alpha=0.06, linewidth=0)
    axes.set_ylim(bottom, top)


def plain_numbers(axes: Axes, places: Sequence[float]) -> None:
    """Mark these places of a logarithmic x-axis by their numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()


def save(figure: Figure, name: str) -> Path:
    """Write a picture into docs/evidence/."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.svg"
    with mpl.rc_context(STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path
