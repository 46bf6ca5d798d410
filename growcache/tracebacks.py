"""Errors that growcache raises on purpose end a script without lines of its code.

Their message says what to do, and what called growcache is the user's line: the frames between say
nothing to anybody but growcache's authors. Every other exception, a defect of growcache included, is
shown whole. So is everything where the variable ``GROWCACHE_TRACEBACK`` is set.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

from growcache.errors import GrowcacheError

VARIABLE = "GROWCACHE_TRACEBACK"
OWN = __name__.partition(".")[0]
LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib is imported late, for the sake of time


def install() -> None:
    """Have errors that nobody caught shown so, by whatever showed them before."""
    before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> Any:
        if isinstance(error, GrowcacheError) and not os.environ.get(VARIABLE):
            trace = without_own(trace)
            # What it was raised from is told in its message.
            error.__cause__, error.__suppress_context__ = None, True
            error.__traceback__ = trace
        return before(kind, error, trace)

    sys.excepthook = show


def without_own(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of growcache, and what the library has behind the last.

    Those of the user's functions that growcache called stay.
    """
    kept: list[TracebackType] = []
    while trace is not None:
        if not _is_own(trace):
            kept.append(trace)
        trace = trace.tb_next
    while kept and _is_glue(kept[-1]):
        kept.pop()
    rest: TracebackType | None = None
    for one in reversed(kept):
        rest = TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rest


def _is_own(trace: TracebackType) -> bool:
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == OWN


def _is_glue(trace: TracebackType) -> bool:
    """Whether it is of the standard library, such as what a context manager is made with."""
    name = trace.tb_frame.f_code.co_filename
    return name.startswith(LIBRARY + os.sep) and "site-packages" not in name
