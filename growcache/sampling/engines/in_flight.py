"""Limit the bytes of shards in flight, so that Ray's object store never spills."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class InFlightBytes:
    """Admits groups in order, for one event loop. A group larger than the limit never fits."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def room(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for ``nbytes``, and hold them during the block."""
        if nbytes > self.most:
            raise ValueError(f"{nbytes:,} bytes are more than {self.most:,}")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(nbytes)
            raise
        try:
            yield
        finally:
            self._release(nbytes)

    def _release(self, nbytes: int) -> None:
        self.used -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if not turn.cancelled():
                if self.used + nbytes > self.most:
                    return
                self.used += nbytes
                turn.set_result(None)
            self._waiting.popleft()
