"""A cache that an earlier growcache filled is read, and goes on where the draws are the same."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import growcache
from growcache.cache.check import check
from growcache.cache.index.reader import read_index
from growcache.cache.status import read_status
from growcache.numpy import EpochLoader
from growcache.sampling.fingerprint import DRAW_VERSION
from tests.upgrades.making import CACHES, OBJECTS, rows, run_growcache, unpack, write_inputs

KEPT = sorted(CACHES.glob("*.tar.xz"), key=lambda path: path.name)
DRAWN_OTHERWISE = "5ccf7f3"  # by draw version 1


@pytest.fixture(params=KEPT, ids=lambda path: path.name.removesuffix(".tar.xz"))
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    kept: Path = request.param
    unpack(kept, tmp_path)
    return tmp_path / kept.name.removesuffix(".tar.xz").partition("-")[2]


def is_drawn_otherwise(cache: Path) -> bool:
    identity = json.loads((cache / "identity.json").read_text())
    return bool(identity["parts"]["draw version"] != DRAW_VERSION)


def transformed(origin: growcache.Origin) -> tuple[list[float], float]:
    x = rows(int(Path(origin.key).stem))[origin.start]
    return (2 * x).ravel().tolist(), float(x.sum())


def cached(cache: Path) -> list[tuple[growcache.Origin, tuple[list[float], float]]]:
    with growcache.Snapshot.take(cache) as snapshot:
        samples = [snapshot[i] for i in range(len(snapshot))]
        found = [
            (np.asarray(s["x"]).ravel().tolist(), float(np.asarray(s["sum"]))) for s in samples
        ]
        return [(snapshot.origin(i), value) for i, value in enumerate(found)]


def test_its_samples_are_read(cache: Path) -> None:
    found = cached(cache)
    assert len(found) >= 60
    assert all(value == transformed(origin) for origin, value in found)
    with EpochLoader(cache, batch_size=4, min_samples=4, drop_last=False) as loader:
        delivered = [row.ravel().tolist() for batch in loader for row in batch["x"]]
    assert sorted(delivered) == sorted(value[0] for _, value in found)


def test_it_is_whole_and_has_a_status(cache: Path) -> None:
    assert [finding for finding in check(cache) if finding.severity == "error"] == []
    status = read_status(cache)
    assert (status.state, status.samples) == ("stopped", len(cached(cache)))


def test_it_goes_on_or_says_what_differs(cache: Path, tmp_path: Path) -> None:
    before = {row.number: row.digest for row in read_index(cache).shards}
    done = run_growcache(tmp_path, cache.name, "--until-full")
    after = {row.number: row.digest for row in read_index(cache).shards}
    if is_drawn_otherwise(cache):
        assert (done.returncode, after) == (2, before)
        assert_names_the_version(done)
        assert f"Have its {len(cached(cache))} samples" in done.stderr
        done = run_growcache(tmp_path, cache.name, "--until-full", "--replace")
    assert done.returncode == 0, done.stderr
    assert is_drawn_otherwise(cache) or before.items() < after.items()
    found = cached(cache)
    assert all(value == transformed(origin) for origin, value in found)
    counts = Counter((origin.key, origin.start) for origin, _ in found)
    assert set(counts.values()) == {1}
    assert len(counts) == sum(len(rows(number)) for number in range(OBJECTS))
    assert [finding for finding in check(cache) if finding.severity == "error"] == []


def assert_names_the_version(done: subprocess.CompletedProcess[str]) -> None:
    assert "draw version (1 → 3): an earlier growcache drew them" in done.stderr


def test_every_version_of_the_draws_and_of_the_index_is_kept() -> None:
    commits = {path.name.partition("-")[0] for path in KEPT}
    assert len(commits) == 3
    assert DRAWN_OTHERWISE in commits
    assert sum(path.stat().st_size for path in KEPT) < 100_000
