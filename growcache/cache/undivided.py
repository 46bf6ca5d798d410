"""What no fork may divide.

A fork copies every lock as it is, those of C libraries too, but of the threads only the one that
forks. What another thread held stays shut in the child for good.
"""

from __future__ import annotations

import os
import threading
import time
from threading import get_ident

WAIT_SECONDS = 10.0  # then it is better that a child may hang than that its parent does
PAUSE_SECONDS = 0.0005

# There is no lock here: it would be copied as well, and a finalizer, which runs in any thread at
# any time, could wait for it where its thread keeps others waiting.
_within: dict[int, int] = {}  # how deep a thread is in blocks
_forking: list[int] = []  # threads that wait for nobody any more
_put_off: list[BaseException] = []


class Undivided:
    """A block that forks by other threads wait for, and that waits for those that have begun.

    Blocks exclude only forks, not one another, and may nest. In a child there is no other
    thread in one.
    """

    def __enter__(self) -> None:
        me = get_ident()
        _within[me] = _within.get(me, 0) + 1
        if _forking and _within[me] == 1:  # looked after it was said, as who forks does, too
            _give_way(me)

    def __exit__(self, *_: object) -> None:
        me = get_ident()
        depth = _within[me] - 1
        if depth:
            _within[me] = depth
        else:
            del _within[me]


undivided = Undivided()


class UndividedLock:
    """A re-entrant lock that nobody holds in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        undivided.__enter__()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        undivided.__exit__()


def _give_way(me: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while _others(_forking) and time.monotonic() < deadline:
        del _within[me]
        time.sleep(PAUSE_SECONDS)
        _within[me] = 1


def _others(threads: dict[int, int] | list[int]) -> set[int]:
    return set(threads) - {get_ident()}


def _wait() -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    closed_seconds = PAUSE_SECONDS
    while True:
        _forking.append(get_ident())
        if _is_alone(closed_seconds) or time.monotonic() > deadline:
            return
        # Who is within may wait for a thread that is about to enter.
        _forking.pop()
        _pause(4 * PAUSE_SECONDS)
        closed_seconds *= 2


def _is_alone(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while _others(_within):
        if time.monotonic() > until:
            return False
        _pause(PAUSE_SECONDS)
    return True


def _pause(seconds: float) -> None:
    """Sleep; what a signal's handler raises must not end the wait.

    For Python prints what a hook raises, and forks. Here it comes to that behind the fork.
    """
    try:
        time.sleep(seconds)
    except BaseException as error:  # noqa: BLE001 - see _tell
        _put_off.append(error)


def _tell() -> None:
    if _put_off:
        raise _put_off.pop()


def _begin_in_child() -> None:
    me = get_ident()
    depth = _within.get(me, 0)
    for state in (_within, _forking, _put_off):
        state.clear()
    if depth:
        _within[me] = depth


# `pop` as it is, for no signal's handler can come before it.
os.register_at_fork(before=_wait, after_in_parent=_forking.pop, after_in_child=_begin_in_child)
os.register_at_fork(after_in_parent=_tell)
