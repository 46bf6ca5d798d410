"""``metrics.json``: the service's counters since the cache began, written about once a second.

Counters only increase, also over restarts of the service and kill -9, because the next service
continues from the file. The file is replaced atomically, need not survive a power cut, and
counts against the bound like every file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from growcache.cache.files import (
    CacheLayout,
    checksummed_json,
    is_full_disk,
    overwrite_in_place,
    verified_json,
    write_atomic,
)
from growcache.cache.lease_views import WAIT_BUCKETS
from growcache.store.counts import Counts

READ_TRIES, TORN_SECONDS = 3, 0.005  # a full disk makes the service overwrite the file in place
RESET_SHARE = 0.9  # a counter that falls below this share of its value has restarted


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """The exposed waits of one rank: their number by the buckets of `WAIT_BOUNDS`, and their sum."""

    wait_seconds: float = 0.0
    wait_buckets: list[int] = field(default_factory=lambda: [0] * WAIT_BUCKETS)

    def not_below(self, before: RankMetrics) -> RankMetrics:
        """Return these values, or those shown before if they are larger.

        A wait is counted before the batch that ends it, and a batch without a wait is a
        difference of the two.
        """
        pairs = zip(self.wait_buckets, before.wait_buckets, strict=True)
        return RankMetrics(
            max(self.wait_seconds, before.wait_seconds), [max(pair) for pair in pairs]
        )


@dataclass(frozen=True, slots=True)
class JobMetrics:
    delivered: int = 0  # samples, on all ranks
    batches: int = 0
    epoch: int = 0
    reuse: float = 0.0
    ess_samples: float | None = None
    open: bool = False  # whether a reader of the job lives
    ranks: Mapping[str, RankMetrics] = field(default_factory=dict)

    def not_below(self, before: JobMetrics) -> JobMetrics:
        """Return these counters, but none below ``before``.

        They would fall while finished leases wait to be counted.
        """
        ranks = {
            rank: one.not_below(before.ranks.get(rank, RankMetrics()))
            for rank, one in self.ranks.items()
        }
        return replace(
            self,
            delivered=max(self.delivered, before.delivered),
            batches=max(self.batches, before.batches),
            ranks={**before.ranks, **ranks},
        )


@dataclass(frozen=True, slots=True)
class Metrics:
    updated_at: float = 0.0  # wall time
    began_at: float = 0.0  # time at which the counters were 0
    counts: Counts = field(default_factory=dict)  # see `metrics_builder`
    jobs: Mapping[str, JobMetrics] = field(default_factory=dict)
    age_seconds: Mapping[str, float] = field(default_factory=dict)  # of samples, by quantile
    age_seconds_mean: float | None = None


def monotonic(now: int, before: float) -> float:
    """Return a count that does not fall a little. A count that restarts may fall.

    A purge removes samples from the index and puts most of them back. Prometheus takes any fall
    for a restart.

    >>> monotonic(1000, 998), monotonic(990, 1000), monotonic(3, 1000)
    (1000, 1000, 3)
    """
    return before if RESET_SHARE * before <= now < before else now


def quantiles(pairs: Sequence[tuple[float, int]], shares: Sequence[float]) -> dict[str, float]:
    """Return weighted quantiles of (value, weight) pairs, which are ascending.

    >>> quantiles([(1.0, 1), (2.0, 98), (3.0, 1)], (0.0, 0.5, 1.0))
    {'0': 1.0, '0.5': 2.0, '1': 3.0}
    """
    total, found, at = sum(weight for _, weight in pairs), dict[str, float](), 0.0
    left = list(shares)
    for value, weight in pairs:
        at += weight
        while left and at >= left[0] * total and weight:
            found[f"{left.pop(0):g}"] = value
    return found


def write_metrics(layout: CacheLayout, metrics: Metrics, most_bytes: int) -> None:
    """Replace the file with at most ``most_bytes``, if needed without the ranks, or without the jobs."""
    short_enough: Callable[[], Iterator[bytes]] = lambda: (  # noqa: E731
        data for data in _ever_shorter(metrics) if len(data) <= most_bytes
    )
    first = next(short_enough(), None)
    if first is None:
        return
    try:
        write_atomic(layout.metrics, first, durable=False)
    except OSError as error:
        if not is_full_disk(error):
            raise
        overwrite_in_place(layout.metrics, short_enough())


def _ever_shorter(metrics: Metrics) -> Iterator[bytes]:
    yield _packed(metrics)
    open_jobs = {job: one for job, one in metrics.jobs.items() if one.open}
    yield _packed(replace(metrics, jobs=open_jobs))
    bare = {job: replace(one, ranks={}) for job, one in open_jobs.items()}
    yield _packed(replace(metrics, jobs=bare))
    yield _packed(replace(metrics, jobs={}))


def _packed(metrics: Metrics) -> bytes:
    values = orjson.loads(orjson.dumps(metrics))  # `asdict` takes ten times as long
    return checksummed_json(values, compact=True)


def read_metrics(root: str | os.PathLike[str]) -> Metrics | None:
    """Return the metrics that the service wrote last, or None if there are none, or none complete."""
    layout = CacheLayout(root)
    for _ in range(READ_TRIES):
        try:
            return _parse(verified_json(layout.metrics.read_bytes()))
        except OSError:  # missing, or not readable
            return None
        except (ValueError, TypeError, KeyError):
            time.sleep(TORN_SECONDS)
    return None


def _parse(values: dict[str, Any]) -> Metrics:
    jobs = {job: _parse_job(dict(one)) for job, one in values.pop("jobs").items()}
    known = {name: values[name] for name in Metrics.__slots__ if name in values}
    return Metrics(**known, jobs=jobs)


def _parse_job(values: dict[str, Any]) -> JobMetrics:
    ranks = {rank: RankMetrics(**one) for rank, one in values.pop("ranks").items()}
    known = {name: values[name] for name in JobMetrics.__slots__ if name in values}
    return JobMetrics(**known, ranks=ranks)
