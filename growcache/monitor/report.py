"""Summaries of a cache's history for a report. Pure.

A record has the counters since the cache began. There is one every ten seconds, and fewer for
times long ago. The events between two records are the differences of their counters.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from growcache.cache.history import HistoryRecord, history_columns, with_jobs_held
from growcache.humanize import in_percent
from growcache.loading.report_table import WARN_REUSE

T = TypeVar("T")

MOST_PERIODS = 72
PERIODS = (60, 300, 900, 3600, 6 * 3600, 86_400, 7 * 86_400)  # seconds
HOURLY_FROM = 3 * 3600.0  # from this length on, a history is shown hour by hour
LEAST_GAP_SECONDS = 60.0  # without a service; a restart takes less
MUCH_WAIT = 0.1
FULL_SHARE = 0.97  # of max_bytes, if no record says that the cache is full
_DURATION = re.compile(r" for \d[\d.,]* (?:s|min|h|d)(?: \d+ (?:s|min|h))?\b")


@dataclass(frozen=True, slots=True)
class Step:
    """The events between two records."""

    start: float
    stop: float
    state: str
    waiting_for: str
    drawn: int
    evicted: int
    delivered: int
    egress_bytes: int
    requests: int
    waits: Mapping[str, float]  # seconds of one loop, by job
    is_gap: bool = False  # no service ran

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def of_last_generation(records: Sequence[HistoryRecord]) -> list[HistoryRecord]:
    """Return the records of the newest generation, with counters from its start.

    A replaced generation had other samples, but requests and egress continue to count.
    """
    newest = records[-1].generation if records else None
    known = (newest, None) if not newest else (newest,)  # early versions had no generations
    before = next((one for one in reversed(records) if one.generation not in known), None)
    own = [one for one in records if one.generation in known]
    if before is None:
        return own
    return [
        replace(
            one,
            egress_bytes=_since(before.egress_bytes, one.egress_bytes),
            requests=_since(before.requests, one.requests),
            errors=_since(before.errors, one.errors),
        )
        for one in own
    ]


def _since(before: int | None, now: int | None) -> int | None:
    return now if now is None or before is None or now < before else now - before


def steps_between(
    records: Sequence[HistoryRecord], ranks: Mapping[str, int] | None = None
) -> list[Step]:
    """Return the steps of a history.

    ``ranks`` has the loops of each job, whose waits are summed.
    """
    waits, found = dict[str, float](), list[Step]()
    for before, after in pairwise(records):
        waits = waits or _waits_of(before)
        seen = _waits_of(after)
        # A job without an earlier record started meanwhile, so all of its wait belongs to this
        # step.
        more = {
            job: max(0.0, seconds - waits.get(job, 0.0)) / max(1, (ranks or {}).get(job, 1))
            for job, seconds in seen.items()
        }
        waits = waits | seen
        base = HistoryRecord(0.0, drawn=0, evicted_samples=0, delivered=0)
        base = before if before.generation in (None, after.generation) else base
        step = Step(
            *(before.at, after.at, after.state or "", after.waiting_for or ""),
            drawn=_growth(base.drawn, after.drawn),
            evicted=_growth(base.evicted_samples, after.evicted_samples),
            delivered=_growth(base.delivered, after.delivered),
            egress_bytes=_counted_in_run(before.egress_bytes, after.egress_bytes),
            requests=_counted_in_run(before.requests, after.requests),
            waits=more,
        )
        found += _split_at_start(step, before.run, after.run)
    return found


def _split_at_start(step: Step, before: float | None, run: float | None) -> list[Step]:
    """Return the step, or the time without a service and the time since the next start.

    Old records are hours apart, so only the starts of services show when none ran.
    """
    if before is None or run is None or run == before or run - step.start < LEAST_GAP_SECONDS:
        return [step]
    start = min(run, step.stop)
    idle = (start - step.start) / max(step.seconds, 1e-9)
    delivered = round(idle * step.delivered)
    waits = {job: idle * seconds for job, seconds in step.waits.items()}
    gap = Step(step.start, start, "stopped", "", 0, 0, delivered, 0, 0, waits, is_gap=True)
    rest = {job: seconds - waits[job] for job, seconds in step.waits.items()}
    after = replace(step, start=start, delivered=step.delivered - delivered, waits=rest)
    if after.seconds:
        return [gap, after]
    return [replace(step, state="stopped", waiting_for="", is_gap=True)]  # counts of an instant


def _waits_of(record: HistoryRecord) -> dict[str, float]:
    found = ((name, job.wait_seconds) for name, job in record.jobs.items())
    return {name: seconds for name, seconds in found if seconds is not None}


def _growth(before: float | None, after: float | None) -> int:
    return 0 if before is None or after is None else max(0, int(after - before))


def _counted_in_run(before: int | None, after: int | None) -> int:
    """Return the growth of a counter that may restart from 0 with each run of the service."""
    restarted = before is not None and after is not None and after < before
    return _growth(0 if restarted else before, after)


@dataclass(slots=True)
class Period:
    """A row in the table of the limits of training."""

    start: float
    seconds: float = 0.0
    idle_seconds: float = 0.0  # without a service
    drawn: float = 0.0
    evicted: float = 0.0
    delivered: float = 0.0
    egress_bytes: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reasons: Counter[str] = field(default_factory=Counter)  # milliseconds

    def add(self, step: Step, seconds: float) -> None:
        share = seconds / step.seconds
        self.seconds += seconds
        self.idle_seconds += seconds if step.is_gap else 0.0
        self.drawn += step.drawn * share
        self.evicted += step.evicted * share
        self.delivered += step.delivered * share
        self.egress_bytes += step.egress_bytes * share
        for job, waited in step.waits.items():
            self.waits[job] += waited * share
        if step.waiting_for and not step.is_gap:
            reason = _DURATION.sub("", step.waiting_for)  # else each record would have its own
            self.reasons[reason] += round(1000 * seconds)

    @property
    def wait_share(self) -> float:
        """Exposed wait of the job that waited most, as a share of the time."""
        return min(1.0, max(self.waits.values(), default=0.0) / max(self.seconds, 1e-9))

    @property
    def reuse(self) -> float | None:
        return self.delivered / self.drawn if self.drawn >= 1 else None

    @property
    def reason(self) -> str:
        return self.reasons.most_common(1)[0][0] if self.reasons else ""


def period_seconds(span: float) -> int:
    """Return the length of the rows of a table, in seconds.

    >>> period_seconds(600), period_seconds(5 * 3600), period_seconds(14 * 86400)
    (60, 3600, 21600)
    """
    allowed = [one for one in PERIODS if span / one <= MOST_PERIODS]
    if span >= HOURLY_FROM:
        allowed = [one for one in allowed if one >= 3600]
    return min(allowed, default=PERIODS[-1])


def periods(
    records: Sequence[HistoryRecord], ranks: Mapping[str, int] | None = None
) -> list[Period]:
    """Return the events in each period of a history. A step over several is divided by time."""
    if len(records) < 2:
        return []
    width = period_seconds(records[-1].at - records[0].at)
    found: dict[int, Period] = {}
    for step in steps_between(records, ranks):
        for number, part in _shared_out(step, width, records[-1].at):
            found.setdefault(number, Period(float(number * width))).add(step, part)
    return [found[number] for number in sorted(found)][-MOST_PERIODS:]


def _shared_out(step: Step, width: int, end: float) -> Iterator[tuple[int, float]]:
    # For a clock that was decades behind.
    at = max(step.start, end - (MOST_PERIODS + 1) * width)
    while at < step.stop:
        number = int(at // width)
        until = min(step.stop, float((number + 1) * width))
        yield number, until - at
        at = until


def limited_by(period: Period) -> str:
    """Return the limit of training in a period, in words."""
    if period.delivered < 1:
        if period.idle_seconds > period.seconds / 2:
            return "no service, no training"
        return f"no training{_while(period)}"
    if period.wait_share > MUCH_WAIT:
        return f"loading: the loop waited {in_percent(period.wait_share)} of the time"
    if period.idle_seconds > period.seconds / 2:
        return "no service ran: only cached samples"
    if period.reuse is None:
        return f"new samples: none came{_while(period)}"
    if period.reuse > WARN_REUSE:
        return f"new samples: each was delivered {period.reuse:.1f} times{_while(period)}"
    return "training itself: it was fed"


def _while(period: Period) -> str:
    return f"; the service waited for {period.reason}" if period.reason else ""


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` values, evenly spread, including the first and the last.

    >>> thinned([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    last = len(values) - 1
    if last < most or most < 2:
        return list(values)
    return [values[round(i * last / (most - 1))] for i in range(most)]


def thinned_columns(records: Sequence[HistoryRecord], most: int) -> dict[str, Any]:
    """Return up to ``most`` records by column, evenly spread, with jobs of those in between."""
    return history_columns(thinned(list(with_jobs_held(records)), most))


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a whole history."""

    seconds: float = 0.0
    served_seconds: float = 0.0  # while a service ran
    egress_bytes: int = 0
    requests: int = 0
    waits: Mapping[str, float] = field(default_factory=dict)  # seconds of one loop, by job
    trained_seconds: float = 0.0

    @property
    def wait_share(self) -> float | None:
        if not self.trained_seconds:
            return None
        return min(1.0, max(self.waits.values(), default=0.0) / self.trained_seconds)


def totals(records: Sequence[HistoryRecord], ranks: Mapping[str, int] | None = None) -> Totals:
    steps = steps_between(records, ranks)
    waits: dict[str, float] = defaultdict(float)
    for step in steps:
        for job, seconds in step.waits.items():
            waits[job] += seconds
    first = records[0] if records else HistoryRecord(0.0)
    return Totals(
        seconds=sum(step.seconds for step in steps),
        served_seconds=sum(step.seconds for step in steps if not step.is_gap),
        egress_bytes=(first.egress_bytes or 0) + sum(step.egress_bytes for step in steps),
        requests=(first.requests or 0) + sum(step.requests for step in steps),
        waits=dict(waits),
        trained_seconds=sum(step.seconds for step in steps if step.delivered),
    )


@dataclass(frozen=True, slots=True)
class Actual:
    """The actual values of a plan's figures at its horizon; None if the history lacks them."""

    seconds: float  # of the horizon that have passed
    values: Mapping[str, float | None]
    # The time of an event is that of its record, and after the record before it.
    earliest: Mapping[str, float] = field(default_factory=dict)


def actual_values(
    records: Sequence[HistoryRecord],
    horizon_seconds: float,
    ranks: Mapping[str, int] | None = None,
) -> Actual:
    """Return the figures of a plan from the start of the first service on."""
    if len(records) < 2:
        return Actual(0.0, {})
    began = _began(records)
    window = [one for one in records if one.at - began <= horizon_seconds] or [records[0]]
    last, seconds = window[-1], max(1e-9, window[-1].at - began)
    first = _first_at(records, lambda record: bool(record.delivered))
    full_at = _first_at(records, _is_full)
    sums, hour = totals(window, ranks), 3600.0
    trained = 0.0 if first is None else last.at - first
    waited = max(sums.waits.values(), default=0.0)
    values = {
        "first_batch_seconds": None if first is None else first - began,
        "full_seconds": None if full_at is None else full_at - began,
        "turnover_seconds": _turnover_seconds(records, full_at),
        "coverage": _last_known(window, "coverage"),
        "reuse": (last.delivered or 0) / last.drawn if last.drawn else None,
        "ess_samples": _ess_samples(window),
        "exposed_wait_share": min(1.0, waited / trained) if trained > 0 else None,
        "requests_per_second": sums.requests / seconds,
        "egress_bytes_per_hour": sums.egress_bytes * hour / seconds,
    }
    moments = {"first_batch_seconds": first, "full_seconds": full_at}
    earliest = {
        name: max((one.at - began for one in records if one.at < at), default=0.0)
        for name, at in moments.items()
        if at is not None
    }
    return Actual(seconds, values, earliest)


def _began(records: Sequence[HistoryRecord]) -> float:
    """Return the start of the first service, which is shortly before its first record."""
    first = records[0]
    return first.at if first.run is None else min(first.at, first.run)


def _first_at(
    records: Sequence[HistoryRecord], holds: Callable[[HistoryRecord], bool]
) -> float | None:
    return next((record.at for record in records if holds(record)), None)


def _last_known(records: Sequence[HistoryRecord], name: str) -> Any:
    values = (getattr(record, name) for record in reversed(records))
    return next((value for value in values if value is not None), None)


def _ess_samples(records: Sequence[HistoryRecord]) -> float | None:
    """Return the effective sample size of the job that received most."""
    last = {name: job for record in records for name, job in record.jobs.items()}
    most = max(last.values(), key=lambda job: job.delivered or 0, default=None)
    return None if most is None else most.ess_samples


def _is_full(record: HistoryRecord) -> bool:
    if record.state in ("full", "complete") or record.evicted_samples:
        return True
    return bool(record.max_bytes and (record.bytes or 0) >= FULL_SHARE * record.max_bytes)


def _turnover_seconds(records: Sequence[HistoryRecord], full_at: float | None) -> float | None:
    """Return the time in which as many samples were evicted as the full cache held."""
    if full_at is None:
        return None
    after = [record for record in records if record.at >= full_at]
    held, gone, last = after[0].samples or 0, after[0].evicted_samples or 0, after[-1]
    evicted = (last.evicted_samples or 0) - gone
    if not held or evicted <= 0 or last.at <= full_at:
        return None
    return (last.at - full_at) * held / evicted
