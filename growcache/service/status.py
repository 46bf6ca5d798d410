"""``growcache status``: a cache as it is now, once or again and again."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from growcache.cache.status import read_status
from growcache.service.live import JsonLines, reporter
from growcache.service.terminal import ended_as_by_ctrl_c
from growcache.service.view import view

WATCH_SECONDS = 0.5


def show_status(cache: Path, *, json: bool) -> None:
    """Print the status once.

    Raises:
        CacheMissingError: there is no cache.
    """
    found = read_status(cache)
    if json:
        _print_json(found.to_json())
    else:
        Console().print(view(found))


def watch_status(cache: Path, *, json: bool, seconds: float | None = None) -> None:
    """Show the status again and again, until Ctrl-C (or for so many seconds)."""
    read_status(cache)  # a missing cache is an error at once, not an empty picture
    end = None if seconds is None else time.monotonic() + seconds
    with (
        suppress(KeyboardInterrupt),
        ended_as_by_ctrl_c(),
        JsonLines() if json else reporter() as shown,
    ):
        while end is None or time.monotonic() < end:
            shown.show(read_status(cache))
            time.sleep(WATCH_SECONDS)


def _print_json(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
