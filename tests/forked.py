"""Children of a test by fork."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn


def fork() -> int:
    """Fork; the child never collects garbage.

    Garbage of other tests would be collected in a child without their threads: TensorFlow aborts
    a child that collects an iterator of its datasets.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    child = os.fork()
    if child and was_enabled:
        gc.enable()
    return child


def exits_with(code: Callable[[], int]) -> NoReturn:
    """End a child here, also where it raises: behind this it would go on as another pytest."""
    try:
        os._exit(code())
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        os._exit(1)


def ended(child: int, seconds: float = 300) -> bool:
    """Whether a process ended well in time; one that did not is ended, and says where it was."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGABRT)  # pytest's faulthandler then prints its stacks
    os.waitpid(child, 0)
    return False
