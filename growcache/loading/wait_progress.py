"""One line with the progress of a wait for samples, shown by rank 0 on a terminal or in a notebook."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from growcache.cache.status_model import Status
from growcache.humanize import in_bytes, in_time

PROGRESS_VARIABLE = "GROWCACHE_PROGRESS"
BAR_CHARACTERS = 20
LEAST_RATE = 0.001  # samples per second, below which an estimate of the rest is useless
REDRAW_SECONDS = 0.2  # a shorter wait shows nothing
_shown = threading.Lock()  # two loaders may wait together, and a terminal has room for one line


@dataclass(frozen=True, slots=True)
class WaitProgress:
    samples: int  # cached now
    wanted: int  # 0 if unknown
    rate: float  # samples per second
    bytes_per_second: float
    event: str = ""  # what the service waits for, or why none runs

    @classmethod
    def of(cls, status: Status, samples: int, wanted: int) -> WaitProgress:
        running = status.state != "stopped"
        return cls(
            samples,
            wanted,
            status.samples_per_second if running else 0.0,
            status.bytes_per_second if running else 0.0,
            status.waiting_for or "" if running else "a service: growcache run CONFIG",
        )

    @property
    def share(self) -> float:
        return min(1.0, self.samples / self.wanted) if self.wanted else 0.0

    @property
    def words(self) -> str:
        """Return the progress in words.

        >>> WaitProgress(250, 1000, 25.0, 6.2e6).words
        '250 of 1,000 samples · 6.20 MB/s · 30 s to go'
        >>> WaitProgress(0, 1000, 0.0, 0.0, "the store to answer").words
        '0 of 1,000 samples · waiting for the store to answer'
        """
        wanted = f"{self.wanted:,}" if self.wanted else "all"
        parts = [f"{self.samples:,} of {wanted} samples"]
        if self.bytes_per_second:
            parts.append(f"{in_bytes(self.bytes_per_second)}/s")
        if self.rate >= LEAST_RATE and self.wanted > self.samples:
            parts.append(f"{in_time((self.wanted - self.samples) / self.rate)} to go")
        if self.event:
            parts.append(f"waiting for {self.event}")
        return " · ".join(parts)


class Display(Protocol):
    def show(self, progress: WaitProgress) -> None: ...
    def clear(self) -> None: ...


class TerminalLine:
    """The last line of the error stream, which is rewritten in place."""

    def show(self, progress: WaitProgress) -> None:
        filled = round(BAR_CHARACTERS * progress.share)
        bar = "━" * filled + "╌" * (BAR_CHARACTERS - filled)
        line = f"growcache {bar} {progress.words}"
        width = shutil.get_terminal_size().columns - 1
        self._write(line if len(line) <= width else line[: width - 1] + "…")

    def clear(self) -> None:
        self._write("")

    def _write(self, line: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


class NotebookLine:
    """A line below the cell, which is replaced in place."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, progress: WaitProgress) -> None:
        bar = f"<progress max='1' value='{progress.share:.3f}'></progress>"
        self._replace(f"growcache {bar} {escape(progress.words)}", progress.words)

    def clear(self) -> None:
        if self._handle is not None:
            self._replace("", "")

    def _replace(self, html: str, text: str) -> None:
        shown = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


class WaitLine:
    """The line of a wait.

    It is empty without a terminal, or if ``$GROWCACHE_PROGRESS`` is 0.
    """

    def __init__(self, display: Display | None) -> None:
        self._display = display
        self._drawn = False
        self._due = time.monotonic() + REDRAW_SECONDS

    @property
    def is_shown(self) -> bool:
        return self._display is not None

    def update(self, progress: WaitProgress) -> None:
        now = time.monotonic()
        if self._display is not None and now >= self._due:
            self._display.show(progress)
            self._drawn, self._due = True, now + REDRAW_SECONDS

    def clear(self) -> None:
        if self._display is not None and self._drawn:
            self._display.clear()
            self._drawn = False


@contextmanager
def wait_line(rank: int) -> Iterator[WaitLine]:
    display = choose_display() if rank == 0 else None
    if display is None or not _shown.acquire(blocking=False):
        yield WaitLine(None)
        return
    line = WaitLine(display)
    try:
        yield line
    finally:
        line.clear()
        _shown.release()


def choose_display() -> Display | None:
    if os.environ.get(PROGRESS_VARIABLE) == "0":
        return None
    if (display := _notebook_display()) is not None:
        return NotebookLine(display)
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalLine()
    return None


def _notebook_display() -> Callable[..., Any] | None:
    """Return IPython's function, which only the kernel of a notebook has, or None."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if getattr(get_ipython(), "kernel", None) is None:
        return None
    return display
