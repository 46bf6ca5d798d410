"""Sizes of samples differ by a factor of ten thousand, and large ones are cached as often."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from growcache import Snapshot
from tests.accidents.commands import growcache, status, write_config

LEAST, MOST = 50, 900_000
FALSE_ALARM = 1e-6


def pareto(count: int, total: int, seed: int) -> list[int]:
    """Return heavy-tailed sizes in random order; their sum is close to `total`."""
    rng = np.random.default_rng(seed)
    low, high = 0.05, 5.0
    for _ in range(60):  # bisect for the tail index that gives the total
        middle = (low + high) / 2
        sizes = np.clip(
            LEAST * (1 + np.random.default_rng(seed).pareto(middle, count)), LEAST, MOST
        )
        low, high = (middle, high) if sizes.sum() > total else (low, middle)
    return [int(size) for size in rng.permutation(sizes)]


def write_objects(folder: Path, sizes: list[int]) -> dict[str, int]:
    folder.mkdir()
    found = {}
    for number, size in enumerate(sizes):
        (folder / f"{number:05d}.bin").write_bytes(number.to_bytes(4, "big") * (size // 4 + 1))
        found[f"{number:05d}"] = 4 * (size // 4 + 1)
    return found


def cached(cache: Path) -> dict[str, int]:
    """Return the sizes of the cached samples by object; check that each sample is intact."""
    found: dict[str, int] = {}
    with Snapshot.take(cache) as snapshot:
        for i in range(len(snapshot)):
            data = snapshot[i]["data"]
            assert isinstance(data, bytes)
            key = Path(snapshot.origin(i).key).stem
            assert data == int(key).to_bytes(4, "big") * (len(data) // 4)
            assert key not in found
            found[key] = len(data)
    return found


def config_of(tmp_path: Path, cache: dict[str, Any], **sampling: Any) -> Path:
    return write_config(
        tmp_path / "c.yaml",
        {"url": f"{tmp_path}/in/*.bin", "format": "bytes"},
        sampling=sampling,
        cache=cache,
    )


@pytest.mark.slow
def test_no_large_sample_is_dropped(tmp_path: Path) -> None:
    """Eight samplers cache 25 MB in 162 objects of 50 B to 900 kB, under a bound of 64 MB."""
    sizes = sorted(pareto(162, 25_000_000, 3))
    # The service probes the first listed objects, which are small.
    known = write_objects(tmp_path / "in", [*sizes[:8], *sizes[8:][::-1]])
    assert 20_000_000 < sum(known.values()) < 30_000_000
    assert max(known.values()) > 800_000
    config = config_of(tmp_path, {"max_bytes": "64MB"}, workers=8, shard_samples=32)
    done = growcache("run", config, "--until-full", seconds=200)
    assert done.returncode == 0, done.stderr
    found = status(tmp_path / "c")
    assert (found["holes"], found["samples"], found["coverage"]) == (0, 162, 1.0)
    assert cached(tmp_path / "c") == known
    assert growcache("check", tmp_path / "c").returncode == 0


@pytest.mark.slow
def test_a_group_that_was_cut_is_cut_alike_when_the_bound_has_changed(tmp_path: Path) -> None:
    """The contents of a shard follow from the cache's own files, not from the current workers."""
    known = write_objects(tmp_path / "in", pareto(300, 40_000_000, 4))
    config = config_of(tmp_path, {"max_bytes": "24MB"}, workers=4, shard_samples=64)
    done = growcache("run", config, "--samples", "100")
    assert done.returncode == 0, done.stderr
    more = ("--set", "sampling.workers=1", "--set", "cache.max_bytes=200MB")
    done = growcache("run", config, "--until-full", *more)
    assert done.returncode == 0, done.stderr
    assert cached(tmp_path / "c") == known
    assert (tmp_path / "c/deferrals.json").exists(), "no group was cut, so nothing was tested"
    (tmp_path / "c/index.sqlite").unlink()
    assert growcache("check", tmp_path / "c", "--repair").returncode in (0, 1)
    done = growcache("run", config, "--until-full", *more)
    assert done.returncode == 0, done.stderr
    assert cached(tmp_path / "c") == known


@pytest.mark.slow
def test_sizes_of_what_is_cached_are_those_of_the_store(tmp_path: Path) -> None:
    """The deciles of the cache match those of the store (one false alarm in a million)."""
    known = write_objects(tmp_path / "in", pareto(4000, 48_000_000, 5))
    sampling = {"workers": 2, "shard_samples": 128}
    config = config_of(tmp_path, {"max_bytes": "20MB", "min_uses": 0}, **sampling)
    done = growcache("run", config, "--samples", "3200", seconds=200)
    assert done.returncode == 0, done.stderr
    found = status(tmp_path / "c")
    assert found["holes"] == 0
    assert found["evicted_samples"] > 0
    sizes = np.array(sorted(known.values()))
    edges = sizes[np.arange(1, 10) * len(sizes) // 10]
    here = np.array(list(cached(tmp_path / "c").values()))
    deciles = np.bincount(np.searchsorted(edges, here, side="right"), minlength=10)
    shares = np.bincount(np.searchsorted(edges, sizes, side="right"), minlength=10) / len(sizes)
    assert len(here) > 800
    assert agrees(deciles, shares), deciles
    without = deciles - np.array([0] * 9 + [9 * deciles[9] // 10])  # drop most of the largest
    assert not agrees(without, shares)


def agrees(counts: np.ndarray[Any, Any], shares: np.ndarray[Any, Any]) -> bool:
    """Return whether counts match the shares in Pearson's test (Wilson and Hilferty, 1931)."""
    wanted = shares * counts.sum()
    used = wanted > 0
    freedom = int(used.sum()) - 1
    z = NormalDist().inv_cdf(1 - FALSE_ALARM)
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + z * math.sqrt(spread)) ** 3
    return float((((counts - wanted) ** 2)[used] / wanted[used]).sum()) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("first", [6_000_000, pytest.param(900_000, marks=pytest.mark.slow)])
def test_a_large_first_object_neither_sets_the_sizes_nor_ends_the_run(
    tmp_path: Path, first: int
) -> None:
    known = write_objects(tmp_path / "in", [first, *[2000] * 200])
    config = config_of(tmp_path, {"max_bytes": "24MB"}, workers=2)
    done = growcache("run", config, "--until-full")
    assert done.returncode == 0, done.stderr
    assert cached(tmp_path / "c") == known
    assert status(tmp_path / "c")["holes"] == 0


def test_only_what_no_shard_can_hold_is_a_hole(tmp_path: Path) -> None:
    known = write_objects(tmp_path / "in", [*[3000] * 60, 15_000_000, *[3000] * 60])
    config = config_of(tmp_path, {"max_bytes": "16MB"}, workers=2, max_skipped=0.1)
    done = growcache("run", config, "--until-full")
    assert done.returncode == 0, done.stderr
    found = status(tmp_path / "c")
    assert found["holes"] == 1
    assert any("15,000,0" in line for line in found["last_errors"])
    del known["00060"]
    assert cached(tmp_path / "c") == known
