"""The line of a wait: what it says, and where it is shown."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.status_model import Status
from growcache.loading import wait_progress
from growcache.loading.wait_progress import (
    NotebookLine,
    TerminalLine,
    WaitProgress,
    choose_display,
    wait_line,
)

HALF = WaitProgress(500, 1000, 25.0, 6.2e6)


class Terminal:
    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest puts a stream of its own in place before each test's call."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(wait_progress, "REDRAW_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    return made


def test_the_status_of_the_service_is_said() -> None:
    running = Status(
        state="running", samples_per_second=10.0, waiting_for="the store to answer"
    )
    assert WaitProgress.of(running, 0, 50).words.endswith(
        "5 s to go · waiting for the store to answer"
    )
    stopped = WaitProgress.of(Status(samples_per_second=10.0), 3, 0)
    assert stopped.words == "3 of all samples · waiting for a service: growcache run CONFIG"


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.floats(0, 1e9), st.floats(0, 1e12))
def test_a_share_is_one_and_words_are_one_line(
    samples: int, wanted: int, rate: float, speed: float
) -> None:
    progress = WaitProgress(samples, wanted, rate, speed)
    assert 0 <= progress.share <= 1
    assert "\n" not in progress.words


def test_a_terminal_gets_one_line_that_fits_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    with wait_line(rank=0) as line:
        line.update(HALF)
        with wait_line(rank=0) as other:  # of another loader that waits
            assert not other.is_shown
    drawn, last = terminal.written.split("\r\x1b[K")[1:]
    assert drawn.startswith("growcache ━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌ 500 of 1,000 samples")
    assert len(drawn) <= 59
    assert last == ""


def test_no_line_in_a_pipe_nor_of_other_ranks_nor_when_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = a_terminal(monkeypatch)
    assert isinstance(choose_display(), TerminalLine)
    with wait_line(rank=1) as line:
        line.update(HALF)
    for name, value in (("GROWCACHE_PROGRESS", "0"), ("TERM", "dumb")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert choose_display() is None
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    assert choose_display() is None
    assert terminal.written == ""


def test_a_notebook_gets_one_output_that_is_replaced_and_escaped() -> None:
    shown: list[dict[str, str]] = []
    handle = types.SimpleNamespace(update=lambda data, raw: shown.append(data))

    def display(data: dict[str, str], **_: Any) -> Any:
        shown.append(data)
        return handle

    line = NotebookLine(display)
    line.show(WaitProgress(5, 10, 0.0, 0.0, "<b>"))
    line.clear()
    assert "<progress max='1' value='0.500'>" in shown[0]["text/html"]
    assert "waiting for &lt;b&gt;" in shown[0]["text/html"]
    assert shown[1:] == [{"text/html": "", "text/plain": ""}]
