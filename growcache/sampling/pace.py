"""Holding a reader back to an allowed rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Pace:
    """Lets work start only while what was read stays under ``bytes_per_second``.

    Args:
        bytes_per_second: the rate; None for no limit.
        clock: seconds, monotonic.

    A debt model: reads are charged once their size is known, and the next one waits until
    the debt is worked off. So no burst is saved up, and large objects need no special case.
    """

    def __init__(
        self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = 0.0

    def charge(self, nbytes: int) -> None:
        """Account for bytes that were read."""
        if self._rate:
            self._free_at = max(self._free_at, self._clock()) + nbytes / self._rate

    def seconds_left(self) -> float:
        """Seconds until the debt is worked off."""
        return max(0.0, self._free_at - self._clock())

    async def wait(self) -> None:
        """Return once the next read may start."""
        while (seconds := self.seconds_left()) > 0:
            await asyncio.sleep(seconds)
