"""What no fork may divide.

A fork copies every lock as it is, those of C libraries too, but of the threads only the one that
forks. What another thread held stays shut in the child for good.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from threading import RLock, get_ident

WAIT_SECONDS = 10.0  # then it is better that a child may hang than that its parent does
PAUSE_SECONDS = 0.002
MOST_SHUT_SECONDS = 0.1

# To be in a block is to hold a lock of one's own, for `with` takes and leaves a lock in C: no
# handler of a signal can come in between, as it can where that is written in Python.
_own: dict[int, RLock] = {}  # of each thread that ever was in a block
_gate = RLock()  # held while one is added
_taken: dict[int, list[RLock]] = {}  # by threads that fork
_put_off: list[BaseException] = []


def undivided() -> RLock:
    """Return what to hold in a block that forks by other threads wait for.

    Blocks exclude only forks, not one another, and may nest. In a child there is no other
    thread in one.
    """
    me = get_ident()
    own = _own.get(me)
    if own is None:
        with _gate:
            own = _own.setdefault(me, RLock())
    return own


def _begin() -> None:
    """Take the locks of all other threads; give up after a time.

    What a signal's handler raises must not end that: Python prints what a hook raises, and
    forks. So it comes to that behind the fork.
    """
    deadline, seconds = time.monotonic() + WAIT_SECONDS, PAUSE_SECONDS
    while time.monotonic() < deadline:
        try:
            if _take_all(seconds):
                return
            # Who is in a block may wait for a thread that is about to enter one.
            _leave_all()
            time.sleep(PAUSE_SECONDS)
            seconds = min(2 * seconds, MOST_SHUT_SECONDS)
        except BaseException as error:  # noqa: BLE001 - see _tell
            _put_off.append(error)
            _leave_all()


def _take_all(seconds: float) -> bool:
    until, me = time.monotonic() + seconds, get_ident()
    if not _take(_gate, until):
        return False
    others = [lock for thread, lock in _own.items() if thread != me]  # all, behind the gate
    return all(_take(lock, until) for lock in others)


def _take(lock: RLock, until: float) -> bool:
    # Noted first: to leave what was not taken does no harm.
    _taken.setdefault(get_ident(), []).append(lock)
    return lock.acquire(timeout=max(0.0, until - time.monotonic()))


def _leave_all() -> None:
    taken = _taken.get(get_ident(), [])
    while taken:
        with suppress(RuntimeError):  # it was not taken, or left before
            taken[-1].release()
        taken.pop()


def _tell() -> None:
    if _put_off:
        raise _put_off.pop()


def _begin_in_child() -> None:
    global _gate
    _gate = RLock()
    for state in (_own, _taken, _put_off):
        state.clear()


os.register_at_fork(before=_begin, after_in_parent=_leave_all, after_in_child=_begin_in_child)
# Once more, for a handler may have come before the first, and then what it raised.
os.register_at_fork(after_in_parent=_leave_all)
os.register_at_fork(after_in_parent=_tell)
