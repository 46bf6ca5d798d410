"""Children of a test by fork."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn


def exits_with(code: Callable[[], int]) -> NoReturn:
    """End a child here, also where it raises: behind this it would go on as another pytest."""
    try:
        os._exit(code())
    finally:
        os._exit(1)


def ended(child: int, seconds: float = 10.0) -> bool:
    """Whether a process ended well in time; it is killed where it did not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
