"""An object that keeps failing while the others are served is deferred, and drawn later."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accidents.commands import (
    damage,
    digests,
    growcache,
    rows_of,
    running,
    samples,
    status,
    wait_for_status,
    write_config,
    write_objects,
)
from tests.servers.bucket import HANGS, Bucket, bucket

OBJECTS, ROWS = 8, 16
BAD = "00003.npy"
EVERY = Counter((number, row) for number in range(OBJECTS) for row in range(ROWS))
GOOD = Counter({sample: 1 for sample in EVERY if sample[0] != 3})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Bucket]:
    write_objects(tmp_path / "objects", OBJECTS, ROWS)
    with bucket(tmp_path / "objects") as found:
        yield found


def config(store: Bucket, path: Path, **sections: Any) -> Path:
    """Return the config of a service that gives up after 0.5 s and retries after 1.5 s."""
    source = rows_of("s3://b/*.npy", **store.options)
    sampling = {"timeout_seconds": 0.5, "samples_per_object": 1, "workers": 2}
    return write_config(
        path, source, sampling={**sampling, **sections.pop("sampling", {})}, **sections
    )


@pytest.mark.parametrize("fault", [503, pytest.param(HANGS, marks=pytest.mark.slow)])
def test_the_rest_is_cached_and_what_is_missing_is_told(
    store: Bucket, tmp_path: Path, fault: int
) -> None:
    """The store fails from the first request on, so the probe meets the bad object too."""
    store.faults[BAD] = fault
    file = config(store, tmp_path / "c.yaml")
    done = growcache("run", file, "--until-full", seconds=90)
    assert done.returncode == 0, done.stderr
    assert "ended without all samples: 1 object keeps failing and is set aside" in done.stderr
    cache = tmp_path / "c"
    found = status(cache)
    assert samples(cache) == GOOD
    assert (found["set_aside"]["parts"], found["set_aside"]["objects"]) == (ROWS, 1)
    assert found["set_aside"]["key"] == BAD
    assert (found["holes"], found["complete"]) == (0, False)
    assert found["coverage"] == pytest.approx(1 - 1 / OBJECTS)
    assert "1 object keeps failing and is set aside" in growcache("status", cache).stdout


@pytest.mark.slow
def test_what_was_set_aside_comes_when_its_object_answers(
    store: Bucket, tmp_path: Path
) -> None:
    file, cache = config(store, tmp_path / "c.yaml"), tmp_path / "c"
    store.faults[BAD] = 503
    with running(file):
        found = wait_for_status(cache, lambda s: s["set_aside"]["parts"] == ROWS)
        before = digests(cache)
        asked = store.asked[BAD]
        wait_for_status(cache, lambda s: store.asked[BAD] > asked, seconds=90)
        assert found["state"] in ("running", "waiting")
        store.faults.clear()
        found = wait_for_status(cache, lambda s: s["complete"])
    assert samples(cache) == EVERY
    assert found["set_aside"]["parts"] == found["set_aside"]["objects"] == 0
    assert found["coverage"] == 1.0
    after = digests(cache)
    assert {name: after[name] for name in before} == before, "committed shards never change"


@pytest.mark.slow
def test_the_next_run_goes_on_and_shards_that_are_lost_come_back_alike(
    store: Bucket, tmp_path: Path
) -> None:
    file, cache = config(store, tmp_path / "c.yaml"), tmp_path / "c"
    store.faults[BAD] = 503
    assert growcache("run", file, "--until-full", seconds=90).returncode == 0
    store.faults.clear()
    assert growcache("run", file, "--until-full", seconds=90).returncode == 0
    assert samples(cache) == EVERY
    whole = digests(cache)
    damage((cache / "shards").glob("*[02468].tfrecord"))
    assert growcache("check", cache, "--repair").returncode in (0, 1)
    assert growcache("run", file, "--until-full", seconds=90).returncode == 0
    assert digests(cache) == whole
    for path in cache.iterdir():
        if path.name != "shards":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert growcache("run", file, "--until-full", seconds=90).returncode == 0
    assert digests(cache) == whole, "the shards alone record the deferrals"
