"""Counters add up, are kept, never fall, and reach Prometheus' own parser as they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from growcache.cache import metrics_file
from growcache.cache.files import CacheLayout
from growcache.cache.lease_views import WAIT_BUCKETS, LeaseCounters
from growcache.cache.metrics_file import (
    JobMetrics,
    Metrics,
    RankMetrics,
    monotonic,
    quantiles,
    read_metrics,
    write_metrics,
)
from growcache.cache.status import read_status
from growcache.cache.status_model import MovedStatus, Status
from growcache.cache.uses import (
    JobSums,
    WaitSums,
    add_gone_shards,
    effective_samples,
    jobs_in_index,
)
from growcache.monitor.prometheus import exposition
from growcache.sampling.metrics_builder import MetricsBuilder
from growcache.sampling.sampler_counts import STAGE_BOUNDS
from growcache.store.counts import Counts, minus, number_in, plus
from growcache.store.request_counts import REQUEST_BOUNDS, RequestCounts
from tests.filled import Filled

numbers = st.integers(0, 1 << 40)
counted: st.SearchStrategy[Any] = st.recursive(
    numbers | st.lists(numbers, min_size=3, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


def nested(least: int) -> st.SearchStrategy[Any]:
    inner = st.dictionaries(st.sampled_from("abc"), st.integers(least, 1 << 40), min_size=1)
    return st.dictionaries(st.sampled_from("xyz"), inner)


@given(nested(0), nested(1))
def test_increments_add_up_to_the_totals(before: Counts, more: Counts) -> None:
    after = plus(before, more)
    assert minus(after, before) == more
    assert plus(before, minus(after, before)) == after
    assert number_in(after) == number_in(before) + number_in(more)


@given(counted, counted)
def test_counts_of_other_shapes_never_raise(a: Any, b: Any) -> None:
    """A later version may have made a mapping of a number."""
    plus({"k": a}, {"k": b})


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_a_published_counter_falls_only_where_it_begins_anew(steps: list[int]) -> None:
    shown = 0.0
    for now in steps:
        before, shown = shown, monotonic(now, shown)
        assert shown >= before or shown == now < metrics_file.RESET_SHARE * before


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 50)), min_size=1))
def test_quantiles_are_values_that_are_there(pairs: list[tuple[float, int]]) -> None:
    found = quantiles(sorted(pairs), (0.0, 0.5, 1.0))
    there = [value for value, weight in pairs if weight]
    assert set(found.values()) <= set(there)
    if there:
        assert (found["0"], found["1"]) == (min(there), max(there))


def full_metrics() -> Metrics:
    buckets: list[float] = [0] * (len(REQUEST_BOUNDS) + 1)
    buckets[2] = 7
    stages: list[float] = [0] * (len(STAGE_BOUNDS) + 1)
    stages[-1] = 1
    waits = [0] * WAIT_BUCKETS
    waits[0], waits[-1] = 98, 2
    return Metrics(
        updated_at=1000.0,
        began_at=10.0,
        counts={
            "requests": {"get": {"ok": 7, "throttled": 2}, "list": {"ok": 1}},
            "request_seconds": {"get": [*buckets, 0.02]},
            "group_seconds": {"fetch": [*stages, 400.0]},
            "waiting_seconds": {"store": 1.5},
            "retries": {"throttled": 2},
            "holes": {"missing": 1},
            "read_bytes": 7000,
            "drawn": 70,
            "evicted": 10,
        },
        jobs={
            'eeg "7"\n': JobMetrics(
                200, 100, 3, 2.9, 55.5, open=True, ranks={"1": RankMetrics(130.5, waits)}
            )
        },
        age_seconds={"0.5": 3.0},
    )


def test_the_exposition_is_what_the_official_parser_reads() -> None:
    status = Status(state="waiting", bytes=5, max_bytes=10, samples=60, coverage=0.5)
    looks = {"train": lambda: (status, full_metrics())}
    body, content_type = exposition(looks, "text/plain")
    assert content_type.startswith("text/plain; version=")
    families = {one.name: one for one in text_string_to_metric_families(body.decode())}
    samples = {
        (
            sample.name,
            *sorted((k, v) for k, v in sample.labels.items() if k != "cache"),
        ): sample.value
        for family in families.values()
        for sample in family.samples
    }
    job = ("job", 'eeg "7"\n')
    assert samples["growcache_store_requests_total", ("code", "throttled"), ("op", "get")] == 2
    assert samples["growcache_samples_drawn_total",] == 70
    assert samples["growcache_store_read_bytes_total",] == 7000
    assert samples["growcache_holes_total", ("reason", "missing")] == 1
    assert samples["growcache_waiting_seconds_total", ("reason", "store")] == 1.5
    assert samples["growcache_samples_delivered_total", job] == 200
    assert samples["growcache_batch_wait_seconds_count", job, ("rank", "1")] == 100
    assert (
        samples["growcache_batch_wait_seconds_bucket", job, ("le", "60.0"), ("rank", "1")] == 98
    )
    assert samples["growcache_batch_wait_seconds_sum", job, ("rank", "1")] == 130.5
    assert samples["growcache_group_seconds_bucket", ("le", "+Inf"), ("stage", "fetch")] == 1
    assert samples["growcache_store_read_seconds_sum", ("op", "get")] == 0.02
    assert samples["growcache_ess_samples", job] == 55.5
    assert samples["growcache_state", ("state", "waiting")] == 1
    assert samples["growcache_sample_age_seconds", ("quantile", "0.5")] == 3.0
    assert samples["growcache_coverage_ratio",] == 0.5
    assert families["growcache_batch_wait_seconds"].type == "histogram"
    assert all(name.startswith("growcache_") for name in families)


def test_metrics_are_read_as_they_were_written(tmp_path: Path) -> None:
    layout, metrics = CacheLayout(tmp_path), full_metrics()
    assert read_metrics(tmp_path) is None
    write_metrics(layout, metrics, 100_000)
    assert read_metrics(tmp_path) == metrics
    closed = replace(metrics, jobs={**metrics.jobs, "old": JobMetrics(delivered=10**9)})
    write_metrics(layout, closed, len(layout.metrics.read_bytes()))
    assert read_metrics(tmp_path) == metrics  # without the job that has no reader
    write_metrics(layout, closed, 10)
    assert read_metrics(tmp_path) == metrics  # nothing fits
    layout.metrics.write_bytes(layout.metrics.read_bytes().replace(b"7000", b"7001"))
    assert read_metrics(tmp_path) is None  # its checksum is wrong


def test_buckets_of_waits_do_not_fall_between_a_wait_and_its_batch() -> None:
    counters, shown = LeaseCounters(), RankMetrics()
    for step in ("receive", "receive", "wait", "receive"):
        counters.receive(1, 0.0) if step == "receive" else counters.wait(0.3)
        before, sums = shown, WaitSums().plus(counters)
        now = RankMetrics(sums.seconds, sums.histogram)
        shown = now.not_below(before)
        assert all(a >= b for a, b in zip(shown.wait_buckets, before.wait_buckets, strict=True))
    assert sum(shown.wait_buckets) == counters.batches == 3
    assert shown.wait_seconds == 0.3
    earlier = JobMetrics(delivered=9, batches=3, epoch=1, ranks={"0": shown})
    after = JobMetrics(delivered=8, batches=2, epoch=2, ranks={"1": shown})
    both = JobMetrics(delivered=9, batches=3, epoch=2, ranks={"0": shown, "1": shown})
    assert after.not_below(earlier) == both


def test_sums_of_a_job_keep_its_ranks() -> None:
    counters = LeaseCounters(counts=True)
    counters.wait(0.3)
    only_waited = JobSums().plus([(0, counters)], 7)
    counters = LeaseCounters(counts=True)
    counters.receive(8, 0.0)  # what was waited for, under another lease
    assert sum(only_waited.plus([(0, counters)], 7).ranks["0"].histogram) == 1
    counters.wait(0.3)
    sums = JobSums().plus([(0, counters)], 7).plus([(3, counters)], 8)
    assert JobSums().plus([(0, counters), (3, counters)], 8) == sums
    assert jobs_in_index({"j": sums.to_json()}) == {"j": sums}
    assert (sums.batches, sums.ranks["0"].batches, sums.ranks["3"].seconds) == (2, 1, 0.3)
    noted = sums.to_json()
    del (
        noted["ranks"],
        noted["gone_uses"],
        noted["gone_squares"],
    )  # as earlier versions wrote it
    (old,) = jobs_in_index({"j": noted}).values()
    assert old.ranks["0"].histogram == sums.wait_histogram


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_the_effective_sample_size_counts_shards_that_are_gone(
    uses: list[int], data: st.DataObject
) -> None:
    done = {number: count for number, count in enumerate(uses) if count}
    samples = [number % 3 + 1 for number in range(len(uses))]
    exact = sum(u * n for u, n in zip(uses, samples, strict=True)) ** 2 / max(
        1, sum(u * u * n for u, n in zip(uses, samples, strict=True))
    )
    gone = data.draw(st.sets(st.sampled_from(range(len(uses)))))
    now = {number: 1 for number in done if number % 2}
    before = {number: count - now.get(number, 0) for number, count in done.items()}
    jobs = add_gone_shards({}, gone, {"j": before}, {"j": now}, samples.__getitem__)
    left = {n: c for n, c in before.items() if n not in gone}
    left_now = {n: c for n, c in now.items() if n not in gone}
    sums = jobs.get("j", JobSums())
    found = effective_samples(sums, left, left_now, samples.__getitem__)
    assert math.isclose(found, exact)


def test_requests_are_counted_by_what_became_of_them() -> None:
    counts = RequestCounts()
    counts.served_get(0.3, 100)
    counts.failed("get", OSError())
    counts.retried(TimeoutError())
    assert list(counts.counted_pages(iter(()))) == []
    totals = counts.totals()
    assert totals["requests"] == {"get": {"ok": 1, "other": 1}}
    assert totals["read_bytes"] == 100
    buckets = totals["request_seconds"]
    assert isinstance(buckets, dict)
    assert number_in(totals, "retries", "other") == 1


def test_counters_of_a_status_do_not_fall_while_a_service_starts(tmp_path: Path) -> None:
    with Filled(tmp_path / "cache") as filled:
        builder = MetricsBuilder(filled.cache)
        builder.build(Status(drawn=100, moved=MovedStatus(5, 3)), {})
        counts = builder.build(Status(drawn=99), {}).counts
        assert (counts["drawn"], counts["moved_parts"]) == (100, 5)
        counts = builder.build(Status(drawn=7, moved=MovedStatus(2, 0)), {}).counts
        assert (counts["drawn"], counts["moved_parts"]) == (7, 2)  # another index


def test_a_cache_that_is_missing_is_down(tmp_path: Path) -> None:
    looks = {"none": lambda: (read_status(tmp_path / "none"), None)}
    body, _ = exposition(looks, "")
    assert 'growcache_up{cache="none"} 0.0' in body.decode()
