"""Slots for the reads of one store that may be in flight in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol


class ReadSlots:
    """A first-come-first-served semaphore whose size may change in use, for one event loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def resize(self, size: int) -> None:
        """Set the number of slots. Slots in use stay in use."""
        self._size = size
        self._wake()

    async def acquire(self) -> None:
        if self._taken < self._size and not self._waiting:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        self._taken -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._taken < self._size:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *error: object) -> None:
        self.release()


class ReadMeter(Protocol):
    is_limited: bool  # whether a budget is set

    async def book(self, nbytes: int) -> None:
        """Wait until a read may start.

        Raises:
            BudgetSpentError: It will never be allowed to start.
        """

    def give_back(self, nbytes: int) -> None:
        """Return the bytes of an attempt that the store answered with an error."""
