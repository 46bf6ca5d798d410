"""``growcache demo``: a remote store, a bounded cache that grows, and a model that learns.

Everything is real but the size. A service in a child process samples windows of recordings over a
link of limited speed, and PyTorch trains on what is cached by then.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from growcache.cache.status import Status, read_status
from growcache.cli.demo_data import WINDOW, WINDOWS_PER_RECORDING, write_recordings
from growcache.cli.humanize import in_bytes, in_count, in_percent
from growcache.cli.status_text import StatusHistory
from growcache.cli.terminal import can_redraw, spinner
from growcache.cli.view import StatusPicture
from growcache.cli.watch import LiveRegion
from growcache.errors import CacheMissingError
from growcache.sampling.serve import serve

if TYPE_CHECKING:
    from growcache.cli.demo_model import Training
    from growcache.loading.report import Report
    from growcache.torch import EpochLoader


RECORDINGS = 80  # of each of the three classes
MAX_BYTES = 10_000_000
LINK_BYTES_PER_SECOND = 1_200_000
SHARD_SAMPLES = 16  # small, so that the cache grows in small steps
BATCH_SIZE = 32
MIN_SAMPLES = 256
# The pace of a model that is larger than this one, so that the cache grows and turns over
# within a few epochs on every machine.
SAMPLES_PER_SECOND = 550
LAST_EPOCH_STARTS_SECONDS = 40.0
REFRESH_SECONDS = 0.2
TABLE_LINES = 3  # its head, and what goes on below it
# Columns of the table of epochs, with the least width of a terminal that has them.
COLUMNS = {
    "epoch": 0,
    "cached": 0,
    "new": 61,
    "drawn": 79,
    "evicted": 79,
    "coverage": 0,
    "loss": 0,
    "accuracy": 61,
    "held-out": 0,
}
MIN_SHOWN_EPOCHS = 3  # that are shown, at the cost of rows of the cache's picture
NO_TORCH = (
    "PyTorch is not installed, so the cache grows but nothing is trained; "
    "for the whole demo: pip install 'growcache[torch]'"
)


@dataclass(frozen=True)
class EpochRow:
    """A row of the table at the end."""

    number: int
    cached: int
    new: int
    drawn: int
    evicted: int
    coverage: float | None
    loss: float
    accuracy: float
    held_out: float


def run_demo(console: Console, *, epochs: int, keep: Path | None = None) -> list[EpochRow]:
    """Run the demo; return its epochs (none where PyTorch is missing)."""
    trains = importlib.util.find_spec("torch") is not None
    with ExitStack() as stack:
        folder = keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="growcache-demo-"))
        )
        _introduce(console, folder, trains=trains)
        with spinner(console.file, "making the recordings, loading PyTorch …"):
            write_recordings(folder / "remote", RECORDINGS)
            training = _new_training() if trains else None
        screen = stack.enter_context(_open_screen(console, folder / "cache"))
        stack.enter_context(serve(demo_config(folder, min_uses=int(trains))))
        if training is None:
            rows = _watch_untrained(screen)
        else:
            rows = _train(screen, folder / "cache", training, epochs)
    _conclude(console, screen, rows, folder if keep else None)
    return rows


def demo_config(folder: Path, *, min_uses: int = 1) -> dict[str, Any]:
    """Return the demo's configuration, as a config file would have it."""
    return {
        "source": {
            "url": str(folder / "remote" / "*.npy"),
            "format": "npy",
            "options": {"window": WINDOW, "stride": WINDOW},
        },
        "sampling": {
            "transform": "growcache.cli.demo_data:label",
            "max_bytes_per_second": LINK_BYTES_PER_SECOND,
            "shard_samples": SHARD_SAMPLES,
        },
        "cache": {"path": str(folder / "cache"), "max_bytes": MAX_BYTES, "min_uses": min_uses},
    }


class _DemoScreen:
    """The picture of the cache above the table of epochs."""

    def __init__(self, console: Console, cache: Path) -> None:
        self.console = console
        self.status = Status(path=str(cache))
        self.rows: list[EpochRow] = []
        self.redrawn: LiveRegion | None = None
        self._cache = cache
        self._history = StatusHistory()
        self._next = 0.0

    def refresh(self, now: str = "", *, force: bool = False) -> None:
        """Read the service's status and redraw, at most a few times a second."""
        at = time.monotonic()
        if at < self._next and not force:
            return
        self._next = at + REFRESH_SECONDS
        with suppress(CacheMissingError):  # the service has only just been started
            self.status = read_status(self._cache)
        self._history.add(at, self.status)
        if self.redrawn is not None:
            self.redrawn.redraw(self.picture(now, self.redrawn.height))

    def picture(self, now: str, height: int) -> RenderableType:
        """Return the cache's picture, and as many of the last epochs as there is room for."""
        wanted = min(len(self.rows), MIN_SHOWN_EPOCHS)
        cache = StatusPicture(self.status, self._history, height - TABLE_LINES - wanted)
        room = height - TABLE_LINES - len(self.console.render_lines(cache, pad=False))
        table = epoch_table(self.rows[-max(1, room) :], self.console.width)
        return Group(cache, table, Text(now, "dim", no_wrap=True, overflow="ellipsis"))

    def add(self, row: EpochRow) -> None:
        """Take up a finished epoch."""
        self.rows.append(row)
        if self.redrawn is None:
            self.console.print(
                f"epoch {row.number}: {in_count(row.cached)} samples in the cache, loss {row.loss:.3f}, "
                f"held-out accuracy {in_percent(row.held_out)}",
                highlight=False,
            )


@contextmanager
def _open_screen(console: Console, cache: Path) -> Iterator[_DemoScreen]:
    screen = _DemoScreen(console, cache)
    if not can_redraw(console.file):
        yield screen
        return
    with LiveRegion(console, transient=True) as screen.redrawn:
        yield screen


def epoch_table(rows: list[EpochRow], width: int) -> Table:
    """Return the table of epochs, of columns that fit."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, border_style="bright_black"
    )
    wanted = [heading for heading, least in COLUMNS.items() if width >= least]
    for heading in wanted:
        style = "bold" if heading == "held-out" else ""
        table.add_column(heading, justify="right", style=style, no_wrap=True)
    for row in rows:
        cells = _row_cells(row)
        table.add_row(*(cells[heading] for heading in wanted))
    return table


def _row_cells(row: EpochRow) -> dict[str, str]:
    """Return the cells of a row, by the headings of their columns."""
    values = (row.number, row.cached, row.new, row.drawn, row.evicted, row.coverage, row.loss)
    *counts, coverage, loss = values
    cells = [*map(in_count, counts), "?" if coverage is None else in_percent(coverage)]
    cells += [f"{loss:.3f}", in_percent(row.accuracy), in_percent(row.held_out)]
    return dict(zip(COLUMNS, cells, strict=True))


def _new_training() -> Training:
    importlib.import_module("growcache.torch")
    from growcache.cli.demo_model import Training

    return Training(seed=0)


def _train(screen: _DemoScreen, cache: Path, training: Training, epochs: int) -> list[EpochRow]:
    from growcache.torch import EpochLoader

    while screen.status.samples < MIN_SAMPLES:
        screen.refresh(f"waiting for the first {MIN_SAMPLES} samples …")
        time.sleep(REFRESH_SECONDS / 2)
    began = time.monotonic()
    with EpochLoader(
        cache, batch_size=BATCH_SIZE, min_samples=MIN_SAMPLES, job="demo"
    ) as loader:
        for number in range(1, epochs + 1):
            _train_epoch(screen, loader, training, number)
            screen.add(_epoch_row(screen.status, loader.report, training, number))
            if time.monotonic() - began > LAST_EPOCH_STARTS_SECONDS:
                break
    return screen.rows


def _train_epoch(
    screen: _DemoScreen, loader: EpochLoader, training: Training, number: int
) -> None:
    training.start_epoch()
    due = time.monotonic()
    for batch in loader:
        training.step(batch["x"], batch["y"])
        due = max(due + len(batch["y"]) / SAMPLES_PER_SECOND, time.monotonic())
        screen.refresh(
            f"epoch {number}: {in_count(training.samples)} samples trained on, "
            f"loss {training.loss:.3f}, accuracy {in_percent(training.accuracy)}"
        )
        time.sleep(max(0.0, due - time.monotonic()))
    screen.refresh(f"epoch {number} is over", force=True)


def _epoch_row(status: Status, report: Report, training: Training, number: int) -> EpochRow:
    return EpochRow(
        number=number,
        cached=report.cache_samples,
        new=report.new_samples,
        drawn=status.drawn,
        evicted=status.evicted_samples,
        coverage=status.coverage,
        loss=training.loss,
        accuracy=training.accuracy,
        held_out=training.held_out_accuracy(),
    )


def _watch_untrained(screen: _DemoScreen) -> list[EpochRow]:
    """Show the cache without a trainer, until it has filled and turns over."""
    deadline = time.monotonic() + LAST_EPOCH_STARTS_SECONDS / 2
    while time.monotonic() < deadline:
        screen.refresh()
        time.sleep(REFRESH_SECONDS / 2)
    return []


def _introduce(console: Console, folder: Path, *, trains: bool) -> None:
    if not trains:
        console.print(NO_TORCH, markup=False, highlight=False)
    windows = 3 * RECORDINGS * WINDOWS_PER_RECORDING
    size = in_bytes(windows * WINDOW * 4 * 4)
    console.print(
        f"A 'remote' store of {3 * RECORDINGS} sensor recordings ({in_count(windows)} windows, "
        f"{size}) in {folder}; a cache of at most {in_bytes(MAX_BYTES)}, filled over a link of "
        f"{in_bytes(LINK_BYTES_PER_SECOND)}/s; a model that trains on what is there.",
        highlight=False,
    )


def _conclude(
    console: Console, screen: _DemoScreen, rows: list[EpochRow], kept: Path | None
) -> None:
    status = screen.status
    if rows:
        console.print(epoch_table(rows, console.width))
    if len(rows) > 1:
        first, most = rows[0].cached, max(row.cached for row in rows)
        console.print(
            f"Held-out accuracy went from {in_percent(rows[0].held_out)} to "
            f"{in_percent(rows[-1].held_out)} while the cache grew from {in_count(first)} to "
            f"{in_count(most)} samples and never took more than {in_bytes(MAX_BYTES)} of disk.",
            highlight=False,
        )
    console.print(
        f"{in_count(status.drawn)} samples were drawn, {in_count(status.evicted_samples)} "
        "evicted again.\nNow with your own data: growcache init",
        highlight=False,
    )
    if kept is not None:
        console.print(f"Left behind in {kept}: remote/ and cache/", highlight=False)
