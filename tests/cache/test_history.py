"""The history stays small and even for weeks, outlives its generation, and is read whatever a record says."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.cache import Cache
from growcache.cache.generations import begin_generation
from growcache.cache.history import (
    HistoryRecord,
    JobRecord,
    history_columns,
    history_record,
    read_history,
)
from growcache.cache.history_thinning import (
    FINE_SECONDS,
    KEPT_SHARE,
    move_jobs_on,
    records_to_drop,
)
from growcache.cache.metrics_file import JobMetrics, Metrics, RankMetrics
from growcache.cache.status_model import Status
from growcache.config import CacheConfig
from growcache.errors import CacheMissingError
from tests.filled import Filled


@given(st.lists(st.floats(0, 1e9), max_size=300), st.floats(0, 1e9), st.integers(2, 900))
def test_thinning_makes_room_and_keeps_both_ends(
    times: list[float], now: float, keep: int
) -> None:
    dropped = records_to_drop(times, now, keep)
    left = len(times) - len(dropped)
    if len(times) <= keep:
        assert not dropped
    else:
        assert 1 <= left <= max(2, KEPT_SHARE * keep)
        order = sorted(range(len(times)), key=times.__getitem__)
        assert not {order[0], order[-1]} & set(dropped)


@pytest.mark.parametrize("times", [[5e8] * 100, [7.0 + i / 1000 for i in range(100)]])
def test_thinning_ends_where_ages_tell_no_records_apart(times: list[float]) -> None:
    """A loop without an end here would stop the service, for example after a clock was set back."""
    for now in (0.0, 5e8, 1e9):
        assert len(times) - len(records_to_drop(times, now, 10)) in range(2, 10)


@pytest.mark.parametrize(("keep", "days", "share"), [(2500, 8, 0.03), (75, 0.5, 0.7)])
def test_a_history_is_fine_lately_and_coarse_before(
    keep: int, days: float, share: float
) -> None:
    """As a service appends, at its clock's times; ``share`` of an age is the longest gap there."""
    jitter, now, times = random.Random(0), 0.0, list[float]()
    for _ in range(int(days * 24 * 360)):
        now += 10 + jitter.random() / 10
        times.append(now)
        dropped = set(records_to_drop(times, now, keep))
        if dropped:
            times = [at for place, at in enumerate(times) if place not in dropped]
    assert len(times) <= keep
    for at, following in pairwise(times):
        age = now - at
        if age <= FINE_SECONDS and keep > 1000:
            assert following - at < 11  # every record of the last hour
        assert following - at <= max(share * age, FINE_SECONDS / 10)
    assert times[0] < 11


def test_a_lowered_bound_thins_at_once(tmp_path: Path) -> None:
    with Filled(tmp_path / "cache") as filled:
        writer = filled.cache.index_writer
        writer.write(
            lambda: writer.index.insert_history((float(10 * i), {"i": i}) for i in range(800))
        )
        filled.cache.max_bytes = 5_000_000
        writer.append_history({"i": 800})
        kept = [record["i"] for _, record in filled.cache.history()]
    assert len(kept) <= 78
    assert (kept[0], kept[-1]) == (0, 800)


def test_a_new_generation_goes_on_with_the_history(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with Filled(root) as filled:
        filled.cache.index_writer.append_history({"samples": 7})
        config = CacheConfig.model_validate({"path": root, "max_bytes": "100MB", "min_free": 0})
    layout = begin_generation(root, any_owner=False)
    with Cache.open(root / "generation-0", config) as older:
        newest = Cache.open(layout.root, config)
        with newest:
            newest.older.caches = [older]
            newest.inherit_history()
            newest.inherit_history()  # once is enough
            newest.index_writer.append_history({"samples": 1})
            assert [record.samples for record in read_history(root)] == [7, 1]
    last = read_history(root)[-1].at
    assert read_history(root, last) == []
    with pytest.raises(CacheMissingError):
        read_history(tmp_path / "none")


def test_odd_records_are_records_that_say_little(tmp_path: Path) -> None:
    odd = [[], {"samples": "many", "drawn": True, "jobs": [1]}, {"jobs": {"j": 5}, "state": 3}]
    ranks = {"0": "long", "1": 2, "__proto__": None}
    with Filled(tmp_path / "cache") as filled:
        for record in odd:
            filled.cache.index_writer.append_history(record)  # type: ignore[arg-type]
        for waits in (ranks, [1], None):
            filled.cache.index_writer.append_history(
                {"jobs": {"j": {"rank_wait_seconds": waits}}}
            )
    found = read_history(tmp_path / "cache")
    assert found[:3] == [HistoryRecord(record.at) for record in found[:3]]
    assert len(found) == 6
    assert [record.jobs["j"] for record in found[3:]] == [
        JobRecord(rank_wait_seconds={"1": 2}),
        JobRecord(),
        JobRecord(),
    ]


def test_a_record_has_what_a_status_says_and_jobs_that_changed() -> None:
    job = JobMetrics(delivered=5, batches=1)
    counts = {
        "requests": {"get": {"ok": 8, "timeout": 1}},
        "egress_bytes": 10,
        "retries": {"x": 2},
    }
    metrics = Metrics(counts=counts, jobs={"a": job, "b": job})  # type: ignore[arg-type]
    status = Status(
        state="full", waiting_for="é" * 100, samples=9, started_at=1.0, coverage=1 / 3
    )
    record = history_record(status, metrics, {"a": job})
    values = record.to_values()
    assert (values["requests"], values["errors"], values["failures"]) == (9, 1, 2)
    assert len(values["waiting_for"]) == 80
    assert values["coverage"] == 0.3333333
    assert list(values["jobs"]) == ["b"]
    assert "at" not in values
    assert "age_seconds_mean" not in values  # unknown


def test_a_record_has_the_waits_of_ranks_that_waited_longest() -> None:
    ranks = {str(rank): RankMetrics(float(rank % 50)) for rank in range(64)}
    jobs = {name: JobMetrics(ranks=ranks) for name in "abc"}
    record = history_record(Status(), Metrics(jobs=jobs), {})
    waits = record.jobs["a"].rank_wait_seconds
    assert set(waits) == {str(rank) for rank in range(40, 50)}
    assert record.jobs["a"].wait_seconds == sum(rank.wait_seconds for rank in ranks.values())
    assert len(json.dumps(record.to_values())) < 1000
    few = history_record(Status(), Metrics(jobs={"a": jobs["a"]}), {}).jobs["a"]
    assert len(few.rank_wait_seconds) == 16


def test_columns_hold_what_ranks_waited_until_their_job_is_named_again() -> None:
    waits = [{"0": 1.0}, None, {"0": 2.0, "10": 3.0, "9": 4.0}, None]
    records = [
        HistoryRecord(
            at, jobs={} if ranks is None else {"a": JobRecord(at, rank_wait_seconds=ranks)}
        )
        for at, ranks in enumerate(waits)
    ]
    job = history_columns(records)["jobs"]["a"]
    assert job["delivered"] == [0, 0, 2, 2]
    assert list(job["rank_wait_seconds"].items()) == [
        ("0", [1.0, 1.0, 2.0, 2.0]),
        ("9", [None, None, 4.0, 4.0]),
        ("10", [None, None, 3.0, 3.0]),
    ]


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers()), min_size=1, max_size=8),
    st.sets(st.integers(0, 6)),
)
def test_what_a_dropped_record_says_of_a_job_moves_on(
    named: list[dict[str, int]], dropped: set[int]
) -> None:
    """A job that ended is named only once more: its curve must not end before that."""
    dropped -= {len(named) - 1}
    rows = [(float(at), {"at": at, "jobs": jobs}) for at, jobs in enumerate(named)]
    changed = move_jobs_on(rows, dropped)
    assert not changed.keys() & dropped
    before, after = dict[str, int](), dict[str, int]()
    for index, (_, record) in enumerate(rows):
        before |= named[index]
        if index not in dropped:
            after |= changed.get(index, record)["jobs"]
            assert after == before


def test_many_jobs_take_turns() -> None:
    status, last, seen = Status(started_at=1.0), dict[str, JobMetrics](), set[str]()
    for count in range(3):
        jobs = {str(number): JobMetrics(batches=count + 1) for number in range(20)}
        found = history_record(status, Metrics(jobs=jobs), last).jobs
        for name in found:
            last.pop(name, None)
            last[name] = jobs[name]
        seen |= found.keys()
    assert seen == set(jobs)
