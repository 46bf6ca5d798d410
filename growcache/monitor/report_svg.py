"""Pictures without script for papers and READMEs: line charts of a history as SVG. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from growcache.humanize import in_bytes, in_count, in_percent, in_time

WIDTH, PLOT_HEIGHT = 640, 186
LEFT, RIGHT, TOP, AXIS = 74, 16, 34, 24
LEGEND_COLUMNS, LEGEND_ROW, LEGEND_WIDTH = 3, 16, 180
FLOOR = TOP + PLOT_HEIGHT  # height of 0
TICKS = 5
COLOURS = ("#0f766e", "#2563eb", "#c2410c", "#7c3aed", "#be185d", "#4d7c0f")
INK = "#57606a"  # legible on white and on black; the report's own colours override it
MOST_LINES = len(COLOURS)
DAY_SECONDS = 86_400.0
LEAST_VALUE = 1e-12  # smaller values count as 0

Column = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    at: Sequence[float]
    values: Column
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    name: str  # of the file
    title: str
    unit: Callable[[float], str]
    lines: Sequence[Line]
    elapsed: bool = False  # times are seconds since the start


def rates(at: Sequence[float], counters: Column) -> list[float | None]:
    """Return a counter's growth per second.

    >>> rates([0, 10, 20], [0, 50, None])
    [None, 5.0, None]
    """
    found: list[float | None] = [None] * min(1, len(at))
    for i in range(1, len(at)):
        before, after, seconds = counters[i - 1], counters[i], at[i] - at[i - 1]
        known = before is not None and after is not None and after >= before and seconds > 0
        found.append((after - before) / seconds if known else None)  # type: ignore[operator]
    return found


def _count(value: float) -> str:
    return in_count(value) if value >= 100 else f"{value:.3g}"


def _per_second(value: float) -> str:
    return f"{in_bytes(value)}/s"


class Drawn(NamedTuple):
    """A line of a chart: a column, or its growth per second, of the cache or of each job."""

    label: str
    column: str
    is_rate: bool = False
    of_jobs: bool = False
    dashed: bool = False


CHARTS: tuple[tuple[str, str, Callable[[float], str], tuple[Drawn, ...]], ...] = (
    ("cached", "Samples cached", _count, (Drawn("cached", "samples"),)),
    ("rates", "Samples per second", _count, (
        Drawn("drawn", "drawn", is_rate=True),
        Drawn("delivered", "delivered", is_rate=True),
        Drawn("evicted", "evicted_samples", is_rate=True),
    )),
    ("wait", "Exposed wait, share of time", in_percent, (
        Drawn("", "wait_seconds", is_rate=True, of_jobs=True),
    )),
    ("bytes", "Bytes on disk", in_bytes, (
        Drawn("used", "bytes"), Drawn("bound", "max_bytes", dashed=True),
    )),
    ("link", "Read from the store", _per_second, (Drawn("read", "egress_bytes", is_rate=True),)),
    ("coverage", "Coverage of the population", in_percent, (Drawn("drawn at least once", "coverage"),)),
    ("reuse", "Reuse: delivered over drawn", _count, (Drawn("all jobs", "reuse"),)),
    ("ess", "Effective sample size", _count, (Drawn("", "ess_samples", of_jobs=True),)),
    ("age", "Mean age of cached samples", in_time, (Drawn("age", "age_seconds_mean"),)),
)  # fmt: skip


def charts_of(columns: Mapping[str, Any], plan: Mapping[str, Any] | None = None) -> list[Chart]:
    """Return the charts of the columns of `history_columns`, without those that have no values."""
    charts = [
        Chart(name, title, unit, [line for one in drawn for line in _lines(one, columns)])
        for name, title, unit, drawn in CHARTS
    ]
    charts += [] if plan is None else planned_charts(columns, plan)
    return [chart for chart in charts if any(_known(line) for line in chart.lines)]


def _lines(one: Drawn, columns: Mapping[str, Any]) -> list[Line]:
    at, found = columns["at"], {one.label: columns}
    if one.of_jobs:
        found = dict(list(columns["jobs"].items())[-MOST_LINES:])
    return [
        Line(
            label, at, rates(at, of[one.column]) if one.is_rate else of[one.column], one.dashed
        )
        for label, of in found.items()
    ]


def planned_charts(columns: Mapping[str, Any], plan: Mapping[str, Any]) -> list[Chart]:
    """Return the plan as dashed lines, with the actual values of the same time."""
    curve = plan.get("curve")
    if not isinstance(curve, Mapping) or not columns["at"]:
        return []
    began = min(columns["at"][0], next((run for run in columns["run"] if run), math.inf))
    elapsed = [moment - began for moment in columns["at"]]
    times = [one for one in _numbers(curve.get("at")) if one is not None]
    inside = [i for i, moment in enumerate(elapsed) if not times or moment <= times[-1]]
    units = {"samples": _count, "coverage": in_percent, "reuse": _count}
    titles = {"samples": "Samples cached", "coverage": "Coverage", "reuse": "Reuse"}
    return [
        Chart(
            f"planned_{name}",
            f"{title}: planned and actual",
            units[name],
            [
                Line("planned", times, _numbers(curve.get(name))[: len(times)], dashed=True),
                Line(
                    "actual", [elapsed[i] for i in inside], [columns[name][i] for i in inside]
                ),
            ],
            elapsed=True,
        )
        for name, title in titles.items()
        if len(_numbers(curve.get(name))) == len(times) > 1
    ]


def _numbers(values: object) -> list[float | None]:
    if not isinstance(values, list):
        return []
    return [
        float(one) if isinstance(one, int | float) and math.isfinite(one) else None
        for one in values
    ]


def _known(line: Line) -> list[tuple[float, float]]:
    pairs = zip(line.at, line.values, strict=True)
    return [(at, value) for at, value in pairs if value is not None]


def nice_ticks(most: float) -> list[float]:
    """Return round numbers from 0 to the first that is at least ``most``.

    >>> nice_ticks(87), nice_ticks(0)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.0, 1.0])
    """
    if most < LEAST_VALUE:
        return [0.0, 1.0]
    raw = most / TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def draw_svg(chart: Chart) -> str:
    """Return a picture. Texts from stores and jobs are escaped."""
    points = [_known(line) for line in chart.lines]
    times = [at for line in points for at, _ in line]
    ticks = nice_ticks(max((value for line in points for _, value in line), default=0.0))
    first, last = min(times, default=0.0), max(times, default=1.0)
    span = max(last - first, 1e-9)

    def x(at: float) -> float:
        return LEFT + (at - first) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return FLOOR - value / ticks[-1] * PLOT_HEIGHT

    legend = LEGEND_ROW * math.ceil(len(chart.lines) / LEGEND_COLUMNS)
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {FLOOR + AXIS + legend}" '
        f'color="{INK}" font-family="sans-serif" font-size="11" role="img" aria-label="{escape(chart.title)}">',
        f'<text x="{LEFT}" y="14" font-size="13" font-weight="bold" fill="currentColor">{escape(chart.title)}</text>',
    ]
    for tick in ticks:
        rows.append(
            f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="currentColor">{escape(chart.unit(tick))}</text>'
        )
    for i in range(TICKS):
        at = first + span * i / (TICKS - 1)
        anchor = "start" if not i else "end" if i == TICKS - 1 else "middle"
        rows.append(
            f'<text x="{x(at):.1f}" y="{FLOOR + 16}" text-anchor="{anchor}" '
            f'fill="currentColor">{_moment(at, span, elapsed=chart.elapsed)}</text>'
        )
    for i, (line, known) in enumerate(zip(chart.lines, points, strict=True)):
        rows.append(_polyline([(x(at), y(value)) for at, value in known], i, line))
    return "\n".join([*rows, "</svg>"]) + "\n"


def _polyline(points: Sequence[tuple[float, float]], i: int, line: Line) -> str:
    colour, dash = COLOURS[i % MOST_LINES], ' stroke-dasharray="6 4"' if line.dashed else ""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""
    left = LEFT + LEGEND_WIDTH * (i % LEGEND_COLUMNS)
    row = FLOOR + AXIS + LEGEND_ROW * (i // LEGEND_COLUMNS) + 10
    label = line.label if len(line.label) <= 24 else f"{line.label[:23]}…"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'
        f'<path d="M{left} {row - 4}h16" stroke="{colour}" stroke-width="2"{dash}/>'
        f'<text x="{left + 22}" y="{row}" fill="currentColor">{escape(label)}</text>'
    )


def _moment(at: float, span: float, *, elapsed: bool) -> str:
    if elapsed:
        return in_time(at)
    form = "%b %d %H:%M" if span > DAY_SECONDS else "%H:%M" if span > 600 else "%H:%M:%S"
    return time.strftime(form, time.localtime(at))
