"""``growcache status``: a cache as it is now, once or repeatedly. Rich is imported only for pictures."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from growcache.cache.status import read_status
from growcache.cli.status_text import StatusReporter, json_lines, plain_lines
from growcache.cli.terminal import can_redraw, print_json, signals_as_ctrl_c

REFRESH_SECONDS = 0.5


def choose_reporter(stream: TextIO | None = None) -> StatusReporter:
    """Return the reporter that suits a stream (the standard output, if none is named)."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return json_lines(stream.buffer)
    if not can_redraw(stream):
        return plain_lines(stream)
    from rich.console import Console

    from growcache.cli.watch import LiveView

    return LiveView(Console(file=stream))


def show_status(cache: Path, *, json: bool) -> None:
    """Print the status once."""
    found = read_status(cache)
    if json:
        print_json(found.to_json())
        return
    from rich.console import Console

    from growcache.cli.view import StatusPicture

    Console().print(StatusPicture(found))


def watch_status(cache: Path, *, json: bool, seconds: float | None = None) -> None:
    read_status(cache)  # a missing cache is an error at once, not an empty picture
    end = None if seconds is None else time.monotonic() + seconds
    with (
        suppress(KeyboardInterrupt),
        signals_as_ctrl_c(),
        json_lines() if json else choose_reporter() as shown,
    ):
        while end is None or time.monotonic() < end:
            shown.show(read_status(cache))
            time.sleep(REFRESH_SECONDS)
