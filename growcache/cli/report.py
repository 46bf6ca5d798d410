"""``growcache report``: a cache's history as one HTML file, and as pictures without script."""

from __future__ import annotations

import sys
from pathlib import Path

from growcache.cli.terminal import spinner
from growcache.errors import ConfigError
from growcache.humanize import in_bytes, plural
from growcache.monitor.report import thinned_columns
from growcache.monitor.report_facts import ReportFacts, gather_facts
from growcache.monitor.report_html import report_page
from growcache.monitor.report_svg import charts_of, draw_svg

MOST_SVG_POINTS = 400


def write_report(cache: Path, out: Path, svg: Path | None, plan: Path | None) -> str:
    """Write a report. Return a sentence for each written file or folder."""
    _refuse_inside(cache, out, "-o")
    if svg is not None:
        _refuse_inside(cache, svg, "--svg")
    with spinner(sys.stderr, "reading the cache …"):
        facts = gather_facts(cache, plan)
        page = report_page(facts).encode()
    _write(out, page)
    said = [f"wrote {out} ({in_bytes(len(page))}, {plural(len(facts.records), 'record')})"]
    if svg is not None:
        said.append(f"wrote {plural(_write_pictures(facts, svg), 'picture')} into {svg}")
    return "\n".join(said)


def _refuse_inside(cache: Path, out: Path, option: str) -> None:
    """Refuse files in a cache, because only the service writes there, and every byte counts."""
    if out.absolute().resolve().is_relative_to(cache.absolute().resolve()):
        raise ConfigError(
            f"{option}: {out} is in the cache; choose a place outside of it", code="GC106"
        )


def _write_pictures(facts: ReportFacts, folder: Path) -> int:
    charts = charts_of(thinned_columns(facts.records, MOST_SVG_POINTS), facts.plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--svg: cannot make {folder}: {error.strerror}", code="GC106"
        ) from None
    for chart in charts:
        _write(folder / f"{chart.name}.svg", draw_svg(chart).encode())
    return len(charts)


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; choose another place", code="GC106"
        ) from None
