"""A second request for a slow read: the first answer wins, and hedges stay few."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.config_source import SourceConfig
from growcache.errors import StoreError, TransientStoreError
from growcache.store import hedging
from growcache.store.contract import Entry
from growcache.store.hedging import EXTRA_SHARE, KNOWN_READS, MOST_SAVED, Hedging, slow_seconds
from growcache.store.retries import RenewableBackend, RetryPolicy
from growcache.store.store import RemoteStore
from growcache.store.urls import parse_url
from tests.store.test_retries import Fake

if TYPE_CHECKING:
    from typing_extensions import Buffer

ENTRY = Entry("k", 100, "v", None)
Read = Callable[[Entry, int, int], Awaitable["Buffer"]]


async def fast(entry: Entry, start: int, stop: int) -> bytes:
    return b"fast"


class Stuck:
    """A read without an answer, unless told how it ends."""

    def __init__(self) -> None:
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def __call__(self, entry: Entry, start: int, stop: int) -> bytes:
        self.asked.set()
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def taught(hedge: Read, *, allowed: bool = True) -> Hedging:
    found = Hedging(hedge, lambda: allowed)
    for _ in range(KNOWN_READS + 16):
        await found.race(fast, ENTRY, 0, 100)
    return found


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(body(), 300)

    asyncio.run(limited())


def test_the_hedge_of_a_slow_read_wins_and_the_read_is_ended() -> None:
    async def body() -> None:
        slow = Stuck()
        reads = await taught(fast)
        assert await reads.race(slow, ENTRY, 0, 100) == b"fast"
        assert slow.cancelled.is_set()
        assert reads.hedges == 1
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    run(body)


def test_the_read_itself_may_win() -> None:
    async def body() -> None:
        slow, hedge = Stuck(), Stuck()
        reads = await taught(hedge)
        racing = asyncio.ensure_future(reads.race(slow, ENTRY, 0, 100))
        await hedge.asked.wait()
        slow.answer.set_result(b"slow")
        assert await racing == b"slow"
        await hedge.cancelled.wait()

    run(body)


class Backend(Fake):
    """The first request for the key "slow" is never answered."""

    async def get(self, one: Entry, start: int, stop: int) -> Buffer:
        if one.key == "slow" and one.key not in self.asked:
            self.asked.append(one.key)
            await asyncio.Event().wait()
        return await super().get(one, start, stop)


class Meter:
    is_limited = False

    async def book(self, nbytes: int) -> None:
        return

    def give_back(self, nbytes: int) -> None:
        return


def test_a_read_that_was_hedged_is_one_answer_of_the_store() -> None:
    """The limit of reads goes by the share of refusals among the answers."""
    backend, location = Backend({}), parse_url("s3://bucket/*")
    client = RenewableBackend(lambda: backend)
    source = SourceConfig(url=("s3://bucket/*",))
    store = RemoteStore(source, [(location, client)], RetryPolicy(9), 4, meter=Meter())

    async def body() -> None:
        for _ in range(KNOWN_READS + 16):
            await store.read(Entry("k", 100, "v", None))
        assert store.take_answers() == (KNOWN_READS + 16, 0)
        assert await store.read(Entry("slow", 100, "v", None)) == bytes(100)
        assert backend.asked.count("slow") == 2
        assert store.take_answers() == (1, 0)

    run(body)


@pytest.mark.parametrize("failed_first", ["hedge", "read"])
def test_a_failure_of_one_leaves_the_other(failed_first: str) -> None:
    async def body() -> None:
        slow, hedge = Stuck(), Stuck()
        reads = await taught(hedge)
        racing = asyncio.ensure_future(reads.race(slow, ENTRY, 0, 100))
        await hedge.asked.wait()
        fails, answers = (hedge, slow) if failed_first == "hedge" else (slow, hedge)
        fails.answer.set_exception(TransientStoreError("reset"))
        await asyncio.sleep(0.01)
        answers.answer.set_result(b"late")
        assert await racing == b"late"

    run(body)


def test_a_slow_hedge_is_replaced() -> None:
    async def body() -> None:
        slow, hedges = Stuck(), [Stuck(), Stuck()]
        waiting = iter(hedges)
        reads = await taught(lambda entry, start, stop: next(waiting)(entry, start, stop))
        racing = asyncio.ensure_future(reads.race(slow, ENTRY, 0, 100))
        await hedges[1].asked.wait()
        assert hedges[0].cancelled.is_set()
        hedges[1].answer.set_result(b"second")
        assert await racing == b"second"
        assert slow.cancelled.is_set()

    run(body)


def test_two_failures_are_one() -> None:
    async def body() -> None:
        slow, hedge = Stuck(), Stuck()
        reads = await taught(hedge)
        racing = asyncio.ensure_future(reads.race(slow, ENTRY, 0, 100))
        await hedge.asked.wait()
        for one in (hedge, slow):
            one.answer.set_exception(TransientStoreError("reset"))
        with pytest.raises(StoreError):
            await racing

    run(body)


def test_a_cancelled_read_takes_its_hedge_along() -> None:
    async def body() -> None:
        slow, hedge = Stuck(), Stuck()
        reads = await taught(hedge)
        racing = asyncio.ensure_future(reads.race(slow, ENTRY, 0, 100))
        await hedge.asked.wait()
        racing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await racing
        await hedge.cancelled.wait()
        assert slow.cancelled.is_set()

    run(body)


def test_no_hedge_where_it_is_not_allowed_or_larger_reads_are_not_known() -> None:
    async def body() -> None:
        for allowed, stop in ((False, 100), (True, 1 << 20)):
            slow = Stuck()
            reads = await taught(fast, allowed=allowed)
            racing = asyncio.ensure_future(reads.race(slow, ENTRY, 0, stop))
            await asyncio.sleep(hedging.LEAST_SECONDS + 3 * hedging.LOOK_SECONDS)
            slow.answer.set_result(b"slow")
            assert await racing == b"slow"
            assert reads.hedges == 0

    run(body)


def test_hedges_are_a_share_of_the_reads() -> None:
    async def body() -> None:
        reads = await taught(fast)
        slow = [Stuck() for _ in range(50)]
        racing = [asyncio.ensure_future(reads.race(one, ENTRY, 0, 100)) for one in slow]
        await asyncio.sleep(hedging.LEAST_SECONDS + 3 * hedging.LOOK_SECONDS)
        for one in slow:
            if not one.answer.done():
                one.answer.set_result(b"slow")
        await asyncio.gather(*racing)
        assert 0 < reads.hedges <= MOST_SAVED
        assert reads.hedges <= EXTRA_SHARE * (KNOWN_READS + 16 + 50)

    run(body)


@given(st.lists(st.floats(0.001, 5), min_size=KNOWN_READS, max_size=200))
def test_few_reads_of_a_steady_store_are_slow(recent: list[float]) -> None:
    after = slow_seconds(recent)
    assert after >= hedging.LEAST_SECONDS
    assert sum(seconds > after for seconds in recent) <= 0.05 * len(recent) + 1
