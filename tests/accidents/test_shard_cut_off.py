"""Shards are truncated while trainers have them mapped: the trainers skip them, and survive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.accidents.commands import growcache, write_config

OBJECTS = 24
ROWS = 16
TORCH = pytest.param("torch", marks=pytest.mark.torch)


def filled(folder: Path, *, columns: int, cache_format: str = "tfrecord") -> Path:
    """Fill a cache with rows that identify themselves; return its path."""
    (folder / "in").mkdir()
    for number in range(1, OBJECTS + 1):
        rows = np.arange(ROWS, dtype=np.float32)[:, None]
        values = np.repeat(number + rows * 1000, columns, axis=1)
        values[:, 0], values[:, 1] = number, rows[:, 0]
        np.save(folder / "in" / f"{number:05d}.npy", values.astype(np.float32))
    source = {"url": f"{folder}/in/*.npy", "format": "npy", "options": {"axis": 0}}
    return _run(folder, source, cache_format)


def filled_ragged(folder: Path, *, size: int) -> Path:
    """Fill a cache with byte strings of different sizes, each a repetition of one byte."""
    (folder / "in").mkdir()
    for number in range(OBJECTS * 4):
        data = bytes([number % 255 + 1]) * (size + number * size // 100)
        (folder / "in" / f"{number:05d}.bin").write_bytes(data)
    return _run(folder, {"url": f"{folder}/in/*.bin", "format": "bytes"}, "tfrecord")


def _run(folder: Path, source: dict[str, Any], cache_format: str) -> Path:
    cache = {"max_bytes": "200MB", "format": cache_format}
    config = write_config(folder / "c.yaml", source, cache=cache)
    done = growcache("run", config, "--until-full")
    assert done.returncode == 0, done.stderr
    return config.with_suffix("")


def trained(cache: Path, framework: str, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Train while shards are truncated; return the trainer's output."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.accidents.cut_off_trainer", str(cache)),
            *("--framework", framework, "--options", json.dumps(options), "--seed", str(seed)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == 0, found
    assert found["skipped"] > 0, found
    assert "skips a corrupt shard" in done.stderr
    assert "cut short" in done.stderr or "expected" in done.stderr
    return found


@pytest.mark.slow
def test_short_rows(tmp_path: Path) -> None:
    trained(filled(tmp_path, columns=64), "numpy")


@pytest.mark.slow
@pytest.mark.torch
def test_long_rows_of_torch(tmp_path: Path) -> None:
    trained(filled(tmp_path, columns=16_384), "torch")


@pytest.mark.slow
def test_rows_of_different_sizes(tmp_path: Path) -> None:
    trained(filled_ragged(tmp_path, size=300), "numpy")


@pytest.mark.slow
def test_the_gather_process(tmp_path: Path) -> None:
    trained(filled(tmp_path, columns=4096), "numpy", gather="process")


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", TORCH])
@pytest.mark.parametrize("size", [300, 60_000])
def test_rows_of_different_sizes_in_each_framework(
    tmp_path: Path, framework: str, size: int
) -> None:
    trained(filled_ragged(tmp_path, size=size), framework)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"verify": "always"},
        {"transformed": True, "num_workers": 1},
        {"transformed": True},
        {"samples_per_epoch": 600},
        {"gather": "thread", "drop_last": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("cache_format", ["tfrecord", "npy"])
def test_in_each_way_of_loading(
    tmp_path: Path, cache_format: str, options: dict[str, Any]
) -> None:
    trained(filled(tmp_path, columns=1024, cache_format=cache_format), "numpy", **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("framework", ["numpy", TORCH])
@pytest.mark.parametrize("columns", [64, 16_384])
def test_at_many_moments(tmp_path: Path, framework: str, columns: int, seed: int) -> None:
    trained(filled(tmp_path, columns=columns), framework, seed)
