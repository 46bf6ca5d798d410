"""What is let go of when a process is told to end by SIGTERM.

By default SIGTERM ends a process at once, without a chance to let go of anything: its leases
would be those of a reader that died, and may come back. So it gets a handler, but only where
nobody else has one: a user's own decides, in Python or in C, whenever it was set. Afterwards the
process ends as it would have: by the signal, so that its parent sees no other exit status.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")

_calls: list[Callable[[], None]] = []


def at_sigterm(call: Callable[[], None]) -> None:
    """Have something done where SIGTERM ends the process: quickly, in any state of the others.

    What was asked for last is done first.
    """
    _calls.insert(0, call)


def release_at_sigterm() -> None:
    """See to it that `at_sigterm` is heeded, if this is the main thread and nobody objects."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not _is_caught():
        with suppress(ValueError):  # of an interpreter inside of another
            signal.signal(signal.SIGTERM, _end)


def _is_caught() -> bool:
    """Whether the process has a handler that Python does not know of."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    for call in _calls:
        with suppress(Exception):  # it ends now, whatever becomes of that
            call()
    os.kill(os.getpid(), number)


def _forget_in_child() -> None:
    """A forked child holds no leases: nothing must come between it and its end."""
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
