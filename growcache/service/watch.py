"""``growcache.watch``: the live picture of a cache beside a training loop, in notebooks too.

In a notebook one output is replaced again and again, so that nothing piles up below the
cell, whatever the training prints. At a terminal it is the view of ``status --watch``.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import threading
import time
from typing import Any, Self

from rich.console import Console

from growcache.cache.status import Status, read_status
from growcache.errors import CacheMissingError
from growcache.service.history import History
from growcache.service.live import LiveView, PlainLines, Reporter
from growcache.service.terminal import redraws
from growcache.service.view import view

SECONDS = 1.0
WIDTH = 100  # of a picture in a notebook
HTML = (
    '<pre style="font-family:Menlo,DejaVu Sans Mono,Consolas,monospace;line-height:1.2">'
    "{code}</pre>"
)


class Watch:
    """A picture that is kept up to date by a thread; see `watch`."""

    def __init__(self, cache: str | os.PathLike[str], seconds: float) -> None:
        self._cache = cache
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="growcache watch")
        self._shown = _reporter()
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

    def _show(self, shown: Reporter) -> None:
        try:
            shown.show(read_status(self._cache))
        except CacheMissingError:  # the service has not made it yet, or it was cleared
            shown.show(Status(path=str(self._cache), state="stopped"))


def watch(cache: str | os.PathLike[str], *, seconds: float = SECONDS) -> Watch:
    """Show a cache, live, while this process goes on with something else.

    Args:
        cache: its folder; it need not exist yet.
        seconds: between two looks at it.

    Returns:
        A `Watch`: a context manager, and with ``stop()``.

    In a notebook, above the training loop::

        with growcache.serve("growcache.yaml") as config, growcache.watch(config.cache.path):
            ...
    """
    return Watch(cache, seconds)


class NotebookView(Reporter):
    """The picture of the newest status in one output of a notebook, replaced in place."""

    def __init__(self) -> None:
        self._history = History()
        self._output: Any = None

    def show(self, status: Status) -> None:
        """Draw the status."""
        display = importlib.import_module("IPython.display").display  # a notebook has it
        self._history.add(time.monotonic(), status)
        data = picture(status, self._history)
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)


def picture(status: Status, history: History | None = None) -> dict[str, str]:
    """Return a status as a notebook takes it: HTML, and text for who cannot show that."""
    console = Console(
        record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False, force_terminal=True
    )
    console.print(view(status, history))
    html = console.export_html(inline_styles=True, code_format=HTML, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}


def _reporter() -> Reporter:
    if Console().is_jupyter:
        return NotebookView()
    return LiveView() if redraws(sys.stdout) else PlainLines()
