"""Calls that another thread makes ahead."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from growcache.threads import DaemonThread


class Thing:
    """What a call returns."""


@pytest.fixture
def hand() -> Iterator[DaemonThread]:
    hand = DaemonThread("test")
    yield hand
    hand.close()
    assert "growcache-test" not in {thread.name for thread in threading.enumerate()}


def test_calls_are_made_in_order_by_one_thread(hand: DaemonThread) -> None:
    calls = [hand.submit(threading.get_ident) for _ in range(5)]
    assert len({call.result() for call in calls}) == 1
    made: list[int] = []
    for call in [hand.submit(lambda n=n: made.append(n)) for n in range(5)]:  # type: ignore[misc]
        call.result()
    assert made == list(range(5))


def test_nothing_waits_for_the_call_but_who_wants_its_result(hand: DaemonThread) -> None:
    begin, end = threading.Event(), threading.Event()

    def call() -> str:
        begin.set()
        assert end.wait(300)
        return "done"

    ahead = hand.submit(call)
    assert begin.wait(300)
    end.set()
    assert [ahead.result(), ahead.result()] == ["done", "done"]


def test_an_error_is_raised_where_the_result_is_asked_for(hand: DaemonThread) -> None:
    failed = hand.submit(lambda: "".index("x"))
    for _ in range(2):
        with pytest.raises(ValueError, match="not found"):
            failed.result()
    assert hand.submit(lambda: 1).result() == 1


def test_nothing_is_kept_of_a_call_that_is_over(hand: DaemonThread) -> None:
    given = Thing()
    kept = hand.submit(lambda given=given: (given, Thing()))  # type: ignore[misc]
    seen = [weakref.ref(thing) for thing in kept.result()]
    del given, kept
    hand.submit(lambda: None).result()  # the hand is behind the call before
    gc.collect()
    assert [thing() for thing in seen] == [None, None]


def test_a_thread_that_cannot_start_is_an_error_each_time(
    hand: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                hand.submit(int)
    assert hand.submit(int).result() == 0


def test_who_does_not_want_to_wait_makes_the_call(hand: DaemonThread) -> None:
    begin, made = threading.Event(), list[int]()
    busy = hand.submit(lambda: begin.wait(300))
    ahead = hand.submit(lambda: made.append(threading.get_ident()))
    ahead.run()
    assert made == [threading.get_ident()]
    begin.set()
    assert busy.result()
    hand.submit(lambda: None).result()  # the thread has passed it over
    ahead.run()
    ahead.result()
    assert len(made) == 1
