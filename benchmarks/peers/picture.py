"""docs/reference/loader_benchmarks.svg: the speed of every contestant, a panel for each kind of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.peers.goals import SUBJECT
from benchmarks.peers.page import NAMES, PAGE, in_order, number, speed_of
from benchmarks.peers.results import Results
from benchmarks.peers.roster import CONTESTANTS

TARGET = PAGE.with_suffix(".svg")
WIDTH, LABEL, RIGHT = 760, 200, 70
ROW, BAR, HEAD = 20, 13, 44
# Legible on a white page and on a dark one, because the ground is part of the picture.
GROUND, TEXT, FAINT = "#fafafa", "#24292e", "#8a939c"
COLOURS = {"subject": "#0366d6", "limit": "#b8c0c8", "peer": "#6f42c1"}


def svg(results: Mapping[str, Results]) -> str:
    """Return the picture."""
    parts: list[str] = []
    top = 10
    for case, found in results.items():
        names = in_order(found)
        parts += panel(NAMES.get(case, case), found, names, top)
        top += HEAD + ROW * len(names) + 14
    parts.append(_text(10, top + 8, "blue: growcache · grey: limits · log scale", FAINT))
    height = top + 18
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" rx="6" fill="{GROUND}"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def panel(title: str, found: Results, names: list[str], top: int) -> Iterator[str]:
    """Yield the bars of one kind of samples, in MB/s."""
    speeds = {name: (speed_of(found, name) or 0.0) / 1e6 for name in names}
    low = 10.0 ** math.floor(math.log10(min(speeds.values(), default=1.0) * 0.9))
    high = max(speeds.values(), default=10.0)
    yield _text(10, top + 16, f"{title}, MB/s with an idle main thread", TEXT, "bold")
    for decade in _decades(low, high):
        x = _x(decade, low, high)
        bottom = top + HEAD + ROW * len(names) - 6
        yield f'<path d="M{x:.1f} {top + 36}V{bottom}" stroke="#e1e4e8"/>'
        yield _text(x, top + 32, f"{decade:,.0f}", FAINT, anchor="middle")
    for row, name in enumerate(names):
        yield from _bar(name, speeds[name], top + HEAD + ROW * row, low, high)


def _bar(name: str, speed: float, y: int, low: float, high: float) -> Iterator[str]:
    limit = CONTESTANTS[name].limit
    colour = COLOURS["subject" if name == SUBJECT else "limit" if limit else "peer"]
    weight = "bold" if name == SUBJECT else "normal"
    end = _x(speed, low, high)
    yield _text(LABEL - 8, y + 10, CONTESTANTS[name].title, TEXT, weight, "end")
    yield (
        f'<rect x="{LABEL}" y="{y}" width="{max(1.0, end - LABEL):.1f}" height="{BAR}" '
        f'fill="{colour}"/>'
    )
    yield _text(end + 5, y + 10, number(speed), TEXT, weight)


def _x(value: float, low: float, high: float) -> float:
    share = math.log(value / low) / math.log(high / low) if high > low else 1.0
    return LABEL + share * (WIDTH - LABEL - RIGHT)


def _decades(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), math.floor(math.log10(high))
    return [10.0**n for n in range(first, last + 1)]


def _text(
    x: float, y: float, text: str, colour: str, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def draw(results: Mapping[str, Results], to: Path = TARGET) -> None:
    """Write the picture next to the page."""
    to.write_text(svg(results), encoding="utf-8")
