"""A second request for a read that takes much longer than others of its size.

The first answer wins.

Stores occasionally take seconds for a request that they would answer in milliseconds if asked
again. Earlier reads pay for each hedge. So a store with a problem of its own gets at most a
twentieth more requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from growcache.errors import StoreError
from growcache.store.request_counts import CANCELLED, GET, PROCESS_REQUESTS, Read

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from growcache.store.contract import Entry

EXTRA_SHARE = 0.05  # of all requests
MOST_SAVED = 8.0  # hedges that earlier reads can pay for in advance
LEAST_SECONDS = 0.5  # a healthy store varies by less than this
LOOK_SECONDS = 0.1  # between two searches for slow reads
KNOWN_READS = 32  # of one size, before any counts as slow
RECENT_READS = 128
_UPDATE_READS = 32  # reads for which a percentile stays valid


class ReadTimes:
    """Durations of a store's recent reads by size, because large reads take longer."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._slow: dict[int, float] = {}
        self._recorded = 0

    def record(self, nbytes: int, seconds: float) -> None:
        size = _size_class(nbytes)
        recent = self._recent.get(size)
        if recent is None:
            recent = self._recent[size] = deque(maxlen=RECENT_READS)
        recent.append(seconds)
        self._recorded += 1
        if self._recorded % _UPDATE_READS == 0:
            self._slow[size] = slow_seconds(list(recent))

    def slow_after(self, nbytes: int) -> float:
        """Return the seconds after which a read of this size counts as slow.

        The result is infinite if too few reads are known.
        """
        return self._slow.get(_size_class(nbytes), math.inf)


def _size_class(nbytes: int) -> int:
    return nbytes.bit_length() // 2  # sizes within a factor of four share a class


def slow_seconds(recent: list[float]) -> float:
    """Return the 95th percentile, or three times the median if that is larger.

    >>> slow_seconds([0.2] * 39 + [9.0]), slow_seconds([0.02] * 40), slow_seconds([0.02] * 9)
    (0.6, 0.5, inf)
    """
    if len(recent) < KNOWN_READS:
        return math.inf
    ordered = sorted(recent)
    median, high = ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]
    return max(LEAST_SECONDS, high, round(3 * median, 6))


class _Race:
    """A read and its hedge."""

    __slots__ = ("asked_at", "began", "cancelling", "hedge", "task", "wanted", "won")

    def __init__(self, task: asyncio.Task[object], wanted: tuple[Entry, int, int]) -> None:
        self.task: asyncio.Task[object] | None = task  # None: it waits for the hedge
        self.cancelling = 0  # how often others had cancelled the task when the hedge started
        self.began = self.asked_at = time.monotonic()  # asked_at: time of the last request
        self.wanted = wanted
        self.hedge: asyncio.Task[Buffer] | None = None
        self.won: Buffer | None = None


class Hedging:
    """The reads of one store that are in flight, in one event loop.

    ``hedge`` makes a second request, and ``is_allowed`` tells whether it may.
    """

    def __init__(self, hedge: Read, is_allowed: Callable[[], bool]) -> None:
        self.hedges = 0
        self._make_hedge = hedge
        self._is_allowed = is_allowed
        self._times = ReadTimes()
        self._saved = 0.0
        self._racing: dict[_Race, None] = {}
        self._is_looking = False

    async def race(self, get: Read, entry: Entry, start: int, stop: int) -> Buffer:
        """Return the result of ``get``, or of its hedge if ``get`` is slow and the hedge is faster.

        The slow read ends by a cancellation of the task that waits for it. A separate task for
        each read would cost more than everything else here.
        """
        task = asyncio.current_task()
        assert task is not None
        race = _Race(task, (entry, start, stop))
        self._racing[race] = None
        if not self._is_looking:
            self._look_later()
        try:
            data = await get(entry, start, stop)
            PROCESS_REQUESTS.served_get(time.monotonic() - race.began, stop - start)
        except asyncio.CancelledError:
            PROCESS_REQUESTS.ended(GET, CANCELLED)
            if race.won is None or task.uncancel() > race.cancelling:
                raise  # cancelled from outside
            data = race.won
        except StoreError as error:
            PROCESS_REQUESTS.failed(GET, error)
            race.task = None
            if race.hedge is None:
                raise
            data = await race.hedge
        finally:
            del self._racing[race]
            if race.hedge is not None:
                race.hedge.cancel()
        self._saved = min(MOST_SAVED, self._saved + EXTRA_SHARE)
        self._times.record(stop - start, time.monotonic() - race.began)
        return data

    def _look_later(self) -> None:
        self._is_looking = True
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._is_looking = False
        if not self._racing:
            return
        now = time.monotonic()
        for race in self._racing:
            _, start, stop = race.wanted
            slow = now - race.asked_at > self._times.slow_after(stop - start)
            if slow and race.task is not None and self._saved >= 1 and self._is_allowed():
                self._hedge(race)
        self._look_later()

    def _hedge(self, race: _Race) -> None:
        if race.hedge is not None:  # the hedge is slow, too
            race.hedge.cancel()
        race.asked_at = time.monotonic()
        race.cancelling = race.task.cancelling() if race.task is not None else 0
        self._saved -= 1
        self.hedges += 1
        race.hedge = asyncio.ensure_future(_awaited(self._make_hedge(*race.wanted)))
        race.hedge.add_done_callback(lambda hedge: self._hedge_ended(race, hedge))

    def _hedge_ended(self, race: _Race, hedge: asyncio.Task[Buffer]) -> None:
        if hedge.cancelled():
            return
        hedge.exception()  # otherwise asyncio logs that it was never retrieved
        if race not in self._racing or race.task is None:
            return
        with contextlib.suppress(StoreError):  # the read itself may still succeed
            race.won = hedge.result()
            race.task.cancel()


async def _awaited(answer: Awaitable[Buffer]) -> Buffer:
    return await answer
