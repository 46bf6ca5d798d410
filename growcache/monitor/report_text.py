"""The words of a report: a paragraph for a paper, and figures in rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from growcache.humanize import in_bytes, in_count, in_percent, in_time, plural
from growcache.monitor.prices import Price, usual_price
from growcache.monitor.report import Actual, Totals, actual_values, totals
from growcache.monitor.report_facts import ReportFacts
from growcache.usercode import printable

DAY_SECONDS = 86_400.0
DEFAULT_HORIZON_SECONDS = 3600.0
MOST_SOURCE_CHARACTERS = 200
EQUAL_SHARE = 0.15  # a figure that differs by less counts as planned
EQUAL_SECONDS, EQUAL_POINTS = 1.0, 0.01
WHOLE_SHARE = 0.95  # of the horizon that has passed
_EGRESS = "egress_bytes_per_hour"
_AT_THE_HORIZON = (
    "coverage",
    "reuse",
    "ess_samples",
    "exposed_wait_share",
    "requests_per_second",
    _EGRESS,
)


def methods_paragraph(facts: ReportFacts) -> str:
    """Return a paragraph about the training data for a paper's methods section."""
    sums = totals(facts.own_records, facts.ranks)
    sentences = [_source_sentence(facts), _drawn_sentence(facts, sums), *_job_sentences(facts)]
    if sums.wait_share is not None:
        sentences.append(
            f"The training loop waited for data {in_percent(sums.wait_share)} of the time."
        )
    if sums.egress_bytes:
        requests = f" in {plural(sums.requests, 'request')}" if sums.requests else ""
        sentences.append(f"{in_bytes(sums.egress_bytes)} were read from the store{requests}.")
    named = ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    return printable(" ".join([*sentences, f"Versions: {named}."]))


def _source_sentence(facts: ReportFacts) -> str:
    parts, status = facts.parts, facts.status
    order = {"permutation": "in a random permutation", "replacement": "with replacement"}
    ordered = order.get(str(parts.get("sampling.order")), "at random")
    fingerprint = status.fingerprint or "unknown"
    objects = f"{plural(status.objects, 'object')} at " if status.objects else ""
    stored = f" as {facts.schema}" if facts.schema else ""
    return (
        f"Samples were drawn {ordered} by growcache (seed {parts.get('sampling.seed', 'unknown')}, "
        f"fingerprint {fingerprint}) from {objects}{source_text(parts)}{stored}, into a local cache of at most "
        f"{in_bytes(status.max_bytes)}."
    )


def source_text(parts: Mapping[str, Any]) -> str:
    """Return the URLs of an identity.

    >>> source_text({"source.url": ["s3://b/*.npy"], "source.format": "npy"})
    's3://b/*.npy (npy)'
    """
    found = []
    for prefix in ("source.", *(f"source.{number}." for number in range(100))):
        urls = parts.get(f"{prefix}url") or parts.get(f"{prefix}fields")
        if urls:
            named = [one[1] if isinstance(one, list) else one for one in urls]
            found.append(f"{', '.join(map(str, named))} ({parts.get(f'{prefix}format')})")
    text = "; ".join(found) or "an unknown source"
    return text if len(text) <= MOST_SOURCE_CHARACTERS else f"{text[:MOST_SOURCE_CHARACTERS]}…"


def _drawn_sentence(facts: ReportFacts, sums: Totals) -> str:
    status = facts.status
    covered = ""
    if status.coverage is not None and status.population_samples:
        about = f"an estimated {in_count(status.population_samples)}"
        covered = f" ({in_percent(status.coverage)} of {about})"
    holes = ""
    if status.holes:
        holes = f"; {plural(status.holes, 'visit')} that could not be read were left out"
    return (
        f"Within {in_time(sums.served_seconds)} of service {plural(status.drawn, 'sample')} were drawn{covered}, "
        f"{in_count(status.evicted_samples)} were evicted again, and {in_count(status.samples)} were cached at the "
        f"end{holes}."
    )


def _job_sentences(facts: ReportFacts) -> list[str]:
    ess = _ess_by_job(facts)
    found = []
    for job in facts.status.jobs:
        if not job.delivered:
            continue
        text = (
            f"Job {job.name} received {plural(job.delivered, 'sample')} in {plural(job.epoch + 1, 'epoch')}, "
            f"{job.reuse:.1f} for each sample that was drawn"
        )
        if known := ess.get(job.name):
            text += f"; the effective sample size of its uses was {in_count(known)}"
        found.append(f"{text}.")
    return found


def _ess_by_job(facts: ReportFacts) -> dict[str, float]:
    found = {
        name: job.ess_samples
        for record in facts.own_records
        for name, job in record.jobs.items()
        if job.ess_samples is not None
    }
    for name, now in (facts.metrics.jobs if facts.metrics else {}).items():
        if now.ess_samples is not None:
            found[name] = now.ess_samples
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    price: Price
    basis: str  # given or assumed
    dollars: float


def price_of(facts: ReportFacts) -> tuple[Price, str] | None:
    """Return the price of the plan, or the usual one of the store's provider, or None."""
    given = (facts.plan or {}).get("price")
    if isinstance(given, Mapping):
        known = {name: given[name] for name in Price.__slots__ if name in given}
        try:
            return Price(**known), str(given.get("basis", "given"))
        except TypeError:
            return None
    found = usual_price(facts.store_addresses)
    return None if found is None else (found, "assumed")


def cost_of(facts: ReportFacts, sums: Totals) -> Cost | None:
    found = price_of(facts)
    if found is None:
        return None
    price, basis = found
    return Cost(price, basis, price.dollars(sums.egress_bytes, sums.requests))


@dataclass(frozen=True, slots=True)
class PlannedRow:
    name: str
    planned: str
    between: str
    basis: str
    actual: str
    fits: bool | None  # None: one of them is unknown


_PLANNED = {
    "first_batch_seconds": "time to the first batch",
    "full_seconds": "time until full",
    "turnover_seconds": "turnover of a full cache",
    "coverage": "coverage",
    "reuse": "reuse",
    "ess_samples": "effective sample size",
    "exposed_wait_share": "exposed wait",
    "requests_per_second": "requests per second",
    "egress_bytes_per_hour": "egress per hour",
    "cost_usd_per_day": "cost per day",
}


def planned_rows(facts: ReportFacts) -> tuple[Actual, list[PlannedRow]]:
    """Compare a plan with the actual values from the start to the horizon, or until now."""
    plan = facts.plan or {}
    horizon = _number(plan.get("horizon_seconds")) or DEFAULT_HORIZON_SECONDS
    actual = actual_values(facts.own_records, horizon, facts.ranks)
    if actual.seconds < WHOLE_SHARE * horizon:
        plan = {**plan, **_planned_until(plan, actual.seconds)}
    values = {**actual.values, "cost_usd_per_day": _cost_per_day(facts, actual)}
    rows = [
        _planned_row(name, figure, values.get(name), actual.earliest.get(name))
        for name in _PLANNED
        if isinstance(figure := plan.get(name), Mapping)
    ]
    return actual, rows


def _planned_row(
    name: str, figure: Mapping[str, Any], found: float | None, after: float | None
) -> PlannedRow:
    """Return a row.

    ``after`` is the time of the record before, for a time that is only known to a record.
    """
    value = _number(figure.get("value"))
    ends = [_number(figure.get(end)) for end in ("low", "high")]
    between = (
        ""
        if None in ends or ends[0] == ends[1]
        else " to ".join(_shown(name, end) for end in ends)
    )
    fits, shown = None, _shown(name, found)
    if value is not None and found is not None:
        fits = _fits(name, value, found, ends)
        fits = fits or (after is not None and after - EQUAL_SECONDS <= value <= found)
    if after is not None:
        shown = f"{_shown(name, after)} to {shown}"
    basis = str(figure.get("basis", ""))
    return PlannedRow(_PLANNED[name], _shown(name, value), between, basis, shown, fits)


def _planned_until(plan: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the figures that depend on the horizon for an earlier time, from the plan's curve.

    Other figures have no value then.
    """
    found: dict[str, Any] = {name: None for name in _AT_THE_HORIZON if name in plan}
    for name, column in (
        ("coverage", "coverage"),
        ("reuse", "reuse"),
        (_EGRESS, "egress_bytes"),
    ):
        value = _interpolated(plan.get("curve"), column, seconds)
        if value is not None and isinstance(figure := plan.get(name), Mapping):
            value *= 3600 / seconds if name == _EGRESS else 1
            found[name] = {**figure, "value": value, "low": None, "high": None}
    return found


def _interpolated(curve: object, column: str, seconds: float) -> float | None:
    if not isinstance(curve, Mapping):
        return None
    pairs = zip(*(curve.get(name) or [] for name in ("at", column)), strict=False)
    known = [(at, value) for at, value in pairs if None not in (_number(at), _number(value))]
    for (start, before), (stop, after) in pairwise(known):
        if start <= seconds <= stop and stop > start:
            return float(before + (after - before) * (seconds - start) / (stop - start))
    return None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _fits(name: str, planned: float, found: float, ends: list[float | None]) -> bool:
    """Whether a figure is as planned.

    It may differ by the plan's range, 15 %, a second, or one percentage point.
    """
    low, high = ends
    if low is not None and high is not None and low <= found <= high:
        return True
    allowed = EQUAL_SHARE * abs(planned)
    if name.endswith("_seconds"):
        allowed = max(allowed, EQUAL_SECONDS)
    if name in ("coverage", "exposed_wait_share"):
        allowed = max(allowed, EQUAL_POINTS)
    return abs(found - planned) <= allowed


def _cost_per_day(facts: ReportFacts, actual: Actual) -> float | None:
    found, values = price_of(facts), actual.values
    egress, requests = (
        values.get(name) for name in ("egress_bytes_per_hour", "requests_per_second")
    )
    if found is None or egress is None or requests is None:
        return None
    return found[0].dollars(24 * egress, DAY_SECONDS * requests)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "not known"
    if name.endswith("_seconds"):
        return f"{value:.1f} s" if value < 60 else in_time(value)
    if name in ("coverage", "exposed_wait_share"):
        return in_percent(value)
    if name.startswith("cost"):
        return f"${value:,.2f}"
    if "bytes" in name:
        return in_bytes(value)
    return in_count(value) if value >= 100 else f"{value:.2f}"
