"""A cache that never evicts holds as many samples as one that does, in the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.accidents.commands import growcache as command
from tests.accidents.commands import status, write_config

NEARLY = 0.95  # of the fifo cache's samples; the last group of shards may not fit


def write_arrays(folder: Path) -> dict[str, Any]:
    """Write objects of one sample of 4 kB each."""
    for number in range(500):
        np.save(folder / f"{number:05d}.npy", np.random.default_rng(number).random(512))
    return {"url": f"{folder}/*.npy", "format": "npy"}


def write_lines(folder: Path) -> dict[str, Any]:
    """Write objects of many samples, which are distributed over the shards of a group."""
    line = json.dumps({"number": 0, "text": "x" * 3500})
    for number in range(40):
        (folder / f"{number:05d}.jsonl").write_text(f"{line}\n" * 60)
    return {"url": f"{folder}/*.jsonl", "format": "jsonl"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "max_bytes"),
    [(write_arrays, "2MB"), pytest.param(write_lines, "4MB", marks=pytest.mark.slow)],
)
def test_none_holds_as_many_samples_as_fifo(tmp_path: Path, make: Any, max_bytes: str) -> None:
    (tmp_path / "objects").mkdir()
    source = make(tmp_path / "objects")
    held = {}
    # Fifo has evicted its small first shards once all of them were replaced.
    for policy, until in (("fifo", ("--samples", "800")), ("none", ("--until-full",))):
        config = write_config(
            tmp_path / f"{policy}.yaml",
            source,
            sampling={"shard_samples": "auto"},
            cache={"eviction": policy, "max_bytes": max_bytes, "min_uses": 0},
        )
        done = command("run", config, *until, seconds=120)
        assert done.returncode == 0, done.stderr
        held[policy] = status(tmp_path / policy)["samples"]
    assert held["none"] >= NEARLY * held["fifo"], held
