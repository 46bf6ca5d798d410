"""The bound as the disk sees it: samples of any size, samplers killed, readers come and go."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from growcache.cache.check import check
from growcache.cache.index.reader import read_index
from tests.disks import KINDS, small_disk
from tests.sampling.disk_watcher import watching
from tests.sampling.services import (
    drawn,
    kill,
    samplers_of,
    service,
    status,
    wait_until,
    write_config,
)

MAX_BYTES = 64_000_000
EVERYDAY_BYTES = 16_000_000

PARETO = '''
"""Samples of unpredictable sizes: most are small, some take 900 KB."""

def sample(store, rng):
    nbytes = min(900_000, int(3_000 * (1 + rng.pareto(1.05))))
    return {"data": rng.bytes(nbytes), "size": nbytes}
'''

READER = """
import sys, time
from growcache.loading.snapshot import Snapshot

while True:
    with Snapshot.take(sys.argv[1], job=sys.argv[2]) as snapshot:
        for i in range(0, len(snapshot), 3):
            found = snapshot[i]
            assert len(found["data"]) == found["size"]
    time.sleep(0.01)
"""


@contextmanager
def reader(cache: Path, job: str) -> Iterator[None]:
    """A process that reads snapshot after snapshot; that it ends is a failure."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(cache), job], stderr=subprocess.PIPE, text=True
    )
    try:
        yield
        assert process.poll() is None, "the reader ended"
    finally:
        process.kill()
        _, said = process.communicate()
    assert said == ""


def write_pareto(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_bytes: int,
    workers: int = 8,
    cache_format: str = "tfrecord",
) -> Path:
    """A config for samplers that make up what they write, on a disk that is to be mounted."""
    (folder / "pareto.py").write_text(PARETO)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path.cwd()}")
    path = str(folder / "disk" / "cache")
    bounds = {"path": path, "max_bytes": max_bytes, "min_uses": 0, "format": cache_format}
    return write_config(
        folder / "config.yaml",
        "memory://nothing",
        source={"format": "pareto:sample"},
        sampling={"workers": workers, "shard_samples": 24, "max_skipped": 0.1},
        cache=bounds,
    )


def never_above(
    folder: Path, config: Path, max_bytes: int, kind: str, turnovers: float, kills: int
) -> None:
    cache = folder / "disk" / "cache"
    dice = random.Random(0)
    with small_disk(folder / "disk", int(1.5 * max_bytes), kind) as disk:
        with watching(disk, cache) as found, service(config) as run, ExitStack() as readers:
            wait_until(lambda: drawn(cache) > 0)
            for job in ("one", "two"):
                readers.enter_context(reader(cache, job))
            killed = 0
            wait_until(lambda: read_index(cache).totals.evicted_shards > 0)
            shards = read_index(cache).totals.shards
            while (
                killed < kills
                or not (totals := read_index(cache).totals).delivered
                or totals.evicted_shards < turnovers * shards
            ):
                alive = samplers_of(run.pid)
                if alive and killed < kills:
                    kill(dice.choice(alive))
                    killed += 1
                time.sleep(0.2)
                assert run.poll() is None, "the service ended"
            last = status(cache)
        print(found, last)  # for docs/reference/reliability.md
        assert found["most"] <= max_bytes
        assert found["most_blocks"] <= max_bytes
        assert found["most"] > 0.8 * max_bytes, "the test tests nothing"
        assert found["median_ms"] < 20
        assert (
            last.holes <= 0.02 * last.drawn
        )  # those that not even an empty group has room for
        assert [f for f in check(cache) if f.severity == "error"] == []


def test_the_bound_holds_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_pareto(tmp_path, monkeypatch, EVERYDAY_BYTES, workers=2)
    never_above(tmp_path, config, EVERYDAY_BYTES, "tmpfs", turnovers=1, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", ["tfrecord", "npy"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_on_a_disk_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cache_format: str
) -> None:
    config = write_pareto(tmp_path, monkeypatch, MAX_BYTES, cache_format=cache_format)
    never_above(tmp_path, config, MAX_BYTES, kind, turnovers=8, kills=20)
