"""When objects that keep failing are tried again: a function of what happened, and of the time."""

from __future__ import annotations

import pytest

from growcache.cache.deferrals import MOST_MAKEUPS
from growcache.sampling.failed_visits import (
    LONGEST_RETRY_SECONDS,
    MAKEUP_GROWTH,
    MAKEUP_SECONDS,
    FailingObjects,
)
from growcache.store.retries import ExpiringKeys

A, B = (0, "a"), (0, "b")


def test_an_object_is_tried_ever_more_seldom() -> None:
    found = FailingObjects(60)
    found.failed(A, "503", 0.0, again=False)
    found.wait({(1, 0): A, (2, 5): A})
    waits = []
    now = 0.0
    for _ in range(8):
        due = found.failing[A].due
        assert not found.due(due - 0.1, 9)
        assert found.due(due, 9) == [(1, 0), (2, 5)]
        waits.append(due - now)
        now = due
        found.failed(A, "503 again", now, again=True)
    assert waits == [30, 60, 120, 240, 480, 600, 600, 600]
    assert waits[-1] == LONGEST_RETRY_SECONDS
    assert found.failing[A].reason == "503 again"
    assert found.tried(())


def test_that_it_fails_in_more_groups_changes_nothing() -> None:
    found = FailingObjects(60)
    found.failed(A, "503", 0.0, again=False)
    for now in (1.0, 2.0, 40.0):
        found.failed(A, "503", now, again=False)
    found.failed(A, "of the same try", 29.0, again=True)
    assert (found.failing[A].due, found.failing[A].tries) == (30.0, 0)
    assert not found.tried([A])


def test_short_timeouts_are_tried_again_soon() -> None:
    found = FailingObjects(1)
    found.failed(A, "503", 0.0, again=False)
    assert found.failing[A].due == 3.0


def test_all_of_an_object_that_answers_is_due_whatever_others_do() -> None:
    found = FailingObjects(60)
    for name in (A, B):
        found.failed(name, "503", 0.0, again=False)
    found.wait({(1, 0): A, (1, 1): B, (3, 0): A})
    found.answered(A)
    assert found.due(1.0, 9) == [(1, 0), (3, 0)]
    assert found.due(1.0, 1) == [(1, 0)]
    assert found.due(31.0, 9, trying=[B]) == [(1, 0), (3, 0)]


def test_makeup_groups_that_are_not_full_come_seldom() -> None:
    found = FailingObjects(60)
    found.known(A, 5.0)
    found.known(B, 5.0)
    found.wait({(1, 0): A, (1, 1): B})
    found.made_up(100.0)
    assert not found.due(101.0, 3)
    assert not found.due(101.0, 3, idle=True)
    assert found.due(101.0, 2) == [(1, 0), (1, 1)]
    assert found.due(100.0 + MAKEUP_SECONDS, 3) == [(1, 0), (1, 1)]


def test_as_many_makeup_groups_as_a_cache_may_have_last_for_a_year() -> None:
    """Each later shard names all of them; after the last one a failing object would fail its groups."""
    found, now = FailingObjects(60), 0.0
    found.known(A, 0.0)
    found.wait({(1, 0): A})
    for made in range(0, MOST_MAKEUPS, 100):
        found.made_up(now)
        wait = MAKEUP_SECONDS * MAKEUP_GROWTH**made
        assert not found.due(now + 0.99 * wait, 9, made=made)
        assert found.due(now + 1.01 * wait, 9, made=made)
        assert found.due(now + MAKEUP_SECONDS, 9, made=made, idle=True)  # else nothing is drawn
        now += 100 * wait
    assert now > 365 * 86400


def test_parts_of_objects_that_do_not_fail_come_soon() -> None:
    """Their groups outgrew what they may take: a wait for them is a wait for large samples."""
    found = FailingObjects(60)
    found.wait({(1, 0): A, (1, 1): B})
    found.made_up(100.0)
    assert not found.due(101.0, 5)
    assert found.due(101.0, 4) == [(1, 0), (1, 1)]
    assert found.due(101.0, 5, idle=True) == [(1, 0), (1, 1)]


def test_what_an_earlier_run_set_aside_is_due_at_once() -> None:
    found = FailingObjects(60)
    found.known(A, 5.0)
    found.wait({(1, 0): A})
    assert found.due(5.0, 9) == [(1, 0)]
    assert found.next_try([A, B]) == 5.0
    assert found.next_try([B]) == float("inf")


def test_an_object_is_given_up_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("growcache.store.retries.time.monotonic", lambda: now)
    given_up = ExpiringKeys(10)
    given_up.add("a")
    assert given_up.contains("a")
    assert given_up.contains("a", 100.0)
    assert not given_up.contains("a", 100.1)
    assert not given_up.contains("b")
    now = 121.0
    assert not given_up.contains("a")
