"""Somebody else fills the disk, again and again: that costs waiting, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from growcache.cache.check import check
from tests.disks import KINDS, Other, filled_up, small_disk
from tests.sampling.services import (
    drawn,
    make_source,
    service,
    status,
    wait_until,
    write_config,
)

DISK_BYTES = 24_000_000
MAX_BYTES = 12_000_000
HELD_SECONDS = 0.7

READER = """
import os, sys
from growcache.numpy import EpochLoader

loader = EpochLoader(sys.argv[1], batch_size=4, min_samples=8)
while True:
    for batch in loader:
        assert len(batch["x"]) == 4
    os.write(1, b"%d\\n" % loader.report.samples)  # whole, whatever other threads say
"""


class Reader:
    """A process that trains without end; ``epochs`` tells how far it is."""

    def __init__(self, cache: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as out:
            command = [sys.executable, "-c", READER, str(cache)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    @property
    def epochs(self) -> int:
        return sum(line.isdigit() for line in self.lines())

    @property
    def complaints(self) -> list[str]:
        words = [line for line in self.lines() if not line.isdigit()]
        known = ("loader ", "the service of the cache ")
        return [line for line in words if not line.startswith(known)]


@contextmanager
def training(cache: Path, log: Path) -> Iterator[Reader]:
    reader = Reader(cache, log)
    try:
        yield reader
        assert reader.process.poll() is None, reader.lines()[-20:]
    finally:
        reader.process.kill()
        reader.process.wait()


def hold(other: Other, cache: Path) -> bool:
    """Take what becomes free for a while; return whether the status named the event."""
    named = False
    deadline = time.monotonic() + HELD_SECONDS
    while time.monotonic() < deadline or (not named and time.monotonic() < deadline + 10):
        other.take_all()
        named |= "free space on the disk" in (status(cache).waiting_for or "")
        time.sleep(0.01)
    return named


def goes_on(cache: Path, reader: Reader) -> None:
    before, epochs = drawn(cache), reader.epochs
    wait_until(lambda: drawn(cache) > before + 16 and reader.epochs > epochs + 1)


def costs_waiting_only(folder: Path, kind: str, times: int, min_free: object) -> None:
    url = make_source(folder / "in", count=300, shape=(16, 1024))
    cache = folder / "disk" / "cache"
    bounds = {"path": str(cache), "max_bytes": MAX_BYTES, "min_uses": 0, "min_free": min_free}
    config = write_config(folder / "c.yaml", url, sampling={"workers": 2}, cache=bounds)
    with small_disk(folder / "disk", DISK_BYTES, kind) as disk:
        with service(config) as run, training(cache, folder / "log") as reader:
            wait_until(lambda: drawn(cache) > 100 and reader.epochs)
            for _ in range(times):
                with filled_up(disk) as other:
                    assert hold(other, cache), status(cache)
                goes_on(cache, reader)
                assert run.poll() is None, "the service ended"
            last = status(cache)
            run.terminate()
            assert (run.wait(30), run.stderr.read() if run.stderr else "") == (0, "")
        print(last)
        assert (last.restarts, last.holes) == (0, 0)
        assert reader.complaints == []
        assert [f for f in check(cache) if f.severity == "error"] == []


def test_a_disk_that_others_fill_costs_waiting_only(tmp_path: Path) -> None:
    costs_waiting_only(tmp_path, "tmpfs", 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("min_free", [0, "1%"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_others_fill_often_costs_waiting_only(
    tmp_path: Path, kind: str, min_free: object
) -> None:
    costs_waiting_only(tmp_path, kind, 20, min_free)
