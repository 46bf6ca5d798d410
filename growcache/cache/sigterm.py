"""What is let go of when a process is told to end by SIGTERM.

By default SIGTERM ends a process at once, without a chance to let go of anything: its leases
would be those of a reader that died, and may come back. So it gets a handler, but only where
nobody else has one: a user's own decides, in Python or in C, whenever it was set. Afterwards the
process ends as it would have: by the signal, so that its parent sees no other exit status.

Nobody else is to notice it. Frameworks that end well by a handler of theirs call the one that was
there before, which would end the process; so this one is equal to the default, of which they
ask. And Python calls handlers in the main thread only, once that is back from C, which it never
is where a collective operation hangs. So a thread is told at once, and does it in its place.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")
PATIENCE_SECONDS = 1.0  # for the main thread

_calls: list[Callable[[], None]] = []
_ending = threading.Lock()  # held from the moment that one thread ends the process
_telling = -1  # descriptor by which a thread is told of signals


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
            signal.signal(signal.SIGTERM, _handler)
            _watch()


def _is_caught() -> bool:
    """Whether the process has a handler that Python does not know of."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


class _Handler:
    """Ends the process; to who asks, it is what was there before: the default."""

    def __call__(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if _ending.acquire(blocking=False):  # else the other thread is about to
            _end()

    def __eq__(self, other: object) -> bool:
        return other is self or other is signal.SIG_DFL

    __hash__ = object.__hash__


_handler = _Handler()


def _end() -> None:
    for call in _calls:
        with suppress(Exception):  # it ends now, whatever becomes of that
            call()
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # the default one, from any thread
    os.kill(os.getpid(), signal.SIGTERM)


def _watch() -> None:
    """Have a thread told of signals, unless somebody else wants to be."""
    global _telling
    told, telling = os.pipe()
    os.set_blocking(telling, False)
    before = signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(told)
        os.close(telling)
        return
    _telling = telling
    threading.Thread(
        target=_stand_in, args=(told,), name="growcache-sigterm", daemon=True
    ).start()


def _stand_in(told: int) -> None:
    """End the process where the main thread does not, while the handler is ours."""
    while numbers := os.read(told, 64):
        if signal.SIGTERM not in numbers or not _is_ours():
            continue
        time.sleep(PATIENCE_SECONDS)
        if _is_ours() and _ending.acquire(blocking=False):
            _end()


def _is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) is _handler


def _forget_in_child() -> None:
    """A forked child holds no leases: nothing must come between it and its end."""
    if _is_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _telling != -1 and (found := signal.set_wakeup_fd(-1)) != _telling:
        signal.set_wakeup_fd(found)  # else signals of the child were told to its parent


os.register_at_fork(after_in_child=_forget_in_child)
