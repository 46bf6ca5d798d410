"""Rates of a running service, over the last seconds."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 5.0


class Rate:
    """Amount per second over a sliding window of `WINDOW_SECONDS`.

    >>> rate = Rate()
    >>> rate.note(0.0, 0); rate.note(1.0, 50); rate.note(2.0, 100)
    >>> rate.per_second
    50.0
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def note(self, now: float, total: float) -> None:
        """Note a running total at a monotonic time in seconds."""
        self._points.append((now, total))
        while self._points[0][0] < now - WINDOW_SECONDS:
            self._points.popleft()

    @property
    def per_second(self) -> float:
        """The mean over the window; 0 before there are two points."""
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else 0.0
