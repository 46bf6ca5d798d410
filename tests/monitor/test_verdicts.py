"""The answers in words: what they say in each state, and that every awaited event has its advice."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.history import HistoryRecord, JobRecord
from growcache.cache.status_model import JobStatus, LeaseStatus, State, Status, WaitsStatus
from growcache.monitor.verdicts import (
    ADVICE,
    RECENT_SECONDS,
    Answers,
    Recently,
    advice_for,
    answer_questions,
    answers_without_cache,
    recent_changes,
)
from growcache.sampling.rate_limiter import LimiterInputs, WaitReason, decide

JOB = JobStatus("resnet", 5000, 1.0, 3, 7, WaitsStatus(4, 12.0), open=True)
LEASE = LeaseStatus("l", "resnet", "here", 7, "train.py", 5.0, 3, open=True)
RUNNING = Status(
    state="running",
    samples=1000,
    drawn=1000,
    bytes=10**9,
    max_bytes=10**10,
    jobs=[JOB],
    leases=[LEASE],
    samples_per_second=10.0,
    updated_at=1000.0,
)
HELD = "readers to release shards: a snapshot is held for 60 s by job resnet"
MINUTES = Recently(seconds=300, samples=600, bytes=6 * 10**8, drawn=600, delivered=1200)


def levels(answers: Answers) -> tuple[str, str, str]:
    return answers.fed.level, answers.growth.level, answers.awaited.level


def test_all_is_well() -> None:
    answers = answer_questions(RUNNING, MINUTES)
    assert answers.fed.answer == "Yes: 4 samples/s; job resnet waited 0 % of the last 5 min."
    assert answers.growth.answer == (
        "Growing: 2 samples/s are drawn; full in about 1 h 15 min."
    )
    assert answers.awaited.answer == "For nothing: samplers are drawing."
    assert levels(answers) == ("ok", "ok", "ok")


@pytest.mark.parametrize(
    ("seconds", "ranks", "level", "said"),
    [
        (3, 1, "ok", "Yes"),
        (12, 1, "warn", "Nearly"),
        (90, 1, "bad", "No"),
        (90, 8, "warn", "Nearly"),
    ],
)
def test_a_job_that_waits(seconds: float, ranks: int, level: str, said: str) -> None:
    leases = [replace(LEASE, pid=rank) for rank in range(ranks)]
    recent = replace(MINUTES, waits={"resnet": seconds})
    fed = answer_questions(replace(RUNNING, leases=leases), recent).fed
    assert (fed.level, fed.answer.partition(":")[0]) == (level, said)
    assert bool(fed.action) == (level != "ok")


@pytest.mark.parametrize(
    ("delivered", "drawn", "complete", "level"),
    [(2400, 600, False, "ok"), (3000, 600, False, "warn"), (3000, 0, False, "warn"), (3000, 0, True, "ok")],
)  # fmt: skip
def test_samples_that_come_again(
    delivered: int, drawn: int, complete: bool, level: str
) -> None:
    recent = replace(MINUTES, deliveries={"a": 9, "resnet": delivered}, drawn=drawn)
    fed = answer_questions(replace(RUNNING, complete=complete), recent).fed
    assert fed.level == level
    assert ("seen before" in fed.answer) == (level == "warn")


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        ({}, "sampling.workers"),
        ({"state": "stopped"}, "growcache run"),
        ({"waiting_reason": "readers", "waiting_for": HELD}, "--sweep"),
        ({"waiting_reason": "store", "waiting_for": "the store to answer (x)"}, "third answer"),
    ],
)
def test_advice_where_samples_come_again(status: dict[str, object], advice: str) -> None:
    recent = replace(MINUTES, deliveries={"resnet": 9000})
    assert advice in answer_questions(replace(RUNNING, **status), recent).fed.action  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "recent", "said", "level"),
    [
        ({"full": True}, {"evicted": 600}, "Turning over: 2 samples/s replace", "ok"),
        ({"full": True}, {"evicted": 600}, "all of it is new every 8 min", "ok"),
        ({}, {"drawn": 0}, "nothing was drawn in the last 5 min", "warn"),
        (
            {"state": "full", "waiting_for": "a reader: no job reads the cache", "waiting_reason": "readers"},
            {"drawn": 0},
            "nothing was drawn in the last 5 min",
            "ok",
        ),
        ({"state": "waiting", "waiting_for": "the store to answer (x)", "waiting_reason": "store", "samples_per_second": 0.0}, {}, "Neither now; 600 samples came", "warn"),
        ({"state": "waiting", "waiting_for": HELD, "waiting_reason": "readers", "samples_per_second": 0.0}, {"evicted": 600}, "Turning over", "ok"),
        ({"state": "full"}, {"drawn": 0}, "nothing is ever evicted", "ok"),
        ({"state": "shrinking", "target_bytes": 10**8}, {}, "Shrinking to 100 MB, from 1.00 GB", "warn"),
        ({"state": "stopped"}, {}, "no service runs. It keeps 1,000 samples", "warn"),
        ({"state": "stopped", "complete": True}, {}, "all samples are cached", "ok"),
        ({"complete": True, "holes": 2}, {}, "everything that can be read is cached", "ok"),
        ({"coverage": 0.9, "population_samples": 2000}, {}, "all of it cached in about 100 s", "ok"),
        ({}, {"seconds": 0.0}, "Growing: 10 samples/s", "ok"),
        ({"drawn": 0}, {"seconds": 0.0}, "nothing has been drawn so far", "ok"),
    ],
)  # fmt: skip
def test_growth(
    status: dict[str, object], recent: dict[str, float], said: str, level: str
) -> None:
    growth = answer_questions(replace(RUNNING, **status), replace(MINUTES, **recent)).growth  # type: ignore[arg-type]
    assert said in growth.answer
    assert growth.level == level


@pytest.mark.parametrize(
    ("status", "said", "level", "action"),
    [
        ({"state": "stopped"}, "while training reads", "bad", "growcache run CONFIG"),
        ({"state": "stopped", "jobs": []}, "none runs.", "warn", "growcache run CONFIG"),
        ({"state": "stopped", "complete": True}, "none is needed", "ok", ""),
        ({"state": "waiting", "waiting_for": "free space on the disk: it is full", "waiting_reason": "disk"}, "For free space", "bad", "cache.min_free"),
        ({"state": "waiting", "waiting_for": HELD, "waiting_reason": "readers"}, "For readers", "ok", ""),
        ({"state": "waiting", "waiting_for": HELD, "waiting_reason": "readers", "leases": [replace(LEASE, age_seconds=3000)]}, "For readers", "warn", "that reader"),
        ({"state": "waiting", "waiting_for": "a reader: no job reads the cache", "waiting_reason": "readers", "jobs": [], "leases": []}, "For a reader", "ok", "min_uses"),
        ({"restart_for": ["sampling.seed"]}, "samplers are drawing", "warn", "sampling.seed"),
    ],
)  # fmt: skip
def test_what_is_awaited(status: dict[str, object], said: str, level: str, action: str) -> None:
    awaited = answer_questions(replace(RUNNING, **status), MINUTES).awaited  # type: ignore[arg-type]
    assert said in awaited.answer
    assert awaited.level == level
    assert action in awaited.action


def test_a_cache_that_is_not_there_yet() -> None:
    answers = answers_without_cache("/data/cache")
    assert levels(answers) == ("warn", "warn", "warn")
    assert "growcache run CONFIG" in answers.awaited.action


EVENTS = [
    {"refused": "credentials (s3://b: expired; renew them)"},
    {"refused": "the store (s3://b: no such bucket)"},
    {"refetches": 1, "refetches_unlisted": True},
    {"refetches": 2},
    {"for_refetch": True, "group_bytes": 1, "holders": "readers to release shards: x"},
    {"retrying": 1, "last_error": "reset"},
    {"parts_known": False, "listing_complete": False, "needs_whole_listing": True},
    {"parts_known": False, "listing_complete": False},
    {"parts_known": False, "set_aside": "2 objects keep failing and are set aside"},
    {"parts_known": False},
    {"max_drawn_samples": 0},
    {"max_set_samples": 0},
    {"max_egress_bytes": 0},
    {"max_egress_bytes": 9, "egress_in_flight": 9.0, "group_egress": 9.0},
    {"disk_ok": False},
    {"index_ok": False},
    {"shrinking": True},
    {"group_bytes": 9, "listing_bytes": 9},
    {"group_bytes": 9, "unused": "a reader: no job reads the cache, and cache.min_uses is 1"},
    {"group_bytes": 9, "unused": "job a, b to read more shards once each (cache.min_uses)"},
]


@pytest.mark.parametrize("changes", EVENTS, ids=lambda changes: ", ".join(changes))
def test_each_event_of_the_rate_limiter_has_a_reason(changes: dict[str, object]) -> None:
    verdict = decide(LimiterInputs(**changes))  # type: ignore[arg-type]
    assert verdict.waiting_for
    assert verdict.reason


def test_each_reason_has_its_advice() -> None:
    reasons = {*get_args(WaitReason), "service"}
    assert {*ADVICE} == reasons - {"readers"}, "what readers need depends on which they are"


@pytest.mark.parametrize(
    ("reason", "changes", "level", "action"),
    [
        ("store", {}, "bad", "reachable"),
        ("bound", {}, "warn", "cache.max_bytes"),
        ("readers", {"leases": [LEASE, replace(LEASE, open=False)]}, "warn", "growcache release"),
        ("readers", {"leases": [replace(LEASE, age_seconds=3000)]}, "warn", "that reader"),
        ("readers", {"leases": [], "jobs": []}, "ok", "min_uses"),
        ("readers", {}, "ok", "end their passes"),
        ("of a later version", {}, "warn", ""),
        (None, {}, "warn", ""),
    ],
)  # fmt: skip
def test_advice(
    reason: str | None, changes: dict[str, object], level: str, action: str
) -> None:
    found = advice_for(replace(RUNNING, waiting_reason=reason, **changes))  # type: ignore[arg-type]
    assert found[0] == level
    assert action in found[1]


def test_changes_are_those_of_this_run_and_of_the_last_minutes() -> None:
    now = 10_000.0
    told = replace(
        RUNNING,
        started_at=now - 200,
        updated_at=now,
        drawn=900,
        jobs=[JOB, replace(JOB, name="b")],
    )
    records = [
        HistoryRecord(now - 400, drawn=100, samples=5),
        HistoryRecord(now - 190, drawn=400, samples=500, evicted_samples=None),
        HistoryRecord(
            now - 90, drawn=700, jobs={"resnet": JobRecord(delivered=4000, wait_seconds=10.0)}
        ),
    ]
    found = recent_changes(records, told)
    assert (found.seconds, found.drawn, found.samples, found.evicted) == (190, 500, 500, 0)
    assert found.waits == {"resnet": 2.0, "b": 0.0}
    assert found.deliveries == {"resnet": 1000, "b": 0}
    assert recent_changes(records[:1], told) == Recently()
    assert recent_changes([], replace(told, updated_at=None)) == Recently()


statuses = st.builds(
    Status,
    state=st.sampled_from(get_args(State)),
    waiting_for=st.none() | st.text(max_size=80),
    samples=st.integers(0, 10**12),
    bytes=st.integers(0, 10**15),
    max_bytes=st.integers(0, 10**15),
    drawn=st.integers(0, 10**12),
    population_samples=st.none() | st.floats(0, 1e12),
    coverage=st.none() | st.floats(0, 1),
    complete=st.booleans(),
    full=st.booleans(),
    jobs=st.lists(st.builds(replace, st.just(JOB), open=st.booleans()), max_size=2),
)
changes = st.builds(
    Recently,
    seconds=st.floats(0, RECENT_SECONDS * 4),
    samples=st.integers(-(10**9), 10**9),
    bytes=st.integers(-(10**12), 10**12),
    drawn=st.integers(0, 10**9),
    evicted=st.integers(0, 10**9),
    delivered=st.integers(0, 10**12),
    deliveries=st.just({"resnet": 10**6}) | st.just({}),
    waits=st.just({"resnet": 3.0}) | st.just({}),
)


@given(statuses, changes)
def test_there_is_always_an_answer(status: Status, recent: Recently) -> None:
    answers = answer_questions(status, recent)
    for answer in asdict(answers).values():
        assert answer["level"] in ("ok", "warn", "bad")
        assert answer["answer"].endswith(".")
    if status.state == "stopped" and not status.complete:
        assert "growcache run" in answers.awaited.action
