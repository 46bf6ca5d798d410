"""End this process if its loop waits in a collective for a lost rank.

Gloo cannot be interrupted there, and waits for half an hour by default. NCCL's own watchdog
ends the process in the same case.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

STUCK_SECONDS = 8.0  # in the same call
LOOK_SECONDS = 0.5
# Python's innermost modules in a collective, and in a backward pass with one.
WAITING_MODULES = ("torch.distributed", "torch.autograd", "torch.nn.parallel")

_log = logging.getLogger(__name__)


def end_stuck_loop(thread: int, over: Callable[[], bool]) -> None:
    """Start to watch a thread, given by its identity, until ``over`` returns True."""
    threading.Thread(
        target=_watch, args=(thread, over), name="growcache-stuck", daemon=True
    ).start()


def _watch(thread: int, over: Callable[[], bool]) -> None:
    since, place = time.monotonic(), None
    while not over():
        frame = sys._current_frames().get(thread)
        found = None if frame is None else (id(frame), frame.f_lasti)
        if frame is None or not waits_in_torch(frame) or found != place:
            since, place = time.monotonic(), found
        elif time.monotonic() - since > STUCK_SECONDS:
            _log.error(
                "trainer process ends, because its loop waits for the other ranks in %s",
                caller(frame),
            )
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                # A stream is closed or missing.
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(1)
        del frame  # it references the loop's variables
        time.sleep(LOOK_SECONDS)


def waits_in_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(WAITING_MODULES)


def caller(frame: FrameType | None) -> str:
    """Return file and line of the innermost code outside torch."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
        frame = frame.f_back
    if frame is None:
        return "torch"
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
