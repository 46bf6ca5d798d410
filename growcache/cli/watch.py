"""A picture that is kept up to date: at a terminal, and in a notebook with ``growcache.watch``.

At a terminal the picture is redrawn in place. Warnings, and what samplers write to the error stream,
are printed above it, because a ``print`` of the user's code would otherwise go through the picture. In
a notebook one output is replaced again and again, so that nothing piles up below the cell.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment

from growcache.cache.status import Status, read_status
from growcache.cli.status_text import PlainStatusLines, StatusHistory, StatusReporter
from growcache.cli.terminal import can_redraw
from growcache.cli.view import status_view
from growcache.errors import CacheMissingError

STDERR_DESCRIPTOR = 2
CHUNK_BYTES = 1 << 16
PRINT_INTERVAL_SECONDS = 0.1  # each print draws the picture anew
JOIN_SECONDS = 2.0


class StderrCapture:
    """Within the block, the error stream of this process and of its children is a pipe.

    Args:
        console: that prints what comes through; it must not be the error stream's.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._saved = self._read = -1
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> Self:
        sys.stderr.flush()
        self._saved = os.dup(STDERR_DESCRIPTOR)
        self._read, write = os.pipe()
        os.dup2(write, STDERR_DESCRIPTOR)
        os.close(write)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        sys.stderr.flush()
        os.dup2(self._saved, STDERR_DESCRIPTOR)
        os.close(self._saved)
        self._thread.join(JOIN_SECONDS)  # the pipe ends with the last child that has it

    def _pass_on(self) -> None:
        rest = b""
        while chunk := os.read(self._read, CHUNK_BYTES):
            whole, end, rest = (rest + chunk).rpartition(b"\n")
            if end:
                self._print(whole)
                time.sleep(PRINT_INTERVAL_SECONDS)
        if rest:
            self._print(rest)
        os.close(self._read)

    def _print(self, data: bytes) -> None:
        text = data.decode(errors="replace")
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


SegmentLines = list[list[Segment]]


@dataclass(frozen=True)
class _RenderedLines:
    """Lines that are drawn already."""

    lines: SegmentLines

    def __rich_console__(self, _: Console, __: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()


class LiveRegion:
    """What is drawn takes the place of what was drawn before, until the block ends.

    Args:
        console: where.
        transient: leave nothing behind.
    """

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        self._console = console
        # No refresh thread: the picture changes when a status comes, and only then.
        self._live = Live(console=console, auto_refresh=False, transient=transient)
        self._lines: SegmentLines = []
        self._width = console.width

    @property
    def height(self) -> int:
        """How many lines a picture may have: all but that of the cursor."""
        return max(1, self._console.height - 1)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.update(_RenderedLines(self._lines))  # without the line for the cursor
        self._live.stop()

    def draw(self, picture: RenderableType) -> None:
        """Draw it in the place of the last one."""
        if self._console.width < self._width:
            self._gather(self._console.width)
        self._width = self._console.width
        self._lines = self._console.render_lines(picture, pad=False)
        # The cursor waits on a line of its own: ^C goes there, and goes away with it.
        self._live.update(_RenderedLines([*self._lines, []]), refresh=True)

    def _gather(self, width: int) -> None:
        """Erase the last picture, and leave the cursor where Rich believes it to be."""
        lengths = [Segment.get_line_length(line) for line in self._lines]
        broken = sum(max(1, -(-length // width)) for length in lengths)
        if broken:
            self._console.file.write(f"\r\x1b[{broken}A\x1b[J" + "\n" * len(lengths))


class LiveView(StatusReporter):
    """The picture of the newest status, redrawn in place; warnings scroll by above it.

    Args:
        console: where.
        above: print above it what this process and its children write to the error stream.
    """

    def __init__(self, console: Console | None = None, *, above: bool = False) -> None:
        console = console or Console()
        self._history = StatusHistory()
        self._redrawn = LiveRegion(console)
        self._warnings = _WarningPrinter(console)
        self._above: AbstractContextManager[object] = nullcontext()
        if above and sys.stderr.isatty():
            self._above = StderrCapture(console)
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
        self._redrawn.draw(status_view(status, self._history, self._redrawn.height))


class _WarningPrinter(logging.Handler):
    """Warnings, printed through the console that the live view owns."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), style="yellow", markup=False, highlight=False)


WATCH_SECONDS = 1.0
NOTEBOOK_WIDTH = 100  # of a picture in a notebook
NOTEBOOK_HTML = (
    '<pre style="font-family:Menlo,DejaVu Sans Mono,Consolas,monospace;line-height:1.2">'
    "{code}</pre>"
)


class CacheWatch:
    """A picture that is kept up to date by a thread; see `watch`."""

    def __init__(self, cache: str | os.PathLike[str], seconds: float) -> None:
        self._cache = cache
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="growcache watch")
        self._shown = _choose_live_reporter()
        self._thread.start()

    def stop(self) -> None:
        """Draw it a last time and leave it as it is; twice is harmless."""
        self._over.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        with self._shown as shown:
            while not self._over.is_set():
                self._show(shown)
                self._over.wait(self._seconds)
            self._show(shown)

    def _show(self, shown: StatusReporter) -> None:
        try:
            shown.show(read_status(self._cache))
        except CacheMissingError:  # the service has not made it yet, or it was cleared
            shown.show(Status(path=str(self._cache), state="stopped"))


def watch(cache: str | os.PathLike[str], *, seconds: float = WATCH_SECONDS) -> CacheWatch:
    """Show a cache, live, while this process goes on with something else.

    Args:
        cache: its folder; it need not exist yet.
        seconds: between two looks at it.

    Returns:
        A `CacheWatch`: a context manager, and with ``stop()``.

    In a notebook, above the training loop::

        with growcache.serve("growcache.yaml") as config, growcache.watch(config.cache.path):
            ...
    """
    return CacheWatch(cache, seconds)


class NotebookView(StatusReporter):
    """The picture of the newest status in one output of a notebook, replaced in place."""

    def __init__(self) -> None:
        self._history = StatusHistory()
        self._output: Any = None

    def show(self, status: Status) -> None:
        """Draw the status."""
        display = importlib.import_module("IPython.display").display  # a notebook has it
        self._history.add(time.monotonic(), status)
        data = notebook_picture(status, self._history)
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)


def notebook_picture(status: Status, history: StatusHistory | None = None) -> dict[str, str]:
    """Return a status as a notebook takes it: NOTEBOOK_HTML, and text for who cannot show that."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=NOTEBOOK_WIDTH,
        force_jupyter=False,
        force_terminal=True,
    )
    console.print(status_view(status, history))
    html = console.export_html(inline_styles=True, code_format=NOTEBOOK_HTML, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}


def _choose_live_reporter() -> StatusReporter:
    if Console().is_jupyter:
        return NotebookView()
    return LiveView() if can_redraw(sys.stdout) else PlainStatusLines()
