"""The metrics of caches in Prometheus' text format.

Counters come from ``metrics.json``, and gauges from the status. Every name starts with
``growcache_``, and every sample has the label ``cache``. No label contains a key.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from growcache.cache.lease_views import WAIT_BOUNDS
from growcache.cache.metrics_file import JobMetrics, Metrics
from growcache.cache.status_model import Status
from growcache.errors import CacheError
from growcache.sampling.sampler_counts import STAGE_BOUNDS
from growcache.store.counts import number_in
from growcache.store.request_counts import REQUEST_BOUNDS

VERSION = version("growcache")
STATES = ("running", "complete", "full", "waiting", "shrinking", "stopped")


class Seen(NamedTuple):
    """A cache at one moment. Without a status it cannot be read."""

    name: str
    status: Status | None
    metrics: Metrics
    free_bytes: int | None = None  # on the disk, for this user


Look = Callable[[], tuple[Status, Metrics | None]]


def exposition(looks: Mapping[str, Look], accept: str) -> tuple[bytes, str]:
    """Return the text for one scrape and its content type.

    ``accept`` is the request's header.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_CachesCollector([_see(name, look) for name, look in looks.items()]))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _see(name: str, look: Look) -> Seen:
    try:
        status, metrics = look()
    except (CacheError, OSError):
        return Seen(name, None, Metrics())
    return Seen(name, status, metrics or Metrics(), _free_bytes(status.path))


def _free_bytes(path: str) -> int | None:
    try:
        disk = os.statvfs(path)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


class _CachesCollector(Collector):
    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "growcache_build_info", "The version of the dashboard.", labels=["version"]
        )
        build.add_metric([VERSION], 1)
        yield build
        there = [one for one in self._seen if one.status is not None]
        yield _up(self._seen)
        for make in (_counters, _histograms, _job_counters, _gauges, _job_gauges):
            yield from make(there)


def _up(seen: Iterable[Seen]) -> Metric:
    family = GaugeMetricFamily(
        "growcache_up", "1 while a service runs on the cache, 0 otherwise.", labels=["cache"]
    )
    for one in seen:
        runs = one.status is not None and one.status.state != "stopped"
        family.add_metric([one.name], float(runs))
    return family


# Name, help, labels, and the place of the counts.
_COUNTERS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("growcache_samples_drawn", "Samples drawn into the cache.", (), "drawn"),
    ("growcache_samples_evicted", "Samples evicted from the cache.", (), "evicted"),
    (
        "growcache_moved_parts",
        "Parts drawn from lanes that another node owned earlier in the pass and may have drawn as well.",
        (),
        "moved_parts",
    ),
    (
        "growcache_store_requests",
        "Requests to the store, by operation and outcome.",
        ("op", "code"),
        "requests",
    ),
    ("growcache_store_read_bytes", "Bytes of reads that were served.", (), "read_bytes"),
    (
        "growcache_store_retries",
        "Failures that were retried, by reason.",
        ("reason",),
        "retries",
    ),
    ("growcache_holes", "Visits that will never yield a sample.", ("reason",), "holes"),
    (
        "growcache_waiting_seconds",
        "Seconds during which no further group of shards could be started, by reason.",
        ("reason",),
        "waiting_seconds",
    ),
)


def _counters(seen: Sequence[Seen]) -> Iterator[Metric]:
    for name, text, labels, key in _COUNTERS:
        family = CounterMetricFamily(name, text, labels=["cache", *labels])
        for one in seen:
            for values, number in _leaves(one.metrics, (key,), len(labels)):
                family.add_metric([one.name, *values], number)
        yield family


def _leaves(
    metrics: Metrics, path: tuple[str, ...], depth: int
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers below a path of the counts, with their keys."""
    if not depth:
        yield (), number_in(metrics.counts, *path)
        return
    found: object = metrics.counts
    for key in path:
        found = found.get(key, {}) if isinstance(found, dict) else {}
    for key in sorted(found if isinstance(found, dict) else ()):
        for keys, number in _leaves(metrics, (*path, key), depth - 1):
            yield (key, *keys), number


_HISTOGRAMS = (
    (
        "growcache_store_read_seconds",
        "Duration of requests that were served.",
        "op",
        "request_seconds",
        REQUEST_BOUNDS,
    ),
    (
        "growcache_group_seconds",
        "Duration of each stage of filling a group of shards.",
        "stage",
        "group_seconds",
        STAGE_BOUNDS,
    ),
)


def _histograms(seen: Sequence[Seen]) -> Iterator[Metric]:
    for name, text, label, key, bounds in _HISTOGRAMS:
        family = HistogramMetricFamily(name, text, labels=["cache", label])
        for one in seen:
            found = one.metrics.counts.get(key, {})
            for value, buckets in sorted(found.items() if isinstance(found, dict) else ()):
                if isinstance(buckets, list) and len(buckets) == len(bounds) + 2:
                    family.add_metric(
                        [one.name, value], cumulative(bounds, buckets[:-1]), buckets[-1]
                    )
        yield family


def cumulative(bounds: Sequence[float], buckets: Sequence[float]) -> list[tuple[str, float]]:
    """Return buckets in Prometheus' form: the counts up to each bound.

    >>> cumulative((0.1, 1.0), [2, 0, 1])
    [('0.1', 2), ('1.0', 2), ('+Inf', 3)]
    """
    names = [*map(str, bounds), "+Inf"]
    return list(zip(names, accumulate(buckets), strict=True))


def _of_jobs(seen: Sequence[Seen]) -> Iterator[tuple[str, str, JobMetrics]]:
    for one in seen:
        for job, metrics in one.metrics.jobs.items():
            yield one.name, job, metrics


def _job_counters(seen: Sequence[Seen]) -> Iterator[Metric]:
    delivered = CounterMetricFamily(
        "growcache_samples_delivered",
        "Samples that training loops received, on all ranks.",
        labels=["cache", "job"],
    )
    waits = HistogramMetricFamily(
        "growcache_batch_wait_seconds",
        "The exposed wait: how long a training loop had to wait for its next batch.",
        labels=["cache", "job", "rank"],
    )
    for cache, job, metrics in _of_jobs(seen):
        delivered.add_metric([cache, job], metrics.delivered)
        for rank, sums in sorted(metrics.ranks.items()):
            buckets = cumulative(WAIT_BOUNDS, sums.wait_buckets)
            waits.add_metric([cache, job, rank], buckets, sums.wait_seconds)
    yield delivered
    yield waits


_STATUS_GAUGES: tuple[tuple[str, str, Callable[[Status], float | None]], ...] = (
    ("cache_bytes", "Bytes on disk that count against the bound.", lambda s: s.bytes),
    ("cache_max_bytes", "The bound in force, in bytes.", lambda s: s.max_bytes),
    ("cache_samples", "Samples in the cache.", lambda s: s.samples),
    ("cache_shards", "Shards in the cache.", lambda s: s.shards),
    ("coverage_ratio", "Distinct samples drawn, as a share of all.", lambda s: s.coverage),
    (
        "population_samples",
        "Samples of the source, estimated; once it is listed.",
        lambda s: s.population_samples,
    ),
    ("listing_complete", "1 once the source is listed.", lambda s: s.listing_complete),
    ("samplers", "Living sampler processes.", lambda s: s.workers),
    (
        "status_timestamp_seconds",
        "Unix time at which the service last reported.",
        lambda s: s.updated_at,
    ),
)


def _samplers_by_node(status: Status | None) -> Counter[str]:
    workers = status.worker_states if status is not None else []
    return Counter(one.node for one in workers if one.node is not None and one.pid is not None)


def _gauges(seen: Sequence[Seen]) -> Iterator[Metric]:
    for name, text, value_of in _STATUS_GAUGES:
        family = GaugeMetricFamily(f"growcache_{name}", text, labels=["cache"])
        for one in seen:
            if one.status is not None and (value := value_of(one.status)) is not None:
                family.add_metric([one.name], float(value))
        yield family
    free = GaugeMetricFamily(
        "growcache_disk_free_bytes", "Free bytes on the disk of the cache.", labels=["cache"]
    )
    nodes = GaugeMetricFamily(
        "growcache_node_samplers",
        "Living samplers on each node of a Ray cluster.",
        labels=["cache", "node"],
    )
    state = GaugeMetricFamily(
        "growcache_state",
        "1 for the state that the service is in, 0 for the others.",
        labels=["cache", "state"],
    )
    ages = Metric(  # only summaries may have quantiles
        "growcache_sample_age_seconds",
        "Seconds since the cached samples were drawn; quantile 0 is the youngest.",
        "summary",
    )
    for one in seen:
        if one.free_bytes is not None:
            free.add_metric([one.name], one.free_bytes)
        for node, count in sorted(_samplers_by_node(one.status).items()):
            nodes.add_metric([one.name, node], count)
        for word in STATES:
            state.add_metric(
                [one.name, word], float(one.status is not None and one.status.state == word)
            )
        for quantile, seconds in one.metrics.age_seconds.items():
            ages.add_sample(ages.name, {"cache": one.name, "quantile": quantile}, seconds)
    yield free
    yield nodes
    yield state
    yield ages


_JOB_GAUGES: tuple[tuple[str, str, Callable[[JobMetrics], float | None]], ...] = (
    (
        "reuse_ratio",
        "Samples delivered to a job over samples drawn, since the beginning.",
        lambda j: j.reuse,
    ),
    (
        "ess_samples",
        "The effective sample size (Σu)²/Σu² of all samples that a job received.",
        lambda j: j.ess_samples,
    ),
    ("epoch", "The latest epoch that a job began.", lambda j: j.epoch),
)


def _job_gauges(seen: Sequence[Seen]) -> Iterator[Metric]:
    for name, text, value_of in _JOB_GAUGES:
        family = GaugeMetricFamily(f"growcache_{name}", text, labels=["cache", "job"])
        for cache, job, metrics in _of_jobs(seen):
            if (value := value_of(metrics)) is not None:
                family.add_metric([cache, job], float(value))
        yield family
    yield _leases(seen)


def _leases(seen: Sequence[Seen]) -> Metric:
    text = "Snapshots that living readers of a job hold."
    family = GaugeMetricFamily("growcache_leases", text, labels=["cache", "job"])
    for one in seen:
        leases = one.status.leases if one.status is not None else []
        counts = Counter(lease.job for lease in leases if lease.open)
        for job in sorted({*one.metrics.jobs, *counts}):
            family.add_metric([one.name, job], counts[job])
    return family
