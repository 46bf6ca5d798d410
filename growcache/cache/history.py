"""The history of a cache: a record every ten seconds. Older records are thinned out.

Any field of a record may be missing, because earlier versions wrote fewer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import orjson

from growcache.cache.files import CacheLayout, generation_paths
from growcache.cache.index.reader import read_history_rows
from growcache.cache.metrics_file import JobMetrics, Metrics
from growcache.cache.status_model import Status
from growcache.errors import CacheMissingError
from growcache.store.counts import number_in
from growcache.store.request_counts import OPS, SERVED

MOST_EVENT_CHARACTERS = 80
MOST_JOBS = 8  # in a record
MOST_RANKS, MOST_RANKS_OF_JOB = 32, 16  # in a record
MOST_SHOWN_JOBS = 32


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job at one moment. Counters start at its first batch."""

    delivered: int | None = None  # samples that its loops received
    batches: int | None = None
    wait_seconds: float | None = None  # in total, without a batch
    epoch: int | None = None
    reuse: float | None = None
    ess_samples: float | None = None
    # Of the ranks that waited longest.
    rank_wait_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """A cache at one moment. Counters start with the cache, or else at ``run``."""

    at: float  # wall time
    run: float | None = None  # start of the service of that time
    generation: int | None = None
    state: str | None = None
    waiting_for: str | None = None  # without details
    shards: int | None = None
    samples: int | None = None
    bytes: int | None = None
    max_bytes: int | None = None
    drawn: int | None = None
    evicted_samples: int | None = None
    delivered: int | None = None
    holes: int | None = None
    failures: int | None = None
    egress_bytes: int | None = None
    requests: int | None = None  # of all kinds, to the store
    errors: int | None = None  # requests that failed
    coverage: float | None = None
    reuse: float | None = None
    age_seconds_mean: float | None = None
    samples_per_second: float | None = None
    # Those that changed since the last record.
    jobs: Mapping[str, JobRecord] = field(default_factory=dict)

    def to_values(self) -> dict[str, Any]:
        """Return the stored values.

        They are short, because a record is written every ten seconds for years.
        """
        values: dict[str, Any] = _stored(self)
        del values["at"]
        return values


SIGNIFICANT_DIGITS = 7


def _stored(value: object) -> Any:
    """Return a value for JSON, without unknown and empty ones."""
    if isinstance(value, HistoryRecord | JobRecord):
        return _stored({one.name: getattr(value, one.name) for one in fields(value)})
    if isinstance(value, Mapping):
        return {key: _stored(one) for key, one in value.items() if one not in (None, {})}
    return _rounded(value)


def _rounded(value: object) -> object:
    """Shorten a number, except a wall time. A record has twenty numbers.

    >>> _rounded(0.123456789), _rounded(12345678), _rounded(1795812345.678)
    (0.1234568, 12345678, 1795812345.678)
    """
    if not isinstance(value, float) or abs(value) >= 10**SIGNIFICANT_DIGITS:
        return value
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


_SAME_NAMES = (
    *("generation", "state", "shards", "samples", "bytes", "max_bytes", "drawn"),
    *("evicted_samples", "delivered", "holes", "coverage", "reuse", "samples_per_second"),
)


def history_record(
    status: Status, metrics: Metrics, last_jobs: Mapping[str, JobMetrics]
) -> HistoryRecord:
    """Return the record of this moment, with the jobs that differ from ``last_jobs``.

    If there are too many, those come first that are not in ``last_jobs``, or that were recorded
    longest ago, which its order shows.
    """
    changed = [n for n, job in metrics.jobs.items() if last_jobs.get(n) != job]
    turns = {name: turn for turn, name in enumerate(last_jobs)}
    changed.sort(key=lambda name: (not metrics.jobs[name].open, turns.get(name, -1)))
    del changed[MOST_JOBS:]
    most_ranks = min(MOST_RANKS_OF_JOB, MOST_RANKS // max(1, len(changed)))
    requests = number_in(metrics.counts, "requests")
    served = sum(number_in(metrics.counts, "requests", op, SERVED) for op in OPS)
    return HistoryRecord(
        at=time.time(),
        run=status.started_at,
        waiting_for=short_event(status.waiting_for),
        failures=int(number_in(metrics.counts, "retries")),
        egress_bytes=int(number_in(metrics.counts, "egress_bytes")),
        requests=int(requests),
        errors=int(requests - served),
        age_seconds_mean=metrics.age_seconds_mean,
        jobs={name: _job_record(metrics.jobs[name], most_ranks) for name in changed},
        **{name: getattr(status, name) for name in _SAME_NAMES},
    )


def short_event(event: str | None) -> str | None:
    """Return an event without its details, which may name an object.

    A purge must leave no keys.

    >>> short_event("the store to answer (s3://b/x: connection refused)"), short_event(None)
    ('the store to answer', None)
    """
    return None if event is None else event.partition(" (")[0][:MOST_EVENT_CHARACTERS]


def _job_record(job: JobMetrics, most_ranks: int) -> JobRecord:
    """Record the ranks that waited longest, because they delay the others."""
    waits = {rank: one.wait_seconds for rank, one in job.ranks.items()}
    longest = sorted(waits, key=waits.__getitem__, reverse=True)[:most_ranks]
    return JobRecord(
        delivered=job.delivered,
        batches=job.batches,
        wait_seconds=sum(waits.values()),
        epoch=job.epoch,
        reuse=job.reuse,
        ess_samples=job.ess_samples,
        rank_wait_seconds={rank: waits[rank] for rank in longest},
    )


def read_history(root: str | os.PathLike[str], since: float = 0.0) -> list[HistoryRecord]:
    """Return the records after ``since`` of all generations of a cache, oldest first.

    Raises:
        CacheMissingError: No cache is at the path.
        CacheError: Its index is damaged.
    """
    missing: CacheMissingError | None = None
    found: dict[float, HistoryRecord] | None = None
    for path in generation_paths(Path(root).absolute()):
        try:
            rows = read_history_rows(CacheLayout(path), since)
        except (
            CacheMissingError
        ) as error:  # this generation ended meanwhile, or has not started
            missing = error
            continue
        found = (found or {}) | {at: _parse_record(at, text) for at, text in rows}
    if found is None:
        raise missing or CacheMissingError(f"no cache at {root}")
    return [found[at] for at in sorted(found)]


_TEXTS = ("state", "waiting_for")


def _parse_record(at: float, text: str) -> HistoryRecord:
    """Return a record with the fields that this version understands."""
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        return HistoryRecord(at)
    jobs = values.pop("jobs", None)
    known = {name: values[name] for name in _TEXTS if isinstance(values.get(name), str)}
    return HistoryRecord(
        at,
        jobs={
            job: _parse_job(of_job)
            for job, of_job in (jobs.items() if isinstance(jobs, dict) else ())
            if isinstance(of_job, dict)
        },
        **known,
        **{k: v for k, v in _numbers_of(HistoryRecord, values).items() if k != "at"},
    )


def _parse_job(values: dict[str, Any]) -> JobRecord:
    waits = values.pop("rank_wait_seconds", None)
    ranks = (
        {rank: one for rank, one in waits.items() if _is_number(one)}
        if isinstance(waits, dict)
        else {}
    )
    return JobRecord(rank_wait_seconds=ranks, **_numbers_of(JobRecord, values))


def _numbers_of(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(kind)} - {*_TEXTS, "jobs"}
    return {name: values[name] for name in names & values.keys() if _is_number(values[name])}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def with_jobs_held(records: Iterable[HistoryRecord]) -> Iterator[HistoryRecord]:
    """Yield the records with all jobs of their time.

    A stored record has only the jobs that changed; afterwards any record may be left out. If
    there are too many jobs, those that changed last remain.
    """
    jobs: dict[str, JobRecord] = {}
    for record in records:
        unchanged = {job: one for job, one in jobs.items() if job not in record.jobs}
        latest = [*unchanged.items(), *record.jobs.items()][-MOST_SHOWN_JOBS:]
        jobs = dict(latest)
        yield replace(record, jobs=jobs)


def history_columns(records: list[HistoryRecord]) -> dict[str, Any]:
    """Return records as columns for drawing code, with None for unknown values.

    >>> history_columns([HistoryRecord(1.0, samples=5)])["samples"]
    [5]
    """
    names = [one.name for one in fields(HistoryRecord) if one.name != "jobs"]
    columns = {name: [getattr(record, name) for record in records] for name in names}
    held = [record.jobs for record in with_jobs_held(records)]
    jobs = dict.fromkeys(job for record in records for job in record.jobs if job in held[-1])
    return {
        **columns,
        "jobs": {job: _job_columns([one.get(job, NO_RECORD) for one in held]) for job in jobs},
    }


NO_RECORD = JobRecord()


def _job_columns(rows: Sequence[JobRecord]) -> dict[str, Any]:
    names = [one.name for one in fields(JobRecord) if one.name != "rank_wait_seconds"]
    columns = {name: [getattr(row, name) for row in rows] for name in names}
    ranks = dict.fromkeys(rank for row in rows for rank in row.rank_wait_seconds)
    waits = {
        rank: [row.rank_wait_seconds.get(rank) for row in rows]
        for rank in sorted(ranks, key=lambda rank: (len(rank), rank))
    }
    return {**columns, "rank_wait_seconds": waits}
