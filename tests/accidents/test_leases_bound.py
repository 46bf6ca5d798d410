"""Leases are part of the bound: however many snapshots are wanted, it holds at any instant."""

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

pytestmark = pytest.mark.timeout(240)

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

most, held, told = 0, [], ""
for number in range(600):
    try:
        held.append(growcache.Snapshot.take(cache, job="many"))
    except CacheError as error:
        told = str(error)
        break
    most = max(most, allocated(cache))
say(len(held), most, told)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    url = write_objects(tmp_path / "in", count=40, rows=16, columns=4096)
    return write_config(
        tmp_path / "cache.yaml",
        rows_of(url),
        # Or a service that draws without end takes a core of the machine.
        sampling={"shard_samples": 8, "max_bytes_per_second": "10MB"},
        cache={"max_bytes": MAX_BYTES, "min_uses": 0},
    )


def test_six_hundred_snapshots_of_a_small_cache(config: Path) -> None:
    cache = config.with_suffix("")
    with running(config) as service:
        wait_for_status(cache, lambda found: found["evicted_samples"] > 0)
        with trainer(cache, MANY) as loop:
            held, most, told = loop.ask("pass")
            assert most <= MAX_BYTES
            assert 16 <= held < 600
            assert "no room for another lease" in told
            assert f"{held} snapshots are held" in told
            assert "\n" not in told
            # What is let go is room again, and those that wait for it go on by themselves.
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
