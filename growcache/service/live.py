"""Showing a service while it runs: to people, to programs, and on what is between the two."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import IO, Self, TextIO

from rich.console import Console

from growcache.cache.status import Status
from growcache.service.above import ErrorsAbove
from growcache.service.history import History
from growcache.service.redrawn import Redrawn
from growcache.service.terminal import folded, redraws
from growcache.service.view import line, view

JSON_SECONDS = 1.0
PLAIN_SECONDS = 10.0


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
    """The picture of the newest status, redrawn in place; warnings scroll by above it.

    Args:
        console: where.
        above: print above it what this process and its children write to the error stream.
    """

    def __init__(self, console: Console | None = None, *, above: bool = False) -> None:
        console = console or Console()
        self._history = History()
        self._redrawn = Redrawn(console)
        self._warnings = _ConsoleLog(console)
        self._above: AbstractContextManager[object] = nullcontext()
        if above and sys.stderr.isatty():
            self._above = ErrorsAbove(console)
        self._within = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._redrawn)
            stack.enter_context(self._above)
            log = logging.getLogger("growcache")
            log.addHandler(self._warnings)
            stack.callback(log.removeHandler, self._warnings)
            self._within = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._within.close()

    def show(self, status: Status) -> None:
        """Draw the status."""
        self._history.add(time.monotonic(), status)
        self._redrawn.draw(view(status, self._history, self._redrawn.height))


class _Lines(Reporter):
    """A line at every change of state, one every so often between, and the last one."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: Status | None = None
        self._written: Status | None = None
        self._written_at = 0.0

    def __exit__(self, *exception: object) -> None:
        if self._last is not None and self._last is not self._written:
            self._put(self._last)

    def show(self, status: Status) -> None:
        """Write the status, if it tells something new or enough time has passed."""
        self._last = status
        if (
            self._written is None
            or (status.state, status.waiting_for)
            != (self._written.state, self._written.waiting_for)
            or time.monotonic() - self._written_at >= self._seconds
        ):
            self._put(status)

    def _put(self, status: Status) -> None:
        self.write(status)
        self._written = status
        self._written_at = time.monotonic()

    def write(self, status: Status) -> None:
        """Write one line."""
        raise NotImplementedError


class JsonLines(_Lines):
    """One JSON object per line, for programs: at least one a second."""

    def __init__(self, stream: IO[bytes] | None = None, seconds: float = JSON_SECONDS) -> None:
        super().__init__(seconds)
        self._stream = stream or sys.stdout.buffer

    def write(self, status: Status) -> None:
        """Write one line."""
        self._stream.write(status.to_json() + b"\n")
        self._stream.flush()


class PlainLines(_Lines):
    """One sentence per line, for people at a terminal that cannot redraw."""

    def __init__(self, stream: TextIO | None = None, seconds: float = PLAIN_SECONDS) -> None:
        super().__init__(seconds)
        self._stream = stream or sys.stdout

    def write(self, status: Status) -> None:
        """Write one line."""
        self._stream.write(folded(line(status), self._stream) + "\n")
        self._stream.flush()


def reporter(stream: TextIO | None = None, *, above: bool = False) -> Reporter:
    """Return the reporter that suits a stream (the standard output, if none is named).

    Args:
        stream: where.
        above: see `LiveView`; it has no meaning for lines.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return JsonLines(stream.buffer)
    if not redraws(stream):
        return PlainLines(stream)
    return LiveView(Console(file=stream), above=above)


class _ConsoleLog(logging.Handler):
    """Warnings, printed through the console that the live view owns."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), style="yellow", markup=False, highlight=False)
