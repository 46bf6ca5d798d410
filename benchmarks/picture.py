"""docs/reference/run.svg: what `growcache run` shows, of a real run that lasts half a minute.

The demo's store, service and cache, read at a trainer's pace; the picture is taken as the cache
turns over. Figures differ a little from run to run, as they do on any machine.
"""

from __future__ import annotations

import io
import re
import tempfile
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.cli.demo import BATCH_SIZE, RECORDINGS, SAMPLES_PER_SECOND, demo_config
from growcache.cli.demo_data import write_recordings
from growcache.cli.status import StatusHistory
from growcache.cli.view import StatusPicture
from growcache.numpy import EpochLoader
from growcache.sampling.serve import serve

TARGET = Path(__file__).parent.parent / "docs" / "reference/run.svg"
SECONDS = 24.0
WIDTH = 86
CELL = 12.2  # of the SVG that Rich makes
# Legible on a white page and on a dark one.
THEME = TerminalTheme(
    (250, 250, 250),
    (36, 41, 46),
    [
        (36, 41, 46),
        (203, 36, 49),
        (34, 134, 58),
        (176, 136, 0),
        (3, 102, 214),
        (111, 66, 193),
        (27, 124, 131),
        (106, 115, 125),
    ],
    [(149, 157, 165)] * 8,
)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        folder = Path(name)
        write_recordings(folder / "remote", RECORDINGS)
        with serve(demo_config(folder)):
            status, history = watched(folder / "cache")
    TARGET.write_text(as_svg(status, history), encoding="utf-8")
    print(f"wrote {TARGET}")


def watched(cache: Path) -> tuple[Status, StatusHistory]:
    """Train on the cache for a while; return what it is like then, and how it went."""
    history, began = StatusHistory(), time.monotonic()
    with EpochLoader(cache, batch_size=BATCH_SIZE, min_samples=256, job="train") as loader:
        while True:
            for batch in loader:
                time.sleep(len(batch["y"]) / SAMPLES_PER_SECOND)
                now, status = time.monotonic(), read_status(cache)
                history.add(now, status)
                if now - began > SECONDS and status.retired_bytes and not status.waiting_for:
                    return status, history


def as_svg(status: Status, history: StatusHistory) -> str:
    return terminal_svg(StatusPicture(status, history), "growcache run growcache.yaml", "run")


def terminal_svg(shown: RenderableType, title: str, unique_id: str) -> str:
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True)
    console.print(shown)
    # Without the fonts that Rich would have a browser load from elsewhere.
    head, _, rest = CONSOLE_SVG_FORMAT.partition("    @font-face")
    style = rest[rest.index("    .{unique_id}-matrix") :].replace(
        "Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono"
    )
    svg = console.export_svg(
        title=title, theme=THEME, code_format=head + style, unique_id=unique_id
    )
    svg = re.sub(r'x="([\d.]+)"([^>]*) textLength="([\d.]+)"([^>]*)>((?:&#160;)+)', _moved, svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _moved(found: re.Match[str]) -> str:
    """Return where a text begins behind its spaces, which not every program draws."""
    x, more, length, rest, spaces = found.groups()
    by = CELL * spaces.count(";")
    return f'x="{float(x) + by:.1f}"{more} textLength="{float(length) - by:.1f}"{rest}>'


if __name__ == "__main__":
    main()
