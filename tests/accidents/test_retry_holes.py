"""Holes are retried with `--retry-holes`, and when a refresh lists a new version of the object."""

from __future__ import annotations

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
    samples,
    status,
    write_config,
    write_objects,
)
from tests.servers.bucket import Bucket, bucket

OBJECTS, ROWS = 40, 4
GONE = [f"{number:05d}.npy" for number in range(0, OBJECTS, 3)]
EVERY = Counter((number, row) for number in range(OBJECTS) for row in range(ROWS))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Bucket]:
    write_objects(tmp_path / "objects", OBJECTS, ROWS)
    with bucket(tmp_path / "objects") as found:
        yield found


def config(store: Bucket, path: Path, **sampling: Any) -> Path:
    source = rows_of("s3://b/*.npy", **store.options)
    small = {"timeout_seconds": 1, "samples_per_object": 1, "shard_samples": 32}
    return write_config(path, source, sampling={**small, **sampling})


@pytest.mark.slow
def test_holes_do_not_doom_the_next_run_and_can_be_tried_again(
    store: Bucket, tmp_path: Path
) -> None:
    file, cache = config(store, tmp_path / "c.yaml"), tmp_path / "c"
    store.faults.update(dict.fromkeys(GONE, 404))
    ended = growcache("run", file, "--until-full")
    assert (ended.returncode, "more than sampling.max_skipped" in ended.stderr) == (1, True)
    holes = status(cache)["holes"]
    assert holes > 10
    store.faults.clear()
    done = growcache("run", file, "--until-full")
    assert done.returncode == 0, done.stderr
    found, before = status(cache), digests(cache)
    assert (found["holes"], found["complete"]) == (holes, True)
    assert samples(cache).total() == EVERY.total() - holes

    again = growcache("run", file, "--until-full", "--retry-holes")
    assert again.returncode == 0, again.stderr
    assert f"supervisor retries {holes} holes" in again.stderr
    found, after = status(cache), digests(cache)
    assert (found["holes"], found["complete"], found["coverage"]) == (0, True, 1.0)
    assert samples(cache) == EVERY
    assert {name: after[name] for name in before} == before, "committed shards never change"
    assert growcache("check", cache).returncode == 0


@pytest.mark.slow
def test_a_group_whose_holes_were_tried_again_is_drawn_as_it_was(
    store: Bucket, tmp_path: Path
) -> None:
    file, cache = config(store, tmp_path / "c.yaml", max_skipped=0.5), tmp_path / "c"
    store.faults.update(dict.fromkeys(GONE, 404))
    assert growcache("run", file, "--until-full").returncode == 0
    store.faults.clear()
    assert growcache("run", file, "--until-full", "--retry-holes").returncode == 0
    before, told = {**digests(cache)}, status(cache)
    damage((cache / "shards").glob("*[13579].tfrecord"))
    growcache("check", cache, "--repair")
    assert growcache("run", file, "--until-full").returncode == 0
    after, again = digests(cache), status(cache)
    records = [name for name in before if name.endswith(".tfrecord")]
    assert {n: after[n] for n in records} == {n: before[n] for n in records}
    assert samples(cache) == EVERY
    for key in ("holes", "coverage", "complete"):
        assert again[key] == told[key], key


@pytest.mark.slow
def test_what_still_fails_is_a_hole_again_and_ends_nothing(
    store: Bucket, tmp_path: Path
) -> None:
    file, cache = config(store, tmp_path / "c.yaml", max_skipped=0.5), tmp_path / "c"
    store.faults.update(dict.fromkeys(GONE, 404))
    assert growcache("run", file, "--until-full").returncode == 0
    holes = status(cache)["holes"]
    config(store, file)  # with the default limit of one hole in a hundred
    for key in GONE[:2]:
        store.faults.pop(key)
    again = growcache("run", file, "--until-full", "--retry-holes")
    assert again.returncode == 0, again.stderr
    found = status(cache)
    assert (found["holes"], found["complete"]) == (holes - 2 * ROWS, True)
    assert samples(cache).total() == EVERY.total() - found["holes"]


@pytest.mark.slow
def test_an_object_that_was_written_anew_is_read_after_a_refresh(
    store: Bucket, tmp_path: Path
) -> None:
    """A new version is retried; a refresh that lists the same version is not."""
    path, key = store.folder / GONE[1], GONE[1]
    whole = path.read_bytes()
    path.write_bytes(b"no array" * 20)
    file, cache = config(store, tmp_path / "c.yaml", max_skipped=0.5), tmp_path / "c"
    assert growcache("run", file, "--until-full").returncode == 0
    holes = status(cache)["holes"]
    assert holes > 0
    path.write_bytes(b"no array either" * 20)
    for times in (1, 0):
        asked = store.asked[key]
        done = growcache("run", file, "--until-full", "--refresh")
        assert done.returncode == 0, done.stderr
        assert (store.asked[key] > asked) == bool(times)
        assert status(cache)["holes"] == holes
    path.write_bytes(whole)
    assert growcache("run", file, "--until-full", "--refresh").returncode == 0
    assert status(cache)["holes"] == 0
    number = int(key[:5])
    assert {s for s in samples(cache) if s[0] == number} <= {
        (number, row) for row in range(ROWS)
    }
    assert any(s[0] == number for s in samples(cache))
