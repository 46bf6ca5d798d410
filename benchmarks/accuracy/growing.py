"""Batches out of a cache that `growcache run` fills, of which the reuse is fixed by its settings.

With `min_uses` and `max_reuse` at the same number a shard stays until it was used that often, and is
used no more than that, however fast samplers and training are. A pass waits for `pass_samples`
samples that may be used, because passes over the few that have just come would repeat them in consecutive
steps, as data echoing does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy.experiment import Place
from benchmarks.accuracy.training import Batch
from benchmarks.accuracy.wheels import Labelled
from benchmarks.measure import Child, write_config
from growcache.cache.status import read_status
from growcache.errors import CacheMissingError
from growcache.torch import EpochLoader

Settings = Mapping[str, Any]
START_SECONDS = 300.0


@dataclass
class GrowingFeed:
    """A loader over a cache, cut into the batches of a step."""

    loader: EpochLoader
    cache: Path
    batch_size: int
    pool: list[int] = field(default_factory=list)

    def batches(self) -> Iterator[Batch]:
        """Yield batches without end, each pass over what is cached by then."""
        while True:
            for taken in self.loader:
                labels = taken["y"].view(-1).long()
                for start in range(0, len(labels), self.batch_size):
                    stop = start + self.batch_size
                    yield Batch(taken["x"][start:stop], labels[start:stop])
            self.pool.append(self.loader.report.cache_samples)

    def egress_bytes(self) -> int:
        """Return the bytes that samplers have read from the store."""
        return read_status(self.cache).egress_bytes

    def figures(self) -> dict[str, float]:
        """Return what the loader reports, and the mean number of samples of a pass."""
        report = self.loader.report
        return {
            "reuse": report.reuse,
            "uses_max": report.uses_max,
            "ess_samples": report.ess_samples,
            "cache_samples": float(np.mean(self.pool)) if self.pool else report.cache_samples,
        }


@contextmanager
def growing_feed(
    place: Place, per_object: int, pass_samples: int, sampling: Settings, cache: Settings
) -> Iterator[GrowingFeed]:
    """Run the service while the block lasts; `pass_samples` is a multiple of the batch's size."""
    objects, root = place.folder / "objects", place.folder / "cache"
    write_objects(place.task.training, objects, per_object)
    source = {
        "fields": {name: f"{objects}/{name}_{{k}}.npy" for name in ("x", "y")},
        "format": "npy",
        "options": {"axis": 0},
    }
    config = place.folder / "config.yaml"
    write_config(
        config,
        source,
        {"seed": place.seed, "workers": 1, **sampling},
        {"path": str(root), "max_bytes": place.task.max_bytes, **cache},
    )
    service = Child.growcache("run", str(config), log=place.folder / "service.log")
    try:
        wait_for_samples(service, root, pass_samples)
        with EpochLoader(
            root, batch_size=pass_samples, min_samples=pass_samples, seed=place.seed
        ) as loader:
            yield GrowingFeed(loader, root, place.batch_size)
    finally:
        service.interrupt()


def wait_for_samples(service: Child, root: Path, count: int) -> None:
    """Wait for the first pass; exit with the service's words if it fails."""
    while _cached_samples(root) < count:
        service.check(START_SECONDS)
        time.sleep(0.1)


def _cached_samples(root: Path) -> int:
    try:
        return read_status(root).samples
    except CacheMissingError:
        return 0


def write_objects(samples: Labelled, folder: Path, per_object: int) -> None:
    """Write pairs of objects, inputs and classes, in the order of the samples."""
    folder.mkdir()
    for number, start in enumerate(range(0, len(samples.labels), per_object)):
        stop = start + per_object
        np.save(folder / f"x_{number:04}.npy", samples.inputs[start:stop])
        np.save(folder / f"y_{number:04}.npy", samples.labels[start:stop])


def as_batch(samples: Labelled) -> Batch:
    """Return all samples as one batch."""
    return Batch(torch.from_numpy(samples.inputs), torch.from_numpy(samples.labels))
