"""Buffers of loaders that ended, for those that begin soon after.

To fill fresh memory takes several times as long as to fill what was in use before, and where
the kernel has to ask its host for each page (a virtual machine that gives free memory back)
thirty times. That is most of what an iterator costs until it is in its stride.
"""

from __future__ import annotations

import threading

from growcache.loading.buffers import Bytes

# Of one name; more is in use only where the user collects batches.
KEPT_BYTES = 150_000_000


class Leftovers:
    """What ended loaders left, by name, for so many seconds; used by any thread.

    Args:
        seconds: after which what nobody has taken goes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.RLock()  # the collector may close these in the middle of a call
        self._bases: dict[str, list[Bytes]] = {}
        self._timer: threading.Timer | None = None
        self._closed = False

    def take(self, name: str) -> list[Bytes]:
        """Return what was left under a name; some of it may still be in use."""
        with self._lock:
            return self._bases.pop(name, [])

    def leave(self, name: str, bases: list[Bytes]) -> None:
        """Leave buffers under a name."""
        with self._lock:
            if self._closed or not bases:
                return
            self._bases[name] = _bounded([*bases, *self._bases.get(name, [])])
            self._stop_timer()
            self._timer = threading.Timer(self._seconds, self._clear)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:  # at the end Python 3.12.0 starts none
                self._bases.clear()

    def close(self) -> None:
        """Let go of everything, now and later."""
        with self._lock:
            self._closed = True
            self._bases.clear()
            self._stop_timer()

    def _clear(self) -> None:
        with self._lock:
            self._bases.clear()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _bounded(bases: list[Bytes]) -> list[Bytes]:
    """Return the first of them, up to a limit."""
    kept, nbytes = [], 0
    for base in bases:
        nbytes += len(base)
        if nbytes <= KEPT_BYTES:
            kept.append(base)
    return kept
