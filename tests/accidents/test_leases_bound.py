"""Leases count against the bound, which holds at every moment for any number of snapshots."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.accidents.commands import (
    growcache,
    rows_of,
    running,
    wait_for_status,
    write_config,
    write_objects,
)
from tests.accidents.trainers import loading, trainer

MAX_BYTES = 6_000_000
MANY = """
import os, growcache
from growcache.errors import CacheError

def allocated(folder):
    found = os.stat(folder).st_blocks * 512
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            found += allocated(entry.path)
        else:
            try:
                found += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                pass
    return found

most, held, message = 0, [], ""
for number in range(600):
    try:
        held.append(growcache.Snapshot.take(cache, job="many"))
    except CacheError as error:
        message = str(error)
        break
    most = max(most, allocated(cache))
say(len(held), most, message)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    url = write_objects(tmp_path / "in", count=40, rows=16, columns=4096)
    return write_config(
        tmp_path / "cache.yaml",
        rows_of(url),
        # Without a limit, a service that draws without end takes a whole core.
        sampling={"shard_samples": 8, "max_bytes_per_second": "10MB"},
        cache={"max_bytes": MAX_BYTES, "min_uses": 0},
    )


@pytest.mark.slow
def test_six_hundred_snapshots_of_a_small_cache(config: Path) -> None:
    cache = config.with_suffix("")
    with running(config) as service:
        wait_for_status(cache, lambda found: found["evicted_samples"] > 0)
        with trainer(cache, MANY) as loop:
            held, most, message = loop.ask("pass")
            assert most <= MAX_BYTES
            assert 16 <= held < 600
            assert "no room for another lease" in message
            assert f"{held} snapshots are held" in message
            assert "\n" not in message
            # Closed snapshots free their space, and waiting readers continue on their own.
            with trainer(cache, loading(job="waits"), stderr=-3) as other:
                other.tell("say(len(next(batches)['x']))")
                loop.ask("say(held.pop().close())")
                loop.ask("say([one.close() for one in held[:4]] and 0)")
                assert other.ask("pass") == [8]
            loop.end(signal.SIGTERM)
        found = wait_for_status(cache, lambda now: not now["leases"])
        assert service.alive
        assert found["bytes"] <= MAX_BYTES
    assert growcache("check", cache).returncode == 0
    assert len(list((cache / "leases").iterdir())) <= held
