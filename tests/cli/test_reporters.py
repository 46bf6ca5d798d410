"""What ``run`` and ``status --watch`` put out, for people and for programs."""

import contextlib
import io
import json
import logging
import os
import pty
import time
from pathlib import Path

import pytest
from rich.console import Console

from growcache.cache.status_model import Status
from growcache.cli.reporter_choice import choose_reporter
from growcache.cli.status import json_lines, plain_lines
from growcache.cli.watch import LiveView


def lines(stream: io.BytesIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_are_rare_unless_something_changes() -> None:
    stream = io.BytesIO()
    with json_lines(stream, seconds=60) as shown:
        shown.show(Status(state="running", samples=1))
        shown.show(Status(state="running", samples=2))
        shown.show(Status(state="waiting", waiting_for="a reader", samples=3))
        shown.show(Status(state="waiting", waiting_for="a reader", samples=4))
        shown.show(Status(state="waiting", waiting_for="free disk", samples=5))
    assert [line["samples"] for line in lines(stream)] == [1, 3, 5]


def test_the_last_status_is_always_written() -> None:
    stream = io.BytesIO()
    with json_lines(stream, seconds=60) as shown:
        shown.show(Status(state="running", samples=1))
        shown.show(Status(state="running", samples=2))
    assert [line["samples"] for line in lines(stream)] == [1, 2]


def test_json_lines_come_again_after_a_while() -> None:
    stream = io.BytesIO()
    with json_lines(stream, seconds=0.01) as shown:
        shown.show(Status(samples=1))
        time.sleep(0.02)
        shown.show(Status(samples=2))
        assert [line["samples"] for line in lines(stream)] == [1, 2]


def test_the_live_view_draws_each_status_and_prints_warnings_above_it() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=40)
    with LiveView(console) as shown:
        shown.show(Status(state="running", samples=11))
        logging.getLogger("growcache.sampling").warning("a [reader] holds all shards")
        shown.show(Status(state="full", samples=22))
    text = stream.getvalue()
    assert text.index("11") < text.index("a [reader] holds all shards") < text.rindex("22")


def test_the_live_view_leaves_no_log_handler_behind() -> None:
    before = list(logging.getLogger("growcache").handlers)
    with LiveView(Console(file=io.StringIO(), force_terminal=True)):
        pass
    assert logging.getLogger("growcache").handlers == before


def test_plain_lines_are_sentences() -> None:
    stream = io.StringIO()
    with plain_lines(stream, seconds=60) as shown:
        shown.show(Status(state="waiting", waiting_for="a reader", samples=3, shards=1))
        shown.show(Status(state="waiting", waiting_for="a reader", samples=4, shards=1))
    first, last = stream.getvalue().splitlines()
    assert first.startswith("waiting: for a reader · 3 samples in 1 shard · ")
    assert "4 samples" in last


def _all_of(main: int) -> bytes:
    """Return what a terminal got, whose other end is closed: a read gives what has come so far."""
    found = b""
    with contextlib.suppress(OSError):  # EIO is the end
        while data := os.read(main, 1 << 16):
            found += data
    return found


@pytest.mark.parametrize(("term", "redraws"), [("xterm", True), ("dumb", False), ("", True)])
def test_a_terminal_gets_what_it_can_show(
    term: str, redraws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, sub = pty.openpty()
    monkeypatch.setenv("TERM", term)
    try:
        with open(sub, "w") as stream, choose_reporter(stream) as shown:  # noqa: PTH123
            shown.show(Status(state="running", samples=1))
        written = _all_of(main).decode()
        assert ("╭─" in written) == redraws
    finally:
        os.close(main)


@pytest.mark.parametrize("forced", ["0", "1"])
def test_a_file_gets_json_lines_whatever_is_said_of_colours(
    forced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", forced)
    with (tmp_path / "log").open("w") as stream, choose_reporter(stream) as shown:
        shown.show(Status(samples=1))
    assert json.loads((tmp_path / "log").read_text())["samples"] == 1
