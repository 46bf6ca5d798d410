"""Whether the process was forked: a child sees whatever shared memory its parent could.

A thread may go on while another one forks, and may be anywhere in what it does. So a fork is
told in two halves, and what is asked in between is answered with yes.
"""

from __future__ import annotations

import os
import threading

_forking: set[int] = set()  # threads
_latest = object()  # another one at the begin and at the end of each fork


def moment() -> object:
    """Return what `since` takes."""
    return _latest


def since(then: object) -> bool:
    """Whether a fork has begun since then, or had not ended.

    Ask it after everything that its answer is to hold for: a fork may begin at any time.
    """
    return bool(_forking) or then is not _latest  # in this order: one may end meanwhile


def _begin() -> None:
    global _latest
    _forking.add(threading.get_ident())
    _latest = object()


def _end() -> None:
    global _latest
    _latest = object()
    _forking.discard(threading.get_ident())


def _begin_anew() -> None:
    _forking.clear()  # its other threads do not go on in a child
    _end()


os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_begin_anew)
