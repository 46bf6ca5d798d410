"""Summaries of histories, the words of a report, its pictures and its page."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.history import HistoryRecord, JobRecord, history_columns
from growcache.cache.status_model import JobStatus, Status, WaitsStatus
from growcache.cli.cli import main
from growcache.errors import ConfigError
from growcache.monitor.hole_reasons import HoleGroup
from growcache.monitor.report import (
    MOST_PERIODS,
    Period,
    actual_values,
    limited_by,
    periods,
    steps_between,
    thinned,
    totals,
)
from growcache.monitor.report_facts import ReportFacts, read_plan
from growcache.monitor.report_html import MOST_BYTES, report_page
from growcache.monitor.report_objects import DrawnShard, count_objects, stratum_namer
from growcache.monitor.report_svg import charts_of, draw_svg, nice_ticks
from growcache.monitor.report_text import methods_paragraph, planned_rows
from tests.filled import Filled
from tests.monitor.histories import BEGAN, history_of

HOSTILE = (
    "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
)


def test_a_counter_that_begins_anew_with_a_run_counts_on() -> None:
    first, second = history_of(3), history_of(3)
    later = [replace(one, at=one.at + 30, run=BEGAN + 30) for one in second]
    found = steps_between([*first, *later])
    assert [step.requests for step in found] == [100, 100, 0, 100, 100]
    assert totals([*first, *later]).requests == 400


def test_a_wait_of_several_ranks_is_that_of_one_loop() -> None:
    found = totals(history_of(11, waited=4.0), {"train": 2})
    assert found.waits == {"train": 20.0}
    assert found.wait_share == 0.2


def test_the_time_until_the_next_service_starts_is_without_one() -> None:
    later = [
        replace(one, at=one.at + 7200, run=BEGAN + 7290) for one in history_of(10, start=10)
    ]
    found = steps_between([*history_of(10), *later])
    (gap,) = [step for step in found if step.is_gap]
    assert (gap.start, gap.stop, gap.drawn) == (BEGAN + 90, BEGAN + 7290, 0)
    assert sum(step.drawn for step in found) == 1900
    assert sum(step.delivered for step in found) == 5700
    sums = totals([*history_of(10), *later])
    assert (sums.served_seconds, sums.seconds) == (190.0, 7390.0)


def test_records_of_long_ago_are_far_apart_though_a_service_ran() -> None:
    assert not any(step.is_gap for step in steps_between(history_of(10, 3600.0)))


@given(
    st.lists(st.floats(1.0, 50_000.0), min_size=1, max_size=60),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_periods_share_out_all_that_happened(
    gaps: list[float], drawn: int, delivered: int
) -> None:
    at, records = BEGAN, [HistoryRecord(BEGAN, drawn=0, delivered=0)]
    for i, gap in enumerate(gaps, 1):
        at += gap
        records.append(HistoryRecord(at, drawn=drawn * i, delivered=delivered * i))
    found = periods(records)
    assert 1 <= len(found) <= MOST_PERIODS
    assert sum(one.seconds for one in found) == pytest.approx(at - BEGAN, rel=1e-6)
    assert sum(one.drawn for one in found) == pytest.approx(drawn * len(gaps), rel=1e-6)
    assert all(limited_by(one) for one in found)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"delivered": 100, "drawn": 50}, "training itself"),
        ({"delivered": 900, "drawn": 50}, "new samples: each was delivered 18.0 times"),
        ({"delivered": 900, "drawn": 0}, "none came; the service waited for credentials"),
        ({"delivered": 0, "drawn": 9}, "no training"),
        (
            {"delivered": 100, "drawn": 50, "waits": {"a": 30.0}},
            "loading: the loop waited 50 %",
        ),
        ({"delivered": 100, "idle_seconds": 59.0}, "no service ran"),
    ],
)
def test_what_limited_training(values: dict[str, Any], words: str) -> None:
    reasons = Counter({"credentials": 9}) if values.get("drawn") == 0 else Counter[str]()
    assert words in limited_by(Period(0.0, 60.0, reasons=reasons, **values))


def test_waits_of_one_kind_are_counted_as_one() -> None:
    told = [
        f"readers to release shards: a snapshot is held for {n} s by job a" for n in range(6)
    ]
    records = [
        replace(one, waiting_for=text, drawn=0)
        for one, text in zip(history_of(6), told, strict=True)
    ]
    (found,) = {limited_by(period) for period in periods(records)}
    assert found == (
        "new samples: none came; the service waited for readers to release shards: "
        "a snapshot is held by job a"
    )


@given(st.lists(st.integers(), max_size=50), st.integers(2, 20))
def test_a_thinned_history_keeps_its_ends(values: list[int], most: int) -> None:
    found = thinned(values, most)
    assert len(found) <= max(most, 0) or len(values) <= most
    assert not values or (found[0], found[-1]) == (values[0], values[-1])


def test_what_happened_in_the_horizon_of_a_plan() -> None:
    found = actual_values(history_of(21, waited=1.0), 150.0).values
    assert found["first_batch_seconds"] == 10.0
    assert found["full_seconds"] == 50.0
    assert found["turnover_seconds"] == pytest.approx(50.0)
    assert found["coverage"] == 0.15
    assert (found["reuse"], found["ess_samples"]) == (3.0, 42.0)
    assert found["exposed_wait_share"] == pytest.approx(15 / 140)
    assert (found["requests_per_second"], found["egress_bytes_per_hour"]) == (10.0, 36e6)
    assert actual_values([], 10.0).values == {}
    early = {**FIGURE, "value": 3.0, "low": 1.0, "high": 4.0}
    (row,) = planned_rows(facts_of(plan={"first_batch_seconds": early}))[1]
    assert (row.actual, row.fits) == ("0.0 s to 10.0 s", True)  # between two records


@given(st.lists(st.builds(HistoryRecord, st.floats(0, 1e9)), max_size=4))
def test_records_of_older_versions_lack_everything(records: list[HistoryRecord]) -> None:
    ordered = sorted(records, key=lambda one: one.at)
    facts = ReportFacts(0.0, Status(), ordered, plan={"full_seconds": {"value": None}})
    assert "not known" in report_page(facts)
    assert planned_rows(facts)[1][0].fits is None


def test_objects_strata_and_uses() -> None:
    shards = [
        DrawnShard(Counter({(0, "a/1"): 6, (0, "b/1"): 2}), 2),
        DrawnShard(Counter({(0, "a/1"): 2}), 0),
    ]
    found = count_objects(shards, *stratum_namer({"sampling.strata.by": "(?P<stratum>[ab])/"}))
    assert (found.objects, found.samples, found.strata_are) == (2, 10, "stratum")
    assert [(one.name, one.samples, one.uses) for one in found.strata] == [
        ("a", 8, 1.5), ("b", 2, 2.0),
    ]  # fmt: skip
    assert found.uses == [("0", 2), ("1", 0), ("2", 8)]
    assert found.most_drawn == [("a/1", 8), ("b/1", 2)]


@pytest.mark.parametrize(
    ("parts", "name", "kind"),
    [
        ({}, "a", "folder"),
        ({"sampling.strata.by": "label"}, "a", "stratum"),
        (
            {"sampling.strata.by": "label", "source.labels": {"columns": ["label"]}},
            "a",
            "folder",
        ),
        ({"sampling.strata.by": "(?P<stratum>[vw])"}, "(none)", "stratum"),
        ({"source.0.url": ["s3://p/*"], "source.1.url": ["s3://q/*"]}, "s3://q/*", "source"),
    ],
)
def test_what_a_stratum_is(parts: dict[str, Any], name: str, kind: str) -> None:
    name_of, found = stratum_namer(parts)
    assert (name_of(1, "k/a/1.npy"), found) == (name, kind)


FIGURE = {"value": 3.1, "low": 2.9, "high": 3.3, "basis": "measured"}
PRICE = {"provider": "p", "region": "r", "storage_class": "c", "egress_per_gb": 0.1, "per_1000_get": 0.0}  # fmt: skip
PLAN = {
    "horizon_seconds": 150.0,
    "reuse": FIGURE,
    "coverage": {**FIGURE, "value": 0.5, "low": 0.5, "high": 0.5},
    "cost_usd_per_day": {**FIGURE, "value": 0.0864},
    "price": {**PRICE, "basis": "given"},
    "curve": {"at": [0, 60, 120], "samples": [0, 400, 500], "coverage": [0, 0.1, None]},
}


def facts_of(**changes: Any) -> ReportFacts:
    job = JobStatus("train", 6000, 3.0, 4, 7, WaitsStatus(1, 20.0))
    status = Status(
        path="/data/cache",
        samples=500,
        drawn=2000,
        evicted_samples=1500,
        population_samples=10_000.0,
        coverage=0.2,
        holes=3,
        delivered=6000,
        reuse=3.0,
        max_bytes=500_000,
        objects=12,
        fingerprint="f" * 32,
        jobs=[job],
    )
    parts = {
        "sampling.seed": 7,
        "sampling.order": "permutation",
        "source.url": ["s3://b/*.npy"],
    }
    facts = ReportFacts(BEGAN, status, history_of(21, waited=1.0), parts=parts, plan=PLAN)
    return replace(facts, **changes)


def test_a_replaced_generation_is_no_part_of_the_figures() -> None:
    old = [replace(one, generation=0) for one in history_of(4)]
    new = [
        replace(
            one,
            at=one.at + 100,
            run=BEGAN + 105,
            generation=1,
            requests=300 + (one.requests or 0),
            egress_bytes=300_000 + (one.egress_bytes or 0),
        )
        for one in history_of(3, start=1)
    ]
    assert sum(step.drawn for step in steps_between([*old, *new])) == 300 + 300
    facts = facts_of(records=[*old, *new], metrics=None)
    assert "300 kB were read from the store in 300 requests" in methods_paragraph(facts)
    assert planned_rows(facts)[0].seconds == 25.0


def test_a_plan_is_compared_with_what_happened() -> None:
    actual, rows = planned_rows(facts_of())
    found = {row.name: (row.planned, row.actual, row.fits) for row in rows}
    assert actual.seconds == 150.0
    assert found == {
        "reuse": ("3.10", "3.00", True),
        "coverage": ("50 %", "15 %", False),
        "cost per day": ("$0.09", "$0.09", True),
    }


def test_a_run_that_is_younger_than_its_plan_is_compared_at_its_age() -> None:
    curve = {"at": [0, 300], "coverage": [0.0, 0.3], "reuse": [2.0, None]}
    young = facts_of(
        plan={**PLAN, "horizon_seconds": 3600, "ess_samples": FIGURE, "curve": curve}
    )
    found = {row.name: (row.planned, row.actual, row.fits) for row in planned_rows(young)[1]}
    assert found["coverage"] == ("20 %", "20 %", True)  # after 200 s
    assert "reuse" not in found
    assert "effective sample size" not in found


def test_a_plan_for_another_bound_is_named_as_such() -> None:
    assert "The plan is for" not in report_page(facts_of(plan={**PLAN, "max_bytes": 500_000}))
    page = report_page(facts_of(plan={**PLAN, "max_bytes": 10**9}))
    assert "The plan is for a cache of 1.00 GB, and this one has 500 kB." in page


def test_the_paragraph_for_a_paper_has_what_a_reader_needs() -> None:
    text = methods_paragraph(facts_of(versions={"growcache": "1.2"}))
    for words in (
        "seed 7, fingerprint ffffffff", "12 objects at s3://b/*.npy", "in a random permutation",
        "2,000 samples were drawn (20 % of an estimated 10,000)", "3 visits that could not be read",
        "Job train received 6,000 samples in 5 epochs, 3.0 for each sample",
        "effective sample size of its uses was 42", "growcache 1.2",
    ):  # fmt: skip
        assert words in text


def hostile_facts() -> ReportFacts:
    records = history_of(21, job=HOSTILE)
    records = [replace(one, waiting_for=HOSTILE, state="waiting") for one in records]
    shards = [DrawnShard(Counter({(0, f"{HOSTILE}/{HOSTILE}"): 1}), 1)]
    drawn = count_objects(shards, *stratum_namer({}))
    holes = [HoleGroup(HOSTILE, 3, [{"key": HOSTILE, "part": 0, "shard": 1}])]
    status = replace(facts_of().status, path=HOSTILE, fingerprint=HOSTILE)
    curve = {"at": [0, 60], "samples": [0, 1]}
    plan = {**PLAN, "reuse": {**FIGURE, "basis": HOSTILE}, "curve": curve}
    parts = {"source.url": [HOSTILE], HOSTILE: HOSTILE}
    return facts_of(
        records=records, drawn=drawn, holes=holes, status=status, plan=plan, parts=parts,
        versions={HOSTILE: HOSTILE},
    )  # fmt: skip


def test_hostile_texts_stay_texts() -> None:
    page = report_page(hostile_facts())
    assert "document.title" in page
    assert "<img" not in page
    assert page.count("<script") == 4  # the data and three scripts of ours
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    for chart in charts_of(history_columns(history_of(9, job=HOSTILE)), PLAN):
        assert "<script" not in draw_svg(chart)


def test_any_history_fits() -> None:
    jobs = {f"job-{i}": JobRecord(10**9, 10**6, 12345.678, 99, 3.14159, 1e6) for i in range(12)}
    records = [replace(one, jobs=jobs) for one in history_of(3000)]
    long = "k" * 8000
    holes = [
        HoleGroup(f"{i} {long}", 1, [{"key": long, "part": 0, "shard": 1}]) for i in range(50)
    ]
    page = report_page(facts_of(records=records, holes=holes))
    assert 100_000 < len(page.encode()) <= MOST_BYTES


def test_pictures_are_drawn_of_what_is_known() -> None:
    names = {}
    for chart in charts_of(history_columns(history_of(30)), PLAN):
        names[chart.name] = ElementTree.fromstring(draw_svg(chart))
    assert {"cached", "rates", "wait", "link", "planned_samples", "planned_coverage"} <= set(
        names
    )
    assert "age" not in names  # no record has it
    assert "planned_reuse" not in names


@given(st.floats(0, 1e15))
def test_ticks_reach_the_largest_value(most: float) -> None:
    ticks = nice_ticks(most)
    assert 2 <= len(ticks) <= 8
    assert ticks[-1] >= most * 0.999


def test_the_command_writes_a_report_outside_of_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Filled(tmp_path / "cache") as filled:
        filled.add(0, 1)
    cache, out = tmp_path / "cache", tmp_path / "out"
    out.mkdir()
    before = sorted(path.name for path in cache.rglob("*"))
    (out / "plan.json").write_bytes(orjson.dumps([PLAN]))
    arguments = ["report", str(cache), "-o", str(out / "r.html"), "--svg", str(out / "svg")]
    assert main([*arguments, "--plan", str(out / "plan.json")]) == 0
    assert "wrote" in capsys.readouterr().out
    assert "Planned and actual" in (out / "r.html").read_text()
    assert main(["report", str(cache), "-o", str(cache / "r.html")]) == 2
    assert "is in the cache" in capsys.readouterr().err
    assert sorted(path.name for path in cache.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "7", "{}", "[]", "no", '{"a": 1}'])
def test_a_plan_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match="growcache plan CONFIG --json"):
        read_plan(tmp_path / "plan.json")
