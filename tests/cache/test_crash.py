"""A supervisor that is killed at any moment leaves a cache that the next one goes on with."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from growcache.cache.check import check
from growcache.cache.files import Layout, allocated_tree
from growcache.cache.formats import tfrecord
from growcache.cache.index import read_index
from growcache.cache.locks import is_held
from growcache.cache.status import read_status
from tests.cache.making import MAX_BYTES, SCHEMA, add, opened, samples_of

# Fills and evicts for ever, as fast as it can; says which groups it has committed.
SERVICE = """
import sys
from pathlib import Path
from growcache.cache.eviction import choose
from tests.cache.making import add, need, opened
cache = opened(Path(sys.argv[1]))
again = cache.unfinished(cache.issued + 1, 1)
print("open", flush=True)
number = cache.issued + 1
while True:
    here = again.pop(0) if again else number
    if need(here, 60) > cache.room():
        choice = choose("fifo", cache.candidates(), need(here, 60) - cache.room(), 0)
        cache.evict(choice.evict)
    add(cache, here, 60)
    cache.maintain()
    number = max(number, here + 1)
"""


def run_and_kill(root: Path, seconds: float) -> float:
    """Let it work for so long, kill it, and return how long it took to begin."""
    began = time.monotonic()
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with service:
        assert service.stdout is not None
        assert service.stdout.readline() == "open\n"
        began = time.monotonic() - began
        time.sleep(seconds)
        service.send_signal(signal.SIGKILL)
    return began


@pytest.mark.timeout(120)
def test_killed_at_any_moment(tmp_path: Path) -> None:
    root, rng = tmp_path / "cache", random.Random(7)
    for _ in range(8):
        run_and_kill(root, rng.uniform(0.05, 0.4))
        assert allocated_tree(root) <= MAX_BYTES
        assert not is_held(Layout(root).supervisor_lock)
        # What readers see of the dead service is true, whatever lies about.
        for row in read_index(root).shards:
            shard = tfrecord.open_shard(Layout(root).shard(row.number), SCHEMA, row.samples)
            assert shard.digest() == row.digest
            first = samples_of(row.number, 1)[0]
            assert (shard[0]["x"] == first["x"]).all()
            shard.close()
        assert [f for f in check(root) if f.severity == "error"] == []
        assert read_status(root).state == "stopped"
    with opened(root) as cache:
        totals, rows = cache.totals(), read_index(root).shards
        assert totals.drawn == totals.samples + totals.evicted_samples
        assert totals.lost_shards == 0
        unfinished = set(cache.unfinished(cache.issued + 1, 1))
        assert len(unfinished) <= 1, "at most the group in flight is missing"
        assert totals.drawn_shards == cache.issued + 1 - len(unfinished)
        assert len(rows) == totals.shards
        assert list(cache.layout.incoming.iterdir()) == []
    assert check(root) == []


def test_a_start_takes_no_time_in_a_large_cache(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with opened(root, max_bytes=100_000_000) as cache:
        for number in range(300):
            add(cache, number, 1)
    began = time.monotonic()
    opened(root, max_bytes=100_000_000).close()
    assert time.monotonic() - began < 2
