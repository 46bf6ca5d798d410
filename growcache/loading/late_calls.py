"""Calls of the user's function that take too long: they are named, for training waits for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

TIMEOUT_SECONDS = 60.0
MOST_TIMEOUT_SECONDS = 1e7

V = TypeVar("V")


class LateCalls(Generic[V]):
    """What some threads call, looked at again and again; used by one thread.

    A call is told of once it has taken ``timeout_seconds``, and again each time that has doubled.

    Args:
        timeout_seconds: that a call may take.
        tell: called with the call and the seconds that it has taken.

    Attributes:
        pause_seconds: between two looks.
        tell: as given; another process looks, and this one tells.
    """

    def __init__(self, timeout_seconds: float, tell: Callable[[V, float], object]) -> None:
        self.pause_seconds = min(1.0, timeout_seconds / 4)
        self._timeout_seconds = timeout_seconds
        self.tell = tell
        self._seen: dict[int, tuple[V, float, float]] = {}  # call, since when, told of next

    def look(self, calls: Mapping[int, V], now: float) -> None:
        """Look once more.

        Args:
            calls: what each thread calls; another value for each call.
            now: monotonic.
        """
        for thread, call in calls.items():
            known, since, limit = self._seen.get(thread, (None, now, self._timeout_seconds))
            if known != call:
                since, limit = now, self._timeout_seconds
            elif now - since >= limit:
                self.tell(call, now - since)
                limit *= 2
            self._seen[thread] = call, since, limit
