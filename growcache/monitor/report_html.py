"""A report as one HTML file that works offline.

All content from stores, jobs or plans is text.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import orjson

from growcache.cache.history import HistoryRecord
from growcache.humanize import in_bytes, in_count, in_percent, in_time, plural
from growcache.monitor.report import (
    Period,
    limited_by,
    period_seconds,
    periods,
    thinned_columns,
    totals,
)
from growcache.monitor.report_facts import ReportFacts
from growcache.monitor.report_objects import DrawnObjects
from growcache.monitor.report_svg import draw_svg, planned_charts
from growcache.monitor.report_text import cost_of, methods_paragraph, planned_rows
from growcache.usercode import printable

HERE, WEB = Path(__file__).parent, Path(__file__).parent / "web"
SCRIPTS = (WEB / "uPlot.iife.min.js", WEB / "draw.js", HERE / "report.js")
STYLES = (WEB / "style.css", WEB / "uPlot.min.css", WEB / "draw.css", HERE / "report.css")
MOST_BYTES = 500_000
MOST_RECORDS = 1200  # in charts; halved until the file is small enough
LEAST_RECORDS = 50
MOST_JOBS = 20  # the latest
MOST_RANKED_JOBS = 4  # with the waits of each rank
MOST_PARTS, MOST_CHARACTERS, MOST_TEXT = 100, 300, 6000

Cell = str | tuple[str, str]  # a text, or a class and a text


def report_page(facts: ReportFacts) -> str:
    """Return the page, with a thinner history if it would have more than `MOST_BYTES`."""
    body, most = _body(facts), MOST_RECORDS
    page = _page(body, history_json(facts.records, most))
    while len(page.encode()) > MOST_BYTES and most > LEAST_RECORDS:
        most //= 2
        page = _page(body, history_json(facts.records, most))
    return page


def history_json(records: Sequence[HistoryRecord], most: int) -> str:
    """Return at most ``most`` records by column, as text that cannot end its element."""
    columns = thinned_columns(records, most)
    jobs = list(columns["jobs"].items())[-MOST_JOBS:]
    for _, job in jobs[:-MOST_RANKED_JOBS]:
        job["rank_wait_seconds"] = {}
    columns["jobs"] = dict(jobs)
    for unused in ("waiting_for", "state", "run", "generation", "shards"):
        columns.pop(unused)
    return orjson.dumps(columns).decode().replace("<", "\\u003c")


def _page(body: str, history: str) -> str:
    scripts = [path.read_text(encoding="utf-8") for path in SCRIPTS]
    style = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    tags = "\n".join(f"<script>{script}</script>" for script in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>growcache report</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="history">{history}</script>\n{tags}\n</body>\n</html>\n'
    )


def _hash(text: str) -> str:
    """Return the source expression of an inlined script or style. Nothing else may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _body(facts: ReportFacts) -> str:
    status = facts.status
    made = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(facts.made_at))
    sections = [
        _section("At a glance", _answers(facts), _figures(facts)),
        _section("For a paper", f"<blockquote><p>{_text(methods_paragraph(facts))}</p></blockquote>"),
        _section("History", '<div id="charts"></div>', _noscript()),
        _section("What limited training", _limits(facts)),
        _section("Planned and actual", _planned(facts)) if facts.plan is not None else "",
        _section("Samples drawn, and how often", _drawn(facts.drawn, facts)),
        _section("Holes", _holes(facts)),
        _section("Definition of the samples", _parts(facts)),
    ]  # fmt: skip
    return (
        f'<main class="report"><h1>growcache report</h1><p class="muted"><bdi>{_text(status.path)}</bdi> · made '
        f"{_text(made)} · times in the tables are those of the machine that made it</p>{''.join(sections)}</main>"
    )


def _text(value: object, most: int = MOST_TEXT) -> str:
    shown = printable(str(value))
    return escape(shown if len(shown) <= most else f"{shown[:most]}…")


def _section(title: str, *content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{''.join(content)}</section>"


def _noscript() -> str:
    return '<noscript><p class="muted">The charts need JavaScript; growcache report --svg draws them without.</p></noscript>'


def table(heads: Sequence[Cell], rows: Iterable[Sequence[Cell]], caption: str = "") -> str:
    """Return a table. A cell may have a class, such as ``number``."""
    head = "".join(_cell("th", one) for one in heads)
    lines = "".join(f"<tr>{''.join(_cell('td', one) for one in row)}</tr>" for row in rows)
    title = f"<caption>{_text(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{title}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(tag: str, cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<{tag}><bdi>{_text(cell, MOST_CHARACTERS)}</bdi></{tag}>"
    kind, value = cell
    return f'<{tag} class="{escape(kind)}">{_text(value)}</{tag}>'


def _number(value: str) -> Cell:
    return ("number", value)


def _answers(facts: ReportFacts) -> str:
    rows = [(one.question, f"{one.answer} {one.action}".strip()) for one in facts.answers]
    return "".join(f"<p><strong>{_text(q)}</strong> {_text(answer)}</p>" for q, answer in rows)


def _figures(facts: ReportFacts) -> str:
    status, sums = facts.status, totals(facts.own_records, facts.ranks)
    covered = "not known" if status.coverage is None else in_percent(status.coverage)
    cost = cost_of(facts, sums)
    egress = in_bytes(sums.egress_bytes)
    if cost is not None:
        egress += f", about ${cost.dollars:,.2f} ({cost.price.name}, {cost.basis}; {cost.price.standing})"
    waited = "not known" if sums.wait_share is None else in_percent(sums.wait_share)
    rows = [
        ("cached", f"{in_count(status.samples)} samples, {in_bytes(status.bytes)} of {in_bytes(status.max_bytes)}"),
        ("drawn", f"{in_count(status.drawn)} samples; evicted {in_count(status.evicted_samples)}"),
        ("coverage", covered),
        ("delivered", f"{in_count(status.delivered)} samples, {status.reuse:.1f} for each that was drawn"),
        ("exposed wait", waited),
        ("read from the store", egress),
        ("holes", in_count(status.holes)),
        ("service", f"{in_time(sums.served_seconds)} of {in_time(sums.seconds)} since the first record"),
    ]  # fmt: skip
    return table(("figure", "value"), rows)


def _limits(facts: ReportFacts) -> str:
    found = periods(facts.records, facts.ranks)
    if not found:
        return '<p class="muted">The history has less than two records.</p>'
    width = period_seconds(facts.records[-1].at - facts.records[0].at)
    heads: list[Cell] = [
        "from",
        *map(_number, ("delivered", "drawn", "reuse", "exposed wait")),
        "limited by",
    ]
    return table(heads, map(_limit_row, found), f"Each row is {in_time(width)}.")


def _limit_row(period: Period) -> list[Cell]:
    start = time.strftime("%Y-%m-%d %H:%M", time.localtime(period.start))
    reuse = "" if period.reuse is None else f"{period.reuse:.1f}"
    waited = in_percent(period.wait_share) if period.delivered >= 1 else ""
    numbers = (in_count(period.delivered), in_count(period.drawn), reuse, waited)
    return [("when", start), *map(_number, numbers), limited_by(period)]


def _planned(facts: ReportFacts) -> str:
    actual, rows = planned_rows(facts)
    if not rows:
        return '<p class="muted">The plan has none of the figures that are known here.</p>'
    heads: list[Cell] = [
        "figure",
        _number("planned"),
        "between",
        "by inputs",
        _number("actual"),
        "",
    ]
    lines: list[Sequence[Cell]] = [
        (
            row.name, _number(row.planned), row.between, row.basis, _number(row.actual),
            ("off", "off") if row.fits is False else "as planned" if row.fits else "",
        )
        for row in rows
    ]  # fmt: skip
    pictures = planned_charts(
        thinned_columns(facts.records, MOST_RECORDS // 4), facts.plan or {}
    )
    return (
        table(heads, lines, f"In the first {in_time(actual.seconds)}, with what the plan has for that time; off: by more than 15 %, 1 s, or a percentage point.")
        + _other_bound(facts)
        + f'<div class="pictures">{"".join(map(draw_svg, pictures))}</div>'
    )  # fmt: skip


def _other_bound(facts: ReportFacts) -> str:
    planned, now = (facts.plan or {}).get("max_bytes"), facts.status.max_bytes
    if not isinstance(planned, int) or not now or planned == now:
        return ""
    said = f"The plan is for a cache of {in_bytes(planned)}, and this one has {in_bytes(now)}."
    return f'<p class="off">{_text(said)}</p>'


def _drawn(drawn: DrawnObjects, facts: ReportFacts) -> str:
    if not drawn.samples:
        return f'<p class="muted">Nothing is cached.</p>{_drawn_strata(facts)}'
    listed = f" of {in_count(facts.status.objects)}" if facts.status.objects else ""
    looked = (
        "" if drawn.share >= 1 else f" {in_percent(drawn.share)} of the shards were looked at."
    )
    words = (
        f"The cached samples are of {plural(drawn.objects, 'object')}{listed}: "
        f"{drawn.median_samples:,.0f} of the median object, {drawn.most_samples:,} at "
        f"most.{looked} Only sums are known of evicted samples: {in_count(facts.status.drawn)} "
        "samples drawn in all."
    )
    count = max(1, drawn.samples)
    strata = table(
        [drawn.strata_are, *map(_number, ("objects", "samples", "share", "uses"))],
        [
            [one.name, *map(_number, (in_count(one.objects), in_count(one.samples), in_percent(one.samples / count), f"{one.uses:.1f}"))]
            for one in drawn.strata
        ],
        f"Cached samples by {drawn.strata_are}; uses are the mean over all jobs.",
    )  # fmt: skip
    uses = table(
        ["uses", _number("samples"), _number("share")],
        [
            [name, _number(in_count(n)), _number(in_percent(n / count))]
            for name, n in drawn.uses
        ],
        "How often cached samples were used.",
    )
    most = table(
        ["object", _number("samples")],
        [[key, _number(in_count(n))] for key, n in drawn.most_drawn],
        "The objects with the most cached samples.",
    )
    return f'<p>{_text(words)}</p><div class="tables">{_drawn_strata(facts)}{strata}{uses}{most}</div>'


def _drawn_strata(facts: ReportFacts) -> str:
    """Return the draws of each stratum since the cache began, as the service counted them."""
    rows = facts.status.strata
    if not rows:
        return ""
    count = max(1, sum(one.drawn for one in rows))
    heads: list[Cell] = ["stratum", *map(_number, ("parts", "drawn", "share", "coverage"))]
    lines = [
        [one.name if one.strata == 1 else plural(one.strata, "other"), *map(_number, (in_count(one.parts), in_count(one.drawn), in_percent(one.drawn / count), in_percent(one.coverage)))]
        for one in rows
    ]  # fmt: skip
    by = facts.parts.get("sampling.strata.by", "")
    return table(
        heads,
        lines,
        f"Visits since the cache began, by {by}; coverage is of the parts of a stratum.",
    )


def _holes(facts: ReportFacts) -> str:
    if not facts.holes:
        return (
            "<p>None.</p>"
            if not facts.status.holes
            else "<p>Their reasons are no longer recorded.</p>"
        )
    rows = [
        [
            _number(in_count(one.count)),
            one.reason,
            ", ".join(str(e["key"]) for e in one.examples[:2]),
        ]
        for one in facts.holes
    ]
    caption = (
        f"{plural(facts.status.holes, 'hole')} in all, the last {facts.noted_holes} by reason."
    )
    return table([_number("holes"), "reason", "such as"], rows, caption)  # fmt: skip


def _parts(facts: ReportFacts) -> str:
    rows = [
        (name, text)
        for name, value in sorted(facts.parts.items())[:MOST_PARTS]
        if (text := str(value)) not in ("None", "")
    ]
    named = " · ".join(f"{name} {number}" for name, number in facts.versions.items())
    return (
        f"<p>Fingerprint <bdi>{_text(facts.status.fingerprint)}</bdi>. Two caches with the same fingerprint draw the same samples.</p>"
        f"<details><summary>All settings that it covers</summary>{table(('setting', 'value'), rows)}</details>"
        f'<p class="muted">{_text(named)}</p>'
    )
