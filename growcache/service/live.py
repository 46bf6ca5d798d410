"""Showing a service while it runs: a live view for people, JSON lines for programs."""

from __future__ import annotations

import logging
import sys
import time
from typing import IO, Self

from rich.console import Console
from rich.live import Live

from growcache.cache.status import Status
from growcache.service.view import History, view

JSON_SECONDS = 1.0


class Reporter:
    """What is told of every status, several times a second; it ends with its block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def show(self, status: Status) -> None:
        """Take notice of the newest status."""
        raise NotImplementedError


class LiveView(Reporter):
    """The picture of the newest status, redrawn in place; warnings scroll by above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._history = History()
        # No refresh thread: the picture changes when a status comes, and only then.
        self._live = Live(console=self._console, auto_refresh=False)
        self._warnings = _ConsoleLog(self._console)

    def __enter__(self) -> Self:
        self._live.start()
        logging.getLogger("growcache").addHandler(self._warnings)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("growcache").removeHandler(self._warnings)
        self._live.stop()

    def show(self, status: Status) -> None:
        """Draw the status."""
        self._history.add(time.monotonic(), status)
        self._live.update(view(status, self._history), refresh=True)


class JsonLines(Reporter):
    """One JSON object per line: at every change of state, and once a second between."""

    def __init__(self, stream: IO[bytes] | None = None, seconds: float = JSON_SECONDS) -> None:
        self._stream = stream or sys.stdout.buffer
        self._seconds = seconds
        self._last: Status | None = None
        self._written: Status | None = None
        self._written_at = 0.0

    def __exit__(self, *exception: object) -> None:
        if self._last is not None and self._last is not self._written:
            self._write(self._last)

    def show(self, status: Status) -> None:
        """Write the status, if it tells something new or a second has passed."""
        self._last = status
        if (
            self._written is None
            or (status.state, status.waiting_for)
            != (self._written.state, self._written.waiting_for)
            or time.monotonic() - self._written_at >= self._seconds
        ):
            self._write(status)

    def _write(self, status: Status) -> None:
        self._stream.write(status.to_json() + b"\n")
        self._stream.flush()
        self._written = status
        self._written_at = time.monotonic()


def reporter(console: Console | None = None) -> Reporter:
    """Return the reporter that suits the standard output."""
    console = console or Console()
    return LiveView(console) if console.is_terminal else JsonLines()


class _ConsoleLog(logging.Handler):
    """Warnings, printed through the console that the live view owns."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), style="yellow", markup=False, highlight=False)
