"""A live status picture: at a terminal, and in a notebook with ``growcache.watch``."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
import threading
import time
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.segment import Segment, SegmentLines

from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.cli.status import StatusHistory, StatusReporter, plain_lines
from growcache.cli.terminal import can_redraw
from growcache.cli.view import StatusPicture
from growcache.errors import CacheMissingError

WATCH_SECONDS = 1.0
NOTEBOOK_WIDTH = 100
NOTEBOOK_HTML = (
    '<pre style="font-family:Menlo,DejaVu Sans Mono,Consolas,monospace;line-height:1.2">'
    "{code}</pre>"
)


class LiveRegion:
    """A region of the terminal in which each drawing replaces the last one, until the block ends.

    With ``transient`` nothing stays on the screen. The cursor waits on an empty line below the
    picture, so the terminal's ``^C`` appears there, and the last drawing erases it.
    """

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        self._console = console
        # No refresh thread, because the picture changes only when a status arrives.
        self._live = Live(
            console=console, auto_refresh=False, transient=transient, vertical_overflow="crop"
        )
        self._lines: list[list[Segment]] = []
        self._width = console.width

    @property
    def height(self) -> int:
        return self._console.height - 1

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.update(SegmentLines(self._lines, new_lines=True))  # stop draws them
        self._live.stop()

    def redraw(self, picture: RenderableType) -> None:
        width, self._width = self._width, self._console.width
        if self._width < width:
            self._erase_wrapped()
        self._lines = self._console.render_lines(picture, pad=False)
        self._live.update(SegmentLines([*self._lines, []], new_lines=True), refresh=True)

    def _erase_wrapped(self) -> None:
        """Erase lines that a narrower terminal wrapped.

        The cursor ends where Rich expects it.
        """
        lengths = map(Segment.get_line_length, self._lines)
        if broken := sum(max(1, -(-length // self._width)) for length in lengths):
            self._console.file.write(f"\r\x1b[{broken}A\x1b[J" + "\n" * len(self._lines))


class LiveView(StatusReporter):
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._history = StatusHistory()
        self._region = LiveRegion(self._console)
        self._warnings = _WarningPrinter(self._console)
        self._stderr: list[bytes] = []
        if sys.stderr.isatty():
            self.on_stderr = self._stderr.append

    def __enter__(self) -> Self:
        self._region.__enter__()
        logging.getLogger("growcache").addHandler(self._warnings)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("growcache").removeHandler(self._warnings)
        self._print_stderr()
        self._region.__exit__(*exception)

    def show(self, status: Status) -> None:
        self._print_stderr()  # together, because each print redraws the picture
        self._history.add(time.monotonic(), status)
        self._region.redraw(StatusPicture(status, self._history, self._region.height))

    def _print_stderr(self) -> None:
        if self._stderr:
            text = b"".join(self._stderr).decode(errors="replace").removesuffix("\n")
            self._stderr.clear()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _WarningPrinter(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), style="yellow", markup=False, highlight=False)


class CacheWatch:
    def __init__(self, cache: str | os.PathLike[str], seconds: float) -> None:
        self._cache = cache
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="growcache watch")
        self._reporter = _choose_reporter()
        self._thread.start()

    def stop(self) -> None:
        """Draw a last time and leave the picture on the screen. A second call does nothing."""
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        with self._reporter:
            while not self._stopped.is_set():
                self._show()
                self._stopped.wait(self._seconds)
            self._show()

    def _show(self) -> None:
        try:
            self._reporter.show(read_status(self._cache))
        except CacheMissingError:  # the service has not made it yet, or it was removed
            self._reporter.show(Status(path=str(self._cache), state="stopped"))


def watch(cache: str | os.PathLike[str], *, seconds: float = WATCH_SECONDS) -> CacheWatch:
    """Show the status of a cache, live, while this process does other work.

    Args:
        cache: Path of the cache directory. It need not exist yet.
        seconds: Seconds between two updates.

    Returns:
        A `CacheWatch`, which ends with ``stop()`` or as a context manager.

    Example, in a notebook above the training loop::

        with growcache.serve("growcache.yaml") as config, growcache.watch(config.cache.path):
            ...
    """
    return CacheWatch(cache, seconds)


class NotebookView(StatusReporter):
    def __init__(self) -> None:
        self._history = StatusHistory()
        self._output: Any = None

    def show(self, status: Status) -> None:
        display = importlib.import_module("IPython.display").display  # every notebook has it
        self._history.add(time.monotonic(), status)
        data = notebook_picture(status, self._history)
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)


def notebook_picture(status: Status, history: StatusHistory | None = None) -> dict[str, str]:
    console = Console(
        record=True,
        file=io.StringIO(),
        width=NOTEBOOK_WIDTH,
        force_jupyter=False,
        force_terminal=True,
    )
    console.print(StatusPicture(status, history))
    html = console.export_html(inline_styles=True, code_format=NOTEBOOK_HTML, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}


def _choose_reporter() -> StatusReporter:
    if Console().is_jupyter:
        return NotebookView()
    return LiveView() if can_redraw(sys.stdout) else plain_lines()
