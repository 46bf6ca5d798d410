"""Choose a reporter for the output stream."""

from __future__ import annotations

import sys
from typing import TextIO

from growcache.cli.status import StatusReporter, json_lines, plain_lines
from growcache.cli.terminal import can_redraw


def choose_reporter(stream: TextIO | None = None) -> StatusReporter:
    """Return a live picture for a terminal, lines for a simple one, JSON lines for a program."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return json_lines(stream.buffer)
    if not can_redraw(stream):
        return plain_lines(stream)
    # They load rich, which readers of JSON lines need not wait for.
    from rich.console import Console

    from growcache.cli.watch import LiveView

    return LiveView(Console(file=stream))
