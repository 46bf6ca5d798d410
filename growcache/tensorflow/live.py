"""What threads of TensorFlow may ask Python for, until the interpreter ends."""

from __future__ import annotations

import atexit
import time
from typing import Protocol
from weakref import WeakSet

QUIET_SECONDS = 0.05  # is enough for calls that are under way


class _Closable(Protocol):
    def close(self) -> None:
        """End what waits, and let go of everything."""


_live: WeakSet[_Closable] = WeakSet()


def end_with_the_interpreter(what: _Closable) -> None:
    """Have it closed before the interpreter goes, if it is still there then."""
    _live.add(what)


@atexit.register
def _end_all() -> None:
    """Have TensorFlow's threads call Python no more before the interpreter goes.

    A thread that asks again and again for what comes next would never return from a call
    into an interpreter that has ended, and TensorFlow waits for its threads.
    """
    live = list(_live)
    for what in live:
        what.close()
    if live:
        time.sleep(QUIET_SECONDS)
