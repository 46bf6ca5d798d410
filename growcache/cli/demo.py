"""``growcache demo``: a service on a slow link in a child process, and PyTorch on its cache."""

from __future__ import annotations

import importlib
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.cli.demo_data import (
    CHANNELS,
    CLASSES,
    WINDOW,
    WINDOWS_PER_RECORDING,
    held_out_windows,
    write_recordings,
)
from growcache.cli.status import StatusHistory
from growcache.cli.terminal import can_redraw, spinner
from growcache.cli.view import StatusPicture
from growcache.cli.watch import LiveRegion
from growcache.errors import CacheMissingError
from growcache.humanize import in_bytes, in_count, in_percent
from growcache.sampling.serve import serve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from growcache.torch import EpochLoader

RECORDINGS = 80  # of each class
HELD_OUT_RECORDINGS = 20  # of each class, not in the remote store
HELD_OUT_SEED = 1
MAX_BYTES = 10_000_000
LINK_BYTES_PER_SECOND = 1_200_000
SHARD_SAMPLES = 16  # small, so that the cache grows in small steps
BATCH_SIZE = 32
MIN_SAMPLES = 256
# The pace of a larger model, so that the cache grows and turns over within a few epochs on
# every machine.
SAMPLES_PER_SECOND = 550
LAST_EPOCH_STARTS_SECONDS = 40.0
REFRESH_SECONDS = 0.2
TABLE_LINES = 3  # the head, and the lines below it
# Columns of the table of epochs, with the smallest width of a terminal that shows them.
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
MIN_SHOWN_EPOCHS = 3  # even if the cache's picture loses rows
NO_TORCH = (
    "PyTorch is not installed, so the cache grows but nothing is trained; "
    "for the whole demo: pip install 'growcache[torch]'"
)


@dataclass(frozen=True)
class EpochRow:
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
    trains = importlib.util.find_spec("torch") is not None
    with ExitStack() as stack:
        folder = keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="growcache-demo-"))
        )
        _introduce(console, folder, trains=trains)
        with spinner(console.file, "making the recordings, loading PyTorch …"):
            write_recordings(folder / "remote", RECORDINGS)
            training = None
            if trains:
                importlib.import_module("growcache.torch")
                training = Training(seed=0)
        screen = DemoScreen(console, folder / "cache")
        if can_redraw(console.file):
            screen.region = stack.enter_context(LiveRegion(console, transient=True))
        stack.enter_context(serve(demo_config(folder, min_uses=int(trains))))
        if training is not None:
            _train(screen, folder / "cache", training, epochs)
        else:  # until the cache has become full and turns over
            end = time.monotonic() + LAST_EPOCH_STARTS_SECONDS / 2
            while time.monotonic() < end:
                screen.refresh()
                time.sleep(REFRESH_SECONDS / 2)
    _conclude(console, screen, folder if keep else None)
    return screen.rows


def demo_config(folder: Path, *, min_uses: int = 1) -> dict[str, Any]:
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


class DemoScreen:
    def __init__(self, console: Console, cache: Path) -> None:
        self.console = console
        self.status = Status(path=str(cache))
        self.rows: list[EpochRow] = []
        self.region: LiveRegion | None = None
        self._cache = cache
        self._history = StatusHistory()
        self._next = 0.0

    def refresh(self, now: str = "", *, force: bool = False) -> None:
        at = time.monotonic()
        if at < self._next and not force:
            return
        self._next = at + REFRESH_SECONDS
        with suppress(CacheMissingError):  # the service has just been started
            self.status = read_status(self._cache)
        self._history.add(at, self.status)
        if self.region is not None:
            self.region.redraw(self.picture(now, self.region.height))

    def picture(self, now: str, height: int) -> RenderableType:
        wanted = min(len(self.rows), MIN_SHOWN_EPOCHS)
        cache = StatusPicture(self.status, self._history, height - TABLE_LINES - wanted)
        room = height - TABLE_LINES - len(self.console.render_lines(cache, pad=False))
        table = epoch_table(self.rows[-max(1, room) :], self.console.width)
        return Group(cache, table, Text(now, "dim", no_wrap=True, overflow="ellipsis"))

    def add(self, row: EpochRow) -> None:
        self.rows.append(row)
        if self.region is None:
            self.console.print(
                f"epoch {row.number}: {in_count(row.cached)} samples in the cache, loss {row.loss:.3f}, "
                f"held-out accuracy {in_percent(row.held_out)}",
                highlight=False,
            )


def epoch_table(rows: list[EpochRow], width: int) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, border_style="bright_black"
    )
    fitting = [width >= least for least in COLUMNS.values()]
    for heading in compress(COLUMNS, fitting):
        style = "bold" if heading == "held-out" else ""
        table.add_column(heading, justify="right", style=style, no_wrap=True)
    for row in rows:
        cells = [
            *map(in_count, (row.number, row.cached, row.new, row.drawn, row.evicted)),
            "?" if row.coverage is None else in_percent(row.coverage),
            f"{row.loss:.3f}",
            in_percent(row.accuracy),
            in_percent(row.held_out),
        ]
        table.add_row(*compress(cells, fitting))
    return table


def _train(screen: DemoScreen, cache: Path, training: Training, epochs: int) -> None:
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
            row = EpochRow(
                number=number,
                cached=loader.report.cache_samples,
                new=loader.report.new_samples,
                drawn=screen.status.drawn,
                evicted=screen.status.evicted_samples,
                coverage=screen.status.coverage,
                loss=training.loss,
                accuracy=training.accuracy,
                held_out=training.held_out_accuracy(),
            )
            screen.add(row)
            if time.monotonic() - began > LAST_EPOCH_STARTS_SECONDS:
                break


def _train_epoch(
    screen: DemoScreen, loader: EpochLoader, training: Training, number: int
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


def _introduce(console: Console, folder: Path, *, trains: bool) -> None:
    if not trains:
        console.print(NO_TORCH, markup=False, highlight=False)
    windows = 3 * RECORDINGS * WINDOWS_PER_RECORDING
    size = in_bytes(windows * WINDOW * 4 * 4)
    console.print(
        f"A 'remote' store of {3 * RECORDINGS} sensor recordings ({in_count(windows)} windows, "
        f"{size}) in {folder}; a cache of at most {in_bytes(MAX_BYTES)}, filled over a link of "
        f"{in_bytes(LINK_BYTES_PER_SECOND)}/s; a model that trains on the cached samples.",
        highlight=False,
    )


def _conclude(console: Console, screen: DemoScreen, kept: Path | None) -> None:
    status, rows = screen.status, screen.rows
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
        console.print(f"Kept in {kept}: remote/ and cache/", highlight=False)


class Training:
    def __init__(self, seed: int) -> None:
        import torch

        # One thread is enough for this model, and does not compete with the samplers.
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = make_network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._held_out = held_out_windows(HELD_OUT_RECORDINGS, HELD_OUT_SEED)
        self.start_epoch()

    def start_epoch(self) -> None:
        self.samples, self._loss, self._right = 0, 0.0, 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        from torch import nn

        scores = self.model(x.transpose(1, 2))
        loss = nn.functional.cross_entropy(scores, y)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.samples += len(y)
        self._loss += loss.item() * len(y)
        self._right += _count_right(scores, y)

    @property
    def loss(self) -> float:
        return self._loss / max(1, self.samples)

    @property
    def accuracy(self) -> float:
        """Share of this epoch's samples that were classified correctly during training."""
        return self._right / max(1, self.samples)

    def held_out_accuracy(self) -> float:
        """Share of correctly classified windows of recordings outside the training data."""
        import torch

        x, y = (torch.from_numpy(array) for array in self._held_out)
        with torch.no_grad():
            return _count_right(self.model(x.transpose(1, 2)), y) / len(y)


def make_network() -> nn.Module:
    from torch import nn

    layers: list[nn.Module] = []
    for channels, filters in ((CHANNELS, 16), (16, 32), (32, 32)):
        layers += [
            nn.Conv1d(channels, filters, 9, stride=2, padding=4),
            nn.GroupNorm(4, filters),
            nn.ReLU(),
        ]
    layers += [nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(32, len(CLASSES))]
    return nn.Sequential(*layers)


def _count_right(scores: torch.Tensor, y: torch.Tensor) -> int:
    return int((scores.argmax(1) == y).sum())
