"""Permits, the queue of groups and the pace: every reason to wait is said, and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.sampling.group_queue import (
    LONGEST_DELAY_SECONDS,
    LONGEST_DISK_SECONDS,
    GroupQueue,
)
from growcache.sampling.rate_limiter import (
    BURST_SECONDS,
    ByteRateLimit,
    LimiterInputs,
    decide,
)

READY = LimiterInputs(group_bytes=10, room_bytes=100)


def test_a_permit_is_given_when_nothing_stands_against_it() -> None:
    assert decide(READY).granted


@pytest.mark.mutant(
    9, "growcache.sampling.rate_limiter:_for_budgets", "not o.index_ok", "False"
)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"retrying": 4, "max_retrying": 4, "last_error": "503"}, "503"),
        ({"parts_known": False, "listing_complete": False}, "listing"),
        ({"parts_known": False}, "groups in flight"),
        ({"drawn_samples": 10, "max_drawn_samples": 10}, "--samples"),
        ({"egress_bytes": 10, "max_egress_bytes": 10}, "max_egress"),
        ({"index_ok": False}, "index"),
        ({"disk_ok": False}, "min_free"),
        ({"room_bytes": 9, "unused": "job a to read"}, "job a"),
        ({"room_bytes": 9, "listing_bytes": 1, "unused": "job a"}, "listing to end"),
        ({"shrinking": True, "room_bytes": 99}, "lowered"),
    ],
)
def test_whoever_waits_names_the_event(change: dict[str, object], word: str) -> None:
    verdict = decide(replace(READY, **change))  # type: ignore[arg-type]
    assert not verdict.granted
    assert word in (verdict.waiting_for or "")


@pytest.mark.mutant(
    9,
    "growcache.sampling.rate_limiter:_for_room",
    "o.evictable_bytes + o.clearing_bytes",
    "o.evictable_bytes",
)
def test_room_may_come_from_shards_that_clear_later() -> None:
    short = replace(READY, room_bytes=2)
    assert not decide(short).granted
    assert decide(replace(short, evictable_bytes=8)).granted
    assert decide(replace(short, evictable_bytes=4, clearing_bytes=4)).granted
    assert not decide(replace(short, evictable_bytes=4, clearing_bytes=3)).granted


def test_full_is_full_where_nothing_may_be_evicted() -> None:
    verdict = decide(replace(READY, room_bytes=2, evictable_bytes=99, evicts=False))
    assert (verdict.granted, verdict.state, verdict.waiting_for) == (False, "full", None)


def test_complete_needs_no_reason() -> None:
    assert decide(replace(READY, complete=True)).state == "complete"


@given(st.lists(st.sampled_from(["take", "done", "fail", "die"]), max_size=60))
def test_no_group_is_lost_or_filled_twice_at_once(steps: list[str]) -> None:
    queue = GroupQueue(3, [0, 2])
    filling: list[int] = []
    done: set[int] = {1}
    now = 0.0
    for step in steps:
        now += LONGEST_DELAY_SECONDS
        if step == "take":
            due = queue.due(now)
            group = queue.next_new if due is None else due
            assert group not in filling
            assert group not in done
            queue.start(group)
            filling.append(group)
        elif filling:
            group = filling.pop(0)
            if step == "done":
                queue.done(group)
                done.add(group)
            elif step == "fail":
                queue.failed(group, now)
            else:
                queue.abandoned(group)
    now += LONGEST_DELAY_SECONDS
    for group in filling:
        queue.done(group)
        done.add(group)
    while (group_due := queue.due(now)) is not None:
        queue.start(group_due)
        queue.done(group_due)
        done.add(group_due)
    assert queue.settled
    assert done == set(range(queue.next_new))


def test_failures_come_back_later_and_later() -> None:
    queue = GroupQueue(0, [])
    queue.start(0)
    queue.failed(0, now=100.0)
    assert (queue.due(100.0), queue.failing) == (None, 1)
    assert queue.due(101.0) == 0
    assert queue.start(0) == 1
    queue.failed(0, now=101.0)
    assert queue.due(101.9) is None
    assert queue.due(102.1) == 0


def test_a_full_disk_is_tried_again_soon_however_often_it_was_full() -> None:
    queue = GroupQueue(0, [])
    for now in range(0, 100, 10):
        queue.start(0)
        queue.failed(0, now=now, disk=True)
        assert queue.due(now + 0.1) is None
        assert queue.due(now + LONGEST_DISK_SECONDS) == 0


def test_a_died_sampler_costs_no_delay() -> None:
    queue = GroupQueue(0, [])
    queue.start(0)
    assert queue.abandoned(0) == 1
    assert (queue.due(0.0), queue.failing) == (0, 0)
    queue.start(0)
    assert queue.abandoned(0, suspicion=4) == 5


def test_pace_works_debts_off() -> None:
    now = [0.0]
    pace = ByteRateLimit(100.0, clock=lambda: now[0])
    assert pace.seconds_left() == 0
    pace.charge(50)
    pace.charge(50)
    assert pace.seconds_left() == pytest.approx(1.0)
    now[0] = 5.0
    assert pace.seconds_left() == 0
    pace.charge(35)  # hardly a burst was saved up
    assert pace.seconds_left() == pytest.approx(0.35 - BURST_SECONDS)


def test_without_a_limit_nobody_waits() -> None:
    pace = ByteRateLimit(None)
    pace.charge(10**12)
    assert pace.seconds_left() == 0
