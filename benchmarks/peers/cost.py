"""The CPU cost of a process and its descendants, and how free its GIL is."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path


def cpu_seconds() -> float:
    """Return user + system seconds of this process and of all its descendants so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(map(_clock, descendants(os.getpid())))
    return time.process_time() + ended.ru_utime + ended.ru_stime + living


def descendants(pid: int) -> list[int]:
    """Return the processes below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def _clock(pid: int) -> float:
    # The kernel's number of a process's CPU clock (clock_getcpuclockid); in nanoseconds,
    # where /proc counts in hundredths of a second.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class Ticker:
    """A thread that does nothing but hold the GIL whenever it gets it."""

    def __init__(self) -> None:
        self.ticks = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def _run(self) -> None:
        while not self._stop:
            for _ in range(200):
                pass
            self.ticks += 1

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


def ticks_alone(seconds: float = 0.2) -> float:
    """Return the ticks per second while the main thread sleeps."""
    with Ticker() as ticker:
        time.sleep(seconds / 10)
        before, began = ticker.ticks, time.perf_counter()
        time.sleep(seconds)
        return (ticker.ticks - before) / (time.perf_counter() - began)


def spin(seconds: float) -> int:
    """Hold the GIL for this many seconds, as a step of pure Python does; return the work done."""
    done, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        done += 1
    return done
