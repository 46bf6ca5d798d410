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
        self._told: dict[int, tuple[float, float]] = {}  # when the call began, told of next

    def look(self, calls: Mapping[int, tuple[V, float]], now: float) -> None:
        """Look once more.

        Args:
            calls: by thread, what it calls, and since when; that tells calls from each other.
            now: monotonic.
        """
        for thread, (call, began) in calls.items():
            since, limit = self._told.get(thread, (began, self._timeout_seconds))
            if since != began:
                limit = self._timeout_seconds
            if now - began >= limit:
                self.tell(call, now - began)
                limit *= 2
            self._told[thread] = began, limit
