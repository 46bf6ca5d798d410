"""A picture redrawn in place: what is left of it after Ctrl-C and after a resize.

Where lines break anew is up to the terminal, so a real one (tmux) is asked where there is one.
"""

import io
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from growcache.cli.watch import LiveRegion
from tests.cli.terminals import COMMAND, ROOT, terminal
from tests.filled import Filled

TITLE = "╭─ growcache"


def test_a_transient_picture_leaves_nothing() -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, width=40, height=10)
    with LiveRegion(shown, transient=True) as region:
        region.redraw(Text("one"))
    assert isinstance(shown.file, io.StringIO)
    assert shown.file.getvalue().endswith("\x1b[1A\x1b[2K")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_however_it_ends_the_cursor_is_shown_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Filled(tmp_path / "cache") as made:
        made.add(0)
    with terminal("status", tmp_path / "cache", "--watch") as seen:
        seen.wait_for("readers")
        seen.process.send_signal(number)
        assert seen.end() == 0
        assert "\x1b[?25h" in seen.text[seen.text.rindex("\x1b[?25l") :]


class Tmux:
    """A command in a real terminal."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "tmux"
        (folder / "tmux.conf").write_text("set -g status off\n")
        self("-f", str(folder / "tmux.conf"), "new-session", "-d", "-x", "80", "-y", "24", "sh")

    def __call__(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ENV": ""}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):  # the last two win over the terminal
            environment.pop(name, None)
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=300
        ).stdout

    def type(self, line: str) -> None:
        self("send-keys", "-l", line)
        self("send-keys", "Enter")

    def screen(self) -> str:
        return self("capture-pane", "-p")

    def wait_for(self, found: str, *, times: int = 1, seconds: float = 300) -> str:
        end = time.monotonic() + seconds
        while (screen := self.screen()).count(found) != times:
            assert time.monotonic() < end, f"{found!r} is not there {times} times:\n{screen}"
            time.sleep(0.05)
        return screen


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    started = Tmux(tmp_path)
    yield started
    started("kill-server")


def test_nothing_is_left_over_on_a_real_terminal(tmux: Tmux, tmp_path: Path) -> None:
    with Filled(tmp_path / "cache") as made:
        made.add(0, 1, 2)
    tmux.type(f"clear; {shlex.join(COMMAND)} status {tmp_path / 'cache'} --watch; echo over")
    tmux.wait_for("readers")
    for width in (60, 80):
        tmux("resize-window", "-x", str(width), "-y", "24")
        time.sleep(0.7)  # longer than between two looks at the cache
        assert tmux.wait_for(TITLE).count("coverage") == 1
    tmux("send-keys", "C-c")
    end = tmux.wait_for("╯\nover\n")
    assert end.count(TITLE) == 1
    assert "^C" not in end


def test_a_service_in_the_background_is_not_stopped_by_its_picture(
    tmux: Tmux, tmp_path: Path
) -> None:
    with Filled(tmp_path / "cache") as made:
        made.add(0, 1, 2)
    tmux.type(f"set -m; clear; {shlex.join(COMMAND)} status {tmp_path / 'cache'} --watch &")
    tmux.wait_for(TITLE)
    tmux.type("kill -TERM %1; wait %1; echo code $?")
    tmux.wait_for("code 0")
