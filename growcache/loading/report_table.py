"""A loader's report as a table for a notebook cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from growcache.loading.report import Report

WARN_REUSE = 4.0


def report_table(report: Report) -> str:
    """Return the report as HTML: warnings first, and then all values."""
    warnings = "".join(
        f"<tr><td colspan='2' style='text-align:left'>⚠ {escape(text)}</td></tr>"
        for text in report_warnings(report)
    )
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name.replace('_', ' '))}</th>"
        f"<td style='text-align:right'>{escape(_shown(name, getattr(report, name)))}</td></tr>"
        for name in (field.name for field in fields(report))
    )
    return f"<table><caption>{escape(str(report))}</caption>{warnings}{rows}</table>"


def report_warnings(report: Report) -> Iterator[str]:
    """Yield the warnings that a report implies.

    >>> from growcache.loading.report import Report
    >>> list(report_warnings(Report(skipped=3)))
    ['3 samples of damaged shards were skipped; run growcache check']
    """
    if report.skipped:
        yield f"{report.skipped:,} samples of damaged shards were skipped; run growcache check"
    if report.reuse_recent > WARN_REUSE:
        yield (
            f"each sample was delivered {report.reuse_recent:.1f} times lately: training outruns "
            "the remote store"
        )
    if report.limited_by in ("cache", "loading"):
        what = "samples" if report.limited_by == "cache" else "batches to be made"
        yield f"the latest epoch waited {report.wait_seconds:,.1f} s, most of it for {what}"


def _shown(name: str, value: object) -> str:
    """Return a value of the report for display.

    >>> _shown("coverage_samples", 0.25), _shown("wait_seconds", 1.234), _shown("samples", 6400)
    ('25.0 %', '1.2 s', '6,400')
    >>> _shown("coverage_objects", None), _shown("limited_by", "cache"), _shown("reuse", 2.0)
    ('unknown', 'cache', '2.00')
    """
    if value is None:
        return "unknown"
    if not isinstance(value, int | float):
        return str(value)
    if name.startswith("coverage"):
        return f"{value:.1%}".replace("%", " %")
    if "seconds" in name:
        return f"{value:,.1f} s"
    return f"{value:.2f}" if name.startswith("reuse") else f"{value:,.0f}"
