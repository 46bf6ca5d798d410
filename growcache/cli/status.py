"""``growcache status``: a cache as it is now, once or repeatedly."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console

from growcache.cache.status import read_status
from growcache.cli.status_text import JsonStatusLines, PlainStatusLines, StatusReporter
from growcache.cli.terminal import can_redraw, signals_as_ctrl_c
from growcache.cli.view import status_view
from growcache.cli.watch import LiveView


def choose_reporter(stream: TextIO | None = None, *, above: bool = False) -> StatusReporter:
    """Return the reporter that suits a stream (the standard output, if none is named).

    Args:
        stream: where.
        above: see `LiveView`; it has no meaning for lines.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return JsonStatusLines(stream.buffer)
    if not can_redraw(stream):
        return PlainStatusLines(stream)
    return LiveView(Console(file=stream), above=above)


REFRESH_SECONDS = 0.5


def show_status(cache: Path, *, json: bool) -> None:
    """Print the status once.

    Raises:
        CacheMissingError: there is no cache.
    """
    found = read_status(cache)
    if json:
        _print_json(found.to_json())
    else:
        Console().print(status_view(found))


def watch_status(cache: Path, *, json: bool, seconds: float | None = None) -> None:
    """Show the status again and again, until Ctrl-C (or for so many seconds)."""
    read_status(cache)  # a missing cache is an error at once, not an empty picture
    end = None if seconds is None else time.monotonic() + seconds
    with (
        suppress(KeyboardInterrupt),
        signals_as_ctrl_c(),
        JsonStatusLines() if json else choose_reporter() as shown,
    ):
        while end is None or time.monotonic() < end:
            shown.show(read_status(cache))
            time.sleep(REFRESH_SECONDS)


def _print_json(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
