"""The abilities of a stream.

Colours follow the conventions of rich (``NO_COLOR``, ``FORCE_COLOR``, ``TERM``). Redrawing is
decided separately, because a log file with forced colours must still get no cursor movements.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

NO_COLOR = "--no-color"
DUMB_TERMINALS = ("dumb", "unknown")
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def can_redraw(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB_TERMINALS


def fold_to_width(text: str, stream: IO[str]) -> str:
    try:
        width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # not a terminal of the system
        width = 0
    if not width:
        return text
    return "\n".join(_folded(line, width) for line in text.splitlines())


def _folded(line: str, width: int) -> str:
    indent = 2 * (len(line) - len(line.lstrip(" ")))
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and the closing of the terminal end the block as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def spinner(stream: IO[str], text: str) -> Iterator[None]:
    if not can_redraw(stream):
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(file=stream).status(Text(text, no_wrap=True, overflow="ellipsis")):
        yield


@contextmanager
def progress_bar(text: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yield a function that advances a bar on the error stream, or sets its values."""
    if not can_redraw(sys.stderr):  # old versions of rich end a disabled bar with a line break
        yield lambda *_, **__: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)

        def advance(by: int = 0, **values: int) -> None:
            bar.update(task, advance=by or None, **values)  # type: ignore[arg-type]

        yield advance


def print_json(line: bytes, stream: IO[bytes] | None = None) -> None:
    stream = stream or sys.stdout.buffer
    stream.write(line + b"\n")
    stream.flush()


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def apply_no_color(arguments: list[str]) -> list[str]:
    """Return the arguments without ``--no-color``, which children get through the environment."""
    if NO_COLOR not in arguments:
        return arguments
    os.environ["NO_COLOR"] = "1"
    os.environ.pop("FORCE_COLOR", None)
    return [argument for argument in arguments if argument != NO_COLOR]


def print_to_stderr(text: str) -> None:
    sys.stderr.write(fold_to_width(text, sys.stderr) + "\n")
    sys.stderr.flush()
