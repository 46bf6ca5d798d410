"""Bytes of the store: no budget is overdrawn, all of it may be used, and no booking waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import BudgetSpentError
from growcache.sampling.byte_budget import ByteBudget, EgressEstimate, ReadBookings
from growcache.sampling.messages import Message
from growcache.sampling.rate_limiter import BURST_SECONDS, LimiterInputs, decide


class Clock:
    """Time that passes only when told; a timer may be late."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, callback))

    def advance(self, late: float) -> bool:
        if not self.timers:
            return False
        due, callback = self.timers.pop()
        self.now = max(self.now, due + late)
        callback()
        return True


SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@pytest.mark.mutant(
    9, "growcache.sampling.byte_budget:ByteBudget._fits", "self.spent + nbytes", "self.spent"
)
@given(SIZES, st.integers(1, 1000), st.lists(st.booleans(), min_size=60))
def test_what_is_read_is_never_more_than_the_budget_and_less_by_one_read_at_most(
    sizes: list[int], most: int, errors: list[bool]
) -> None:
    budget = ByteBudget(most)
    granted: list[int] = []
    for size, is_error in zip(sizes, errors, strict=False):
        budget.book(None, size, lambda ok, size=size: granted.append(size) if ok else None)  # type: ignore[misc]
        if granted and is_error:  # the store answered with an error
            budget.give_back(granted.pop())
        assert budget.spent == sum(granted) <= most
    if budget.is_spent:
        assert sum(granted) > most - max(sizes)


@given(SIZES, st.integers(10, 500), st.lists(st.floats(0, 0.9 * BURST_SECONDS), min_size=60))
def test_the_rate_is_kept_and_used_even_by_timers_that_are_late(
    sizes: list[int], rate: int, late: list[float]
) -> None:
    clock = Clock()
    budget = ByteBudget(None, rate, clock, clock.call_later)
    times: list[float] = []
    for size in sizes:
        budget.book(None, size, lambda ok: times.append(clock.now))
    while clock.advance(late[len(times) % len(late)]):
        pass
    assert len(times) == len(sizes)
    for n, now in enumerate(times):
        before = sum(sizes[:n])
        # Never sooner than what came before is worked off; later by a late timer at most.
        assert before / rate - BURST_SECONDS - 1e-6 <= now <= before / rate + BURST_SECONDS


def test_a_raised_rate_holds_at_once_for_all_that_wait() -> None:
    clock, times = Clock(), list[float]()
    budget = ByteBudget(None, 1, clock, clock.call_later)
    for _ in range(4):
        budget.book(None, 1000, lambda ok: times.append(clock.now))
    budget.adopt(None, 1000)
    while clock.advance(0):
        pass
    assert len(times) == 4
    assert times[-1] < 3


def test_a_dead_samplers_bookings_are_dropped_and_a_raised_budget_goes_on() -> None:
    clock, said = Clock(), list[tuple[str, bool]]()
    budget = ByteBudget(100, 10, clock, clock.call_later)
    for owner in ("a", "b", "a", "b"):
        budget.book(owner, 40, lambda ok, owner=owner: said.append((owner, ok)))  # type: ignore[misc]
    budget.forget("b")
    while clock.advance(0):
        pass
    assert said == [("a", True), ("a", True)]
    budget.book("a", 40, lambda ok: said.append(("a", ok)))
    while clock.advance(0):
        pass
    assert said[-1] == ("a", False)
    assert (budget.spent, budget.is_spent) == (80, True)
    budget.adopt(120, None)
    assert not budget.is_spent
    budget.book("a", 40, lambda ok: said.append(("a", ok)))
    assert (said[-1], budget.spent, budget.is_spent) == (("a", True), 120, True)


def test_a_cancelled_read_gives_its_booking_back() -> None:
    sent: list[Message] = []

    async def cancel(when_answered: bool) -> None:
        bookings = ReadBookings(sent.append)
        bookings.is_limited = True
        read = asyncio.create_task(bookings.book(7))
        await asyncio.sleep(0)
        if when_answered:
            bookings.answered(may_begin=True)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        if not when_answered:
            bookings.answered(may_begin=True)
        assert not bookings.waiting

    for when_answered in (False, True):
        sent.clear()
        asyncio.run(cancel(when_answered))
        assert [(one["type"], one["bytes"]) for one in sent] == [("book", 7), ("unread", 7)]


def test_a_read_that_does_not_fit_fails_and_without_a_budget_nothing_is_asked() -> None:
    sent: list[Message] = []

    async def refused() -> None:
        bookings = ReadBookings(sent.append)
        await bookings.book(3)
        bookings.give_back(1)
        assert (bookings.take_unbooked(), bookings.take_unbooked(), sent) == (2, 0, [])
        bookings.is_limited = True
        read = asyncio.create_task(bookings.book(7))
        await asyncio.sleep(0)
        bookings.answered(may_begin=False)
        with pytest.raises(BudgetSpentError, match=r"sampling\.max_egress"):
            await read

    asyncio.run(refused())


def test_at_its_end_the_budget_is_left_to_the_groups_in_flight() -> None:
    ready = LimiterInputs(max_egress_bytes=100, egress_bytes=60, group_egress=20)
    assert decide(replace(ready, egress_in_flight=20)).granted
    verdict = decide(replace(ready, egress_in_flight=30))
    assert (verdict.granted, verdict.final) == (False, False)
    assert "groups in flight" in (verdict.waiting_for or "")
    assert decide(replace(ready, group_egress=50)).granted  # alone, it uses up the rest
    assert decide(replace(ready, egress_spent=True)).final


def test_what_visits_read_is_first_guessed_and_then_measured() -> None:
    budget = ByteBudget()
    budget.note_unbooked(500)
    estimate = EgressEstimate(budget)
    estimate.listed_bytes = 10.0
    assert estimate.of_visits(3) == 30
    budget.note_unbooked(80)
    estimate.visits = 4
    assert estimate.of_visits(3) == 60
