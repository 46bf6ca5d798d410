"""`loader.report` agrees with the received samples, after one batch and after many epochs."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.numpy import EpochLoader
from tests.accidents.commands import growcache, wait_until, write_config, write_objects

SAMPLES = 128


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    source = {"url": write_objects(folder / "in", count=8), "format": "npy"}
    config = write_config(folder / "c.yaml", {**source, "options": {"axis": 0}})
    assert growcache("run", config, "--until-full").returncode == 0
    return config.with_suffix("")


def received(batch: dict[str, Any], counts: Counter[tuple[float, float]]) -> None:
    """Count the samples of a batch by their first two numbers, which identify them."""
    counts.update(map(tuple, batch["x"][:, :2].tolist()))


def matches(report: Any, counts: Counter[tuple[float, float]], last: int) -> None:
    """Check a report against the counts; `last` is the number of samples in the latest epoch."""
    uses = np.array(list(counts.values()), float)
    assert report.samples == last
    assert report.cache_samples == SAMPLES
    assert report.uses_max == uses.max()
    assert report.ess_samples == pytest.approx(uses.sum() ** 2 / (uses**2).sum())
    assert report.reuse == pytest.approx(uses.sum() / len(uses))
    assert report.coverage_samples == pytest.approx(len(uses) / SAMPLES)


def test_of_one_batch(cache: Path) -> None:
    with EpochLoader(cache, batch_size=16, min_samples=1) as loader:
        counts: Counter[tuple[float, float]] = Counter()
        batches = iter(loader)
        received(next(batches), counts)
        matches(loader.report, counts, 16)
        assert (loader.report.new_samples, loader.report.passes) == (16, 1)
        received(next(batches), counts)
        matches(loader.report, counts, 32)
        counts.clear()
    with EpochLoader(cache, batch_size=16, min_samples=1) as loader:
        received(next(iter(loader)), counts)
        matches(loader.report, counts, 16)


def test_of_epochs_that_are_parts_of_passes(cache: Path) -> None:
    counts: Counter[tuple[float, float]] = Counter()
    with EpochLoader(cache, batch_size=16, min_samples=1, samples_per_epoch=48) as loader:
        for _ in range(7):
            for batch in loader:
                received(batch, counts)
            matches(loader.report, counts, 48)


def test_what_drop_last_leaves_over_is_no_use(cache: Path) -> None:
    counts: Counter[tuple[float, float]] = Counter()
    with EpochLoader(cache, batch_size=48, min_samples=1) as loader:
        for batch in loader:
            received(batch, counts)
        matches(loader.report, counts, 96)


@pytest.mark.slow
def test_the_cache_is_as_large_when_the_rest_of_a_pass_comes_from_elsewhere(
    cache: Path,
) -> None:
    counts: Counter[tuple[float, float]] = Counter()
    with EpochLoader(cache, batch_size=4, min_samples=1, gather="process") as loader:
        for place, batch in enumerate(loader):
            received(batch, counts)
            if place == 2:
                for pid in children("gather"):
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not children("gather"))
        matches(loader.report, counts, SAMPLES)
        assert loader.report.passes == 1


def children(kind: str) -> list[int]:
    """Return this process's live children of one kind."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = folder.joinpath("stat").read_text().rsplit(")", 1)[1].split()[:2]
            words = folder.joinpath("cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and kind.encode() in words and state != "Z":
            found.append(int(folder.name))
    return found
