"""A cache that an earlier growcache filled is read, and goes on where the draws are the same."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
ONE = [path for path in KEPT if "records" in path.name and DRAWN_OTHERWISE not in path.name][:1]
one_of_equal_draws = pytest.mark.parametrize(
    "cache", ONE, ids=lambda path: path.name, indirect=True
)


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
        assert f"To replace its {len(cached(cache))} samples" in done.stderr
        done = run_growcache(tmp_path, cache.name, "--until-full", "--replace")
    assert done.returncode == 0, done.stderr
    assert is_drawn_otherwise(cache) or before.items() < after.items()
    found = cached(cache)
    assert all(value == transformed(origin) for origin, value in found)
    counts = Counter((origin.key, origin.start) for origin, _ in found)
    assert set(counts.values()) == {1}
    assert len(counts) == sum(len(rows(number)) for number in range(OBJECTS))
    assert [finding for finding in check(cache) if finding.severity == "error"] == []


def in_order(batches: Iterable[dict[str, Any]]) -> list[list[float]]:
    return [row.ravel().tolist() for batch in batches for row in batch["x"]]


@pytest.mark.mutant(
    4, "growcache.sampling.fingerprint:identify", "{_hash(parts | by_text): by_text}", "{}"
)
@one_of_equal_draws
def test_a_state_resumes_in_a_cache_that_was_filled_anew_after_the_upgrade(
    cache: Path, tmp_path: Path
) -> None:
    """The earlier version took the digest of the code's text, and equal samples are equal samples."""
    assert run_growcache(tmp_path, cache.name, "--until-full").returncode == 0
    with EpochLoader(cache, batch_size=4, min_samples=4, drop_last=False) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = in_order(batches)
    cache.rename(tmp_path / "earlier")
    assert run_growcache(tmp_path, cache.name, "--until-full").returncode == 0
    (old, new) = (read_index(path) for path in (tmp_path / "earlier", cache))
    assert {row.number: row.digest for row in old.shards}.items() <= {
        row.number: row.digest for row in new.shards
    }.items()
    assert old.fingerprint != new.fingerprint
    for kept in (cache, tmp_path / "earlier"):  # and the other way round, by the alias
        with EpochLoader(kept, batch_size=4, min_samples=4, drop_last=False) as loader:
            loader.load_state_dict(state, missing="error")
            batches = iter(loader)
            assert in_order([next(batches)])
            state_of_new = loader.state_dict()
            assert in_order(batches) == rest[4:]
    earlier = tmp_path / "earlier"
    with EpochLoader(earlier, batch_size=4, min_samples=4, drop_last=False) as loader:
        loader.load_state_dict(state_of_new, missing="error")


@pytest.mark.mutant(
    4,
    "growcache.cache.meta:_as_in_shards",
    "wanted.known_as(sidecar.fingerprint)",
    "{wanted.fingerprint: wanted}.get(sidecar.fingerprint)",
)
@one_of_equal_draws
def test_its_shards_are_known_where_index_and_identity_are_lost(
    cache: Path, tmp_path: Path
) -> None:
    before = {row.number: row.digest for row in read_index(cache).shards}
    for path in (*cache.glob("index.sqlite*"), cache / "identity.json"):
        path.unlink()
    done = run_growcache(tmp_path, cache.name, "--until-full")
    assert done.returncode == 0, done.stderr
    assert before.items() < {row.number: row.digest for row in read_index(cache).shards}.items()
    assert [finding for finding in check(cache) if finding.severity == "error"] == []


@one_of_equal_draws
def test_a_comment_changes_no_cache_that_went_on_after_the_upgrade(
    cache: Path, tmp_path: Path
) -> None:
    """From then on its identity has the digest of the syntax, too."""
    assert run_growcache(tmp_path, cache.name, "--samples", "1").returncode == 0
    with (tmp_path / "upgrade_code.py").open("a") as code:
        code.write("# a comment\n")
    done = run_growcache(tmp_path, cache.name, "--until-full")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "upgrade_code.py").open("a") as code:
        code.write("x = 1\n")
    assert run_growcache(tmp_path, cache.name, "--until-full").returncode == 2


def assert_names_the_version(done: subprocess.CompletedProcess[str]) -> None:
    assert "draw version (1 → 3): an earlier growcache drew them" in done.stderr


def test_every_version_of_the_draws_and_of_the_index_is_kept() -> None:
    commits = {path.name.partition("-")[0] for path in KEPT}
    assert len(commits) == 3
    assert DRAWN_OTHERWISE in commits
    assert sum(path.stat().st_size for path in KEPT) < 100_000
