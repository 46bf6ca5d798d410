"""Runs of paced loops behind a slow link: the store, a run's program, and its use of link, disk and memory.

The store is nginx. The link is a proxy before it (tests/servers/slowlink.py) that lets through its bytes per second
and passes on each request 50 ms late, a link for each run. Runs may go side by side, because a paced loop mostly sleeps.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.accuracy.fragments import fragments, write_objects, write_table
from benchmarks.accuracy.paced.loop import Plan, Record, Step
from benchmarks.accuracy.paced.place import BUCKET, Place
from benchmarks.peers.environments import PINNED, made
from benchmarks.servers import Server, running_server
from tests.servers.slowlink import SlowLink, slowlink

ROOT = Path(__file__).parent.parent.parent
PINS = Path(__file__).parent / "environments"
LATENCY_SECONDS = 0.05
EVERY_SECONDS = 0.5  # between two looks at a run
MEMORY_LOOKS = 12  # for one look at its memory, which costs more
GRACE_SECONDS = 60.0  # for imports before a run, and evaluation after it
OWN = "own"


class Loader(NamedTuple):
    """A loader of `paced`, its environment, and where the store has its converted samples."""

    module: str
    environment: str = OWN
    format: str | None = None
    options: Mapping[str, Any] = MappingProxyType({})


@dataclass
class Cost:
    """Link, disk and memory use of a run; the link's bytes and requests by time since the loader was opened.

    Attributes:
        sent: (monotonic seconds, bytes, requests) at every look.
        disk_bytes: most blocks that the loader's folder held.
        memory_bytes: most memory of the loop and all that it started, shared pages once.
    """

    sent: list[tuple[float, int, int]] = field(default_factory=list)
    disk_bytes: int = 0
    memory_bytes: int = 0

    def bytes_at(self, moment: float) -> int:
        """Return the bytes that had been sent by a moment of the monotonic clock."""
        times, sent, _ = zip(*self.sent, strict=True)
        return int(np.interp(moment, times, sent))


class Ran(NamedTuple):
    """The outcome of a run.

    Attributes:
        record: of the whole run; None if it failed, or hung until its time was over.
        steps: all that it made, also if it failed.
        cost: its use of link, disk and memory.
        log: the end of its output.
    """

    record: Record | None
    steps: list[Step]
    cost: Cost
    log: str


class Far:
    """The store, and files that all runs share."""

    def __init__(self, server: Server, folder: Path, environments: Path) -> None:
        self.server, self.folder, self.environments = server, folder, environments
        assert server.folder is not None
        self.bucket = server.folder / BUCKET
        training, test = fragments()
        write_objects(training, self.bucket / "raw")
        write_table(self.bucket / "raw", self.table)
        np.savez(self.test, windows=test.windows, labels=test.labels)
        order = np.random.default_rng(0).permutation(len(training.labels))
        np.savez(self.samples, windows=training.windows[order], labels=training.labels[order])
        self.data_bytes = training.windows.nbytes

    @property
    def table(self) -> Path:
        """The labels of the raw objects."""
        return self.folder / "labels.csv"

    @property
    def samples(self) -> Path:
        """All training samples, in an order of chance."""
        return self.folder / "samples.npz"

    @property
    def test(self) -> Path:
        """All samples of the test."""
        return self.folder / "test.npz"

    def python(self, loader: Loader) -> Path:
        """Return the interpreter of a loader's environment."""
        own = (PINS / f"{loader.environment}.txt").exists()
        return made(loader.environment, self.environments, PINS if own else PINNED)

    def convert(self, loader: Loader) -> float:
        """Write a loader's own format into the store, unless it is there; return the seconds."""
        assert loader.format is not None
        if (target := self.bucket / loader.format).exists():
            return 0.0
        began = time.monotonic()
        words = ["write", loader.module, str(self.samples), str(target)]
        subprocess.run(self._command(loader, words), check=True, env=_environment(), cwd=ROOT)
        return time.monotonic() - began

    def converted_bytes(self, loader: Loader) -> int:
        """Return the size of a loader's own format, or of the raw objects."""
        folder = self.bucket / (loader.format or "raw")
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def run(
        self,
        loader: Loader,
        plan: Plan,
        seed: int,
        link_bytes: float,
        disk_bytes: int,
        meanwhile: Callable[[SlowLink], None] = lambda link: None,
    ) -> Ran:
        """Make a run; `meanwhile` is called repeatedly once the loader is open."""
        with (
            tempfile.TemporaryDirectory(prefix="accuracy-") as scratch,
            slowlink(
                self.server.endpoint,
                bytes_per_second=link_bytes,
                latency_seconds=LATENCY_SECONDS,
            ) as link,
        ):
            folder, result = Path(scratch) / "own", Path(scratch) / "result.json"
            folder.mkdir()
            place = Place(
                link.endpoint,
                self.samples,
                self.table,
                folder,
                disk_bytes,
                seed,
                dict(loader.options),
            )
            words = [
                "run",
                loader.module,
                place.to_json(),
                json.dumps(asdict(plan)),
                str(result),
            ]
            log = Path(scratch) / "loop.log"
            with _process(self._command(loader, words), log) as process:
                cost = _watched(process, link, folder, result, plan, meanwhile)
            record = json.loads(result.read_text("utf-8")) if result.exists() else None
            said = log.read_text("utf-8", errors="replace")[-3000:]
            return Ran(record and Record(**record), steps_in(result), cost, said)

    def _command(self, loader: Loader, words: list[str]) -> list[str]:
        program = ["-m", "benchmarks.accuracy.paced.loop", *words]
        return [str(self.python(loader)), *program]


@contextmanager
def far_store(environments: Path) -> Iterator[Far]:
    """Serve the samples while the block lasts."""
    with (
        running_server("nginx") as server,
        tempfile.TemporaryDirectory(prefix="accuracy-") as folder,
    ):
        yield Far(server, Path(folder), environments)


def _watched(
    process: subprocess.Popen[bytes],
    link: SlowLink,
    folder: Path,
    result: Path,
    plan: Plan,
    meanwhile: Callable[[SlowLink], None],
) -> Cost:
    cost, began = Cost(), time.monotonic()
    deadline = began + plan.seconds + GRACE_SECONDS
    for look in itertools.count():
        if process.poll() is not None or result.exists() or time.monotonic() > deadline:
            return cost
        counts = link.counts()
        cost.sent.append((time.monotonic(), counts.bytes, counts.requests))
        cost.disk_bytes = max(cost.disk_bytes, _blocks(folder))
        if look % MEMORY_LOOKS == 0:
            cost.memory_bytes = max(cost.memory_bytes, _memory(process.pid))
        if result.with_suffix(".steps").exists():
            meanwhile(link)
        time.sleep(EVERY_SECONDS)
    raise AssertionError


def steps_in(result: Path) -> list[Step]:
    """Return the complete lines of a result's file of steps, whether the result exists or not."""
    file = result.with_suffix(".steps")
    lines = file.read_text("utf-8").split("\n")[1:-1] if file.exists() else []
    fields = (line.split() for line in lines)
    return [Step(float(a), float(w), int(n), int(m)) for a, w, n, m in fields]


def _blocks(folder: Path) -> int:
    """Return the bytes of all blocks in a folder, whose files may vanish meanwhile."""
    total = 0
    for home, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += 512 * (Path(home) / name).lstat().st_blocks
    return total


def _memory(pid: int) -> int:
    """Return the proportional set size of a process and its descendants."""
    total = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a group of its own, all of which is gone after the block."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=sink,
            env=_environment(),
            cwd=ROOT,
            process_group=0,
        )
    try:
        yield process
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
