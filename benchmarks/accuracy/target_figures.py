"""The pictures of E1 and G5: accuracy over steps, time and bytes; and what loaders deliver on a broken link."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.accuracy import drawing
from benchmarks.accuracy.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE
from benchmarks.accuracy.network import BACK, CUT, Second
from benchmarks.accuracy.results import Curves, Row
from benchmarks.accuracy.target_tables import (
    FROZEN,
    OURS,
    STREAMED,
    TARGETS,
    arms_of,
    download_seconds,
    goals,
    megabytes_of,
    runs_of,
    seconds_of,
)
from benchmarks.accuracy.to_target import FULL, LONGER, RIVALS, STEPS, UNLIMITED

SHOWN = "a tenth"  # the link of the picture
SMOOTH = 5  # seconds over which rates are averaged
COLUMNS = 3


def to_target_figure(curves: Curves) -> Figure:
    """Draw mean accuracy over steps, seconds and bytes, at the slower link."""
    figure, panels = drawing.panels(3)
    views: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("step", lambda row: row.step),
        ("seconds since the loader was opened", seconds_of),
        ("MB from the store", megabytes_of),
    )
    for axes, (label, of) in zip(panels, views, strict=True):
        for arm in arms_of(curves, SHOWN):
            if arm in RIVALS:
                _mean_curve(axes, curves, SHOWN, arm, of, GREY, 0.8)
        axes.plot([], [], color=GREY, linewidth=0.8, label="other streaming loaders")
        _mean_curve(axes, curves, SHOWN, FROZEN, of, PURPLE, 1.6)
        _mean_curve(axes, curves, SHOWN, STREAMED, of, ORANGE, 1.6)
        if of is not megabytes_of:
            _mean_curve(axes, curves, UNLIMITED, FULL, of, GREEN, 1.6)
        _mean_curve(axes, curves, SHOWN, LONGER, of, BLUE, 1.0)
        _mean_curve(axes, curves, SHOWN, OURS, of, BLUE, 2.2)
        for percent in TARGETS:
            goal = float(np.mean(list(goals(curves).values())))
            axes.axhline(percent / 100 * goal, color=GREY, linewidth=0.5)
        axes.set_xlabel(label)
        axes.set_ylim(60, 95)
    panels[0].set_xlim(0, STEPS)
    panels[0].set_ylabel("accuracy, %")
    panels[0].legend(loc="lower right", fontsize=8)
    return figure


def first_screen_figure(curves: Curves) -> Figure:
    """Draw the picture of the README: accuracy over time at the slower link, with the download of full data."""
    with mpl.rc_context(drawing.STYLE | {"font.size": 12}):
        figure = Figure(figsize=(9.2, 4.0), layout="constrained")
        axes = figure.subplots()
    fetch = download_seconds(curves, SHOWN)
    for arm in RIVALS:
        _mean_curve(axes, curves, SHOWN, arm, seconds_of, GREY, 0.8)
    _mean_curve(axes, curves, SHOWN, FROZEN, seconds_of, PURPLE, 1.8)
    _mean_curve(axes, curves, SHOWN, STREAMED, seconds_of, ORANGE, 1.8)
    _mean_curve(axes, curves, UNLIMITED, FULL, lambda row: fetch + seconds_of(row), GREEN, 1.8)
    _mean_curve(axes, curves, SHOWN, LONGER, seconds_of, BLUE, 2.8)
    for text, place, color in (
        ("growcache", (40, 92.6), BLUE),
        ("download everything, then train", (128, 66.0), GREEN),
        ("a fixed subset, as large as the cache", (140, 81.5), PURPLE),
        ("DataLoader over the store", (140, 77.5), ORANGE),
        ("seven other streaming loaders", (140, 73.5), GREY),
    ):
        axes.annotate(text, place, color=color, fontsize=11.5, fontweight="bold")
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("held-out accuracy, %")
    axes.set_ylim(60, 95)
    axes.set_xlim(0, 300)
    return figure


def _mean_curve(
    axes: Axes,
    curves: Curves,
    link: str,
    arm: str,
    of: Callable[[Row], float],
    color: str,
    width: float,
) -> None:
    """Draw the mean of the runs at the steps that all of them came to."""
    runs = [{row.step: row for row in rows} for rows in runs_of(curves, link, arm).values()]
    if not runs:
        return
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    places = [np.mean([of(run[step]) for run in runs]) for step in steps]
    values = [np.mean([run[step].metric for run in runs]) for step in steps]
    label = None if arm in RIVALS else arm
    axes.plot(places, values, color=color, linewidth=width, label=label)


def network_figure(by_arm: dict[str, list[Second]]) -> Figure:
    """Draw a panel per loader: samples a second, those of them that are new, and the share of waiting."""
    rows = -(-len(by_arm) // COLUMNS)
    with mpl.rc_context(drawing.STYLE):
        figure = Figure(figsize=(12, 2.5 * rows), layout="constrained")
        panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        shares = [axes.twinx() for axes in panels.flat]
    for axes, share, (arm, seconds) in zip(panels.flat, shares, by_arm.items(), strict=False):
        _network_panel(axes, share, seconds)
        axes.set_title(arm, fontsize=10)
    for axes, share in list(zip(panels.flat, shares, strict=True))[len(by_arm) :]:
        axes.remove()
        share.remove()
    for axes in panels[-1]:
        axes.set_xlabel("seconds")
    for axes in panels[:, 0]:
        axes.set_ylabel("samples/s")
    lines = [line for axes in (panels[0, 0], shares[0]) for line in axes.get_lines()]
    panels[0, 0].legend(handles=lines[:3], fontsize=7, loc="center right")
    return figure


def _network_panel(axes: Axes, share: Axes, seconds: list[Second]) -> None:
    places = [one.second + 0.5 for one in seconds]
    axes.axvspan(CUT, BACK, color="#b31d28", alpha=0.08, linewidth=0)
    axes.plot(
        places, _smooth([one.delivered for one in seconds]), color=BLUE, label="delivered"
    )
    axes.plot(
        places, _smooth([one.distinct for one in seconds]), color=GREEN, label="never before"
    )
    waits = _smooth([100 * one.waited for one in seconds])
    share.plot(places, waits, color=ORANGE, linewidth=1, label="waiting, % (right)")
    share.set_ylim(-3, 103)
    share.grid(visible=False)


def _smooth(values: list[float] | list[int]) -> list[float]:
    """Return means over the last seconds, fewer at the beginning."""
    return [
        float(np.mean(values[max(0, place - SMOOTH + 1) : place + 1]))
        for place in range(len(values))
    ]
