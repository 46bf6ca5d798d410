"""The byte budgets of reads: `sampling.max_egress` and `sampling.max_bytes_per_second`.

The supervisor owns both budgets. A read is booked before it starts, so that neither is ever
overdrawn. A sampler asks over its pipe, and its read waits for the answer. Every attempt is
booked. An attempt that the store answers with an error returns its bytes. Without a budget,
samplers do not ask, but report the bytes that they read.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from growcache.errors import BudgetSpentError
from growcache.sampling.messages import Message
from growcache.sampling.rate_limiter import ByteRateLimit

LEAST_TIMER_SECONDS = 0.002  # so that several small reads are answered together


@dataclass(frozen=True, slots=True)
class _Booking:
    owner: object
    nbytes: int
    answer: Callable[[bool], None]


class ByteBudget:
    """The supervisor's side of the budgets.

    Bookings are answered in order, so that none waits forever.
    """

    def __init__(
        self,
        most: int | None = None,
        bytes_per_second: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self.spent = 0
        self._clock = clock
        self._call_later = call_later
        self._waiting: deque[_Booking] = deque()
        self._timer_due = math.inf
        self._least_refused: int | None = None
        self.most, self._bytes_per_second = most, bytes_per_second
        self._pace = ByteRateLimit(bytes_per_second, clock)

    def adopt(self, most: int | None, bytes_per_second: int | None) -> None:
        if bytes_per_second != self._bytes_per_second:
            self._pace = ByteRateLimit(bytes_per_second, self._clock)
        self.most, self._bytes_per_second = most, bytes_per_second
        self._answer()

    @property
    def is_limited(self) -> bool:
        return self.most is not None or self._bytes_per_second is not None

    @property
    def is_spent(self) -> bool:
        """Whether a read was refused that would still not fit."""
        if self.most is None:
            return False
        least = self._least_refused
        return self.spent >= self.most or (least is not None and not self._fits(least))

    def book(self, owner: object, nbytes: int, answer: Callable[[bool], None]) -> None:
        """Call ``answer`` when the read may start, or with False if it never may."""
        self._waiting.append(_Booking(owner, nbytes, answer))
        self._answer()

    def give_back(self, nbytes: int) -> None:
        self.spent -= nbytes
        self._pace.charge(-nbytes)
        self._answer()

    def note_unbooked(self, nbytes: int) -> None:
        self.spent += nbytes

    def forget(self, owner: object) -> None:
        """Drop the bookings of a dead sampler. Answered bookings may have been read."""
        self._waiting = deque(one for one in self._waiting if one.owner is not owner)
        self._answer()

    def _fits(self, nbytes: int) -> bool:
        return self.most is None or self.spent + nbytes <= self.most

    def _answer(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            fits = self._fits(first.nbytes)
            if fits and (seconds := self._pace.seconds_left()) > 0:
                self._answer_after(seconds)
                return
            self._waiting.popleft()
            if fits:
                self.spent += first.nbytes
                self._pace.charge(first.nbytes)
            else:
                self._least_refused = min(first.nbytes, self._least_refused or first.nbytes)
            first.answer(fits)

    def _answer_after(self, seconds: float) -> None:
        seconds = max(seconds, LEAST_TIMER_SECONDS)
        due = self._clock() + seconds
        if due >= self._timer_due:  # not before the next timer, unless the rate was raised
            return
        call_later = self._call_later or asyncio.get_running_loop().call_later
        call_later(seconds, self._timer_ended)
        self._timer_due = due

    def _timer_ended(self) -> None:
        self._timer_due = math.inf
        self._answer()


class EgressEstimate:
    """Estimates the bytes of a visit: the mean of finished visits, or at first the listed size."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._before = budget.spent  # by the search for a schema, and for labels
        self.visits = 0
        self.listed_bytes = 0.0  # of a visit

    def of_visits(self, count: int) -> float:
        if not self.visits:
            return count * self.listed_bytes
        return count * (self._budget.spent - self._before) / self.visits


class ReadBookings:
    """The sampler's side, for one event loop. Answers arrive in the order of the requests."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.is_limited = False
        self._send = send
        self._asked: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self._unbooked = 0

    @property
    def waiting(self) -> bool:
        return bool(self._asked)

    async def book(self, nbytes: int) -> None:
        """Wait until a read may start.

        Raises:
            BudgetSpentError: The read is not allowed in this run.
        """
        if not self.is_limited:
            self._unbooked += nbytes
            return
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked.append((nbytes, answer))
        self._send({"type": "book", "bytes": nbytes})
        try:
            may_begin = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.result():
                self.give_back(nbytes)
            raise
        if not may_begin:
            raise BudgetSpentError("sampling.max_egress is reached")

    def answered(self, may_begin: bool) -> None:
        nbytes, answer = self._asked.popleft()
        if not answer.cancelled():
            answer.set_result(may_begin)
        elif may_begin:
            self.give_back(nbytes)

    def give_back(self, nbytes: int) -> None:
        """Return the bytes of an attempt that the store answered with an error."""
        if self.is_limited:
            self._send({"type": "unread", "bytes": nbytes})
        else:
            self._unbooked -= nbytes

    def take_unbooked(self) -> int:
        found, self._unbooked = self._unbooked, 0
        return found
