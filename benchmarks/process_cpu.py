"""CPU time by kind of process, of processes that other processes start and end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

import psutil

EVERY_SECONDS = 0.1  # a process that ends loses what it used since the last look

Kind = Callable[[Sequence[str]], str | None]


class CpuByKind(threading.Thread):
    """Watches all descendants of this process while a block runs.

    ``kind`` maps a command line to a name; None leaves the process out.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__(daemon=True)
        self._kind = kind
        self._kinds: dict[psutil.Process, str | None] = {}
        self._before: dict[psutil.Process, float] = {}
        self._latest: dict[psutil.Process, float] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._look()
        self._before = dict(self._latest)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        """See `threading.Thread`."""
        while not self._ended.wait(EVERY_SECONDS):
            self._look()
        self._look()

    @property
    def seconds(self) -> Counter[str]:
        """User and system seconds by kind."""
        found: Counter[str] = Counter()
        for process, total in self._latest.items():
            if (name := self._kinds[process]) is not None:
                found[name] += total - self._before.get(process, 0.0)  # type: ignore[assignment]
        return found

    def _look(self) -> None:
        latest = dict(self._latest)  # `seconds` may be asked for meanwhile
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                self._kinds[process] = self._kind(process.cmdline()) or self._kinds.get(process)
                times = process.cpu_times()
                latest[process] = times.user + times.system
        self._latest = latest
