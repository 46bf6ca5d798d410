"""docs/_static/demo.svg: a recording of `growcache demo` in a terminal, as an animated picture.

tmux is the terminal, and its screen is captured twice a second. Where people asked their system for less motion, the
picture shows the last screen only.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.text import Text

from benchmarks.picture import WIDTH, terminal_svg

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "_static" / "demo.svg"
LINES = 34
CAPTURE_SECONDS, LIMIT_SECONDS = 0.5, 300.0
SCREENS = 24  # of all that were captured
SHOWN_SECONDS, LAST_SHOWN_SECONDS = 0.8, 6.0

Tmux = Callable[..., str]


def main() -> None:
    captured = recorded([sys.executable, "-m", "growcache", "demo"])
    TARGET.write_text(animated(thinned(captured, SCREENS)), encoding="utf-8")
    print(f"wrote {TARGET}: {len(captured)} screens, {TARGET.stat().st_size / 1000:.0f} kB")


def recorded(command: Sequence[str]) -> list[str]:
    """Run a command in a terminal; return its screens, with colours as escape sequences."""
    screens: list[str] = []
    with terminal(command) as tmux:
        end = time.monotonic() + LIMIT_SECONDS
        while tmux("list-panes", "-F", "#{pane_dead}").strip() == "0":
            if time.monotonic() > end:
                raise TimeoutError(f"{shlex.join(command)} ran longer than {LIMIT_SECONDS} s")
            time.sleep(CAPTURE_SECONDS)
            screen = tmux("capture-pane", "-e", "-p")
            if screen.strip() and without_spinner(screen) not in map(
                without_spinner, screens[-1:]
            ):
                screens.append(screen)
    return screens


def without_spinner(screen: str) -> str:
    return re.sub("[\u2800-\u28ff]", "", screen)


@contextmanager
def terminal(command: Sequence[str]) -> Iterator[Tmux]:
    """Start a command in a tmux server of its own; yield a function that sends this server commands."""
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        server = ["tmux", "-f", "/dev/null", "-S", f"{folder}/socket"]

        def tmux(*words: str) -> str:
            done = subprocess.run([*server, *words], check=True, capture_output=True, text=True)
            return done.stdout

        size = ["-x", str(WIDTH), "-y", str(LINES)]
        line = f"cd {shlex.quote(str(ROOT))} && {shlex.join(command)}"
        tmux("new-session", "-d", *size, line, ";", "set", "remain-on-exit", "on")
        try:
            yield tmux
        finally:
            tmux("kill-server")


def thinned(screens: Sequence[str], count: int) -> list[str]:
    """Return at most ``count`` screens, evenly spaced, the first and the last among them.

    >>> thinned(["a", "b", "c", "d", "e"], 3)
    ['a', 'c', 'e']
    """
    step = max(1.0, (len(screens) - 1) / (count - 1))
    places = {round(step * place) for place in range(count)}
    return [screen for place, screen in enumerate(screens) if place in places]


def animated(screens: Sequence[str]) -> str:
    """Return one picture that shows the screens one after the other, over and over."""
    pictures = [
        terminal_svg(
            Text.from_ansi(f"{screen.rstrip()}{padding(screen)}"), "growcache demo", f"s{place}"
        )
        for place, screen in enumerate(screens)
    ]
    last = len(pictures) - 1
    seconds = SHOWN_SECONDS * last + LAST_SHOWN_SECONDS
    rules, shown = [], []
    for place, picture in enumerate(pictures):
        begin = 100 * SHOWN_SECONDS * place / seconds
        end = 100 * SHOWN_SECONDS * (place + 1) / seconds if place < last else 100.0
        rules.append(
            f"@keyframes k{place} {{ 0% {{ visibility: hidden }} {begin:.2f}% {{ visibility: visible }} "
            f"{end:.2f}% {{ visibility: hidden }} }}\n"
            f"#p{place} {{ animation: k{place} {seconds:.1f}s step-end infinite; visibility: hidden }}"
        )
        shown.append(picture.replace("<svg ", f'<svg id="p{place}" ', 1))
    still = f"@media (prefers-reduced-motion: reduce) {{ svg svg {{ animation: none !important }} #p{last} {{ visibility: visible }} }}"
    box = re.search(r'viewBox="[^"]*"', pictures[0])
    assert box is not None
    style = "\n".join([*rules, still])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]}>\n<style>\n{style}\n</style>\n'
    return head + "".join(shown) + "</svg>\n"


def padding(screen: str) -> str:
    """Return the empty lines that make all screens equally high."""
    return "\n" * (LINES - len(screen.rstrip().split("\n")))


if __name__ == "__main__":
    main()
