"""Batches out of a cache that `growcache run` fills over a link slower than training.

How much slower is counted, not timed, so that a busy machine changes no result: before each epoch training waits
until the samplers have drawn as many samples as such a link brings in the steps that were made.
"""

from __future__ import annotations

import sys
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
from growcache.cache.files import allocated_tree
from growcache.cache.index.reader import read_index
from growcache.cache.status import read_status
from growcache.errors import CacheMissingError
from growcache.torch import EpochLoader

Settings = Mapping[str, Any]
START_SECONDS = 300.0
RUN = "from growcache.__main__ import main\nmain()\n"
EPOCH_STEPS = 6
POLL_SECONDS = 0.05
SETTLED_SECONDS = 0.6  # after which the service has seen what training used


@dataclass
class GrowingFeed:
    """A loader over a cache, of which every epoch waits until the link has brought enough.

    Attributes:
        first_samples: cached before the first epoch; the link stays that far ahead.
        link: samples that it brings for each that training takes; infinite: as many as the
            cache's settings let it; None: training waits for none.
    """

    loader: EpochLoader
    cache: Path
    first_samples: int
    link: float | None
    delivered: int = 0
    disk_bytes: int = 0
    pool: list[int] = field(default_factory=list)

    def batches(self) -> Iterator[Batch]:
        """Yield batches without end."""
        while True:
            if self.link is not None:
                self._wait_for_link(self.first_samples + self.delivered * self.link)
            for taken in self.loader:
                self.delivered += len(taken["y"])
                yield Batch(taken["x"], taken["y"].view(-1).long())
            self.pool.append(self.loader.report.cache_samples)
            self.disk_bytes = max(self.disk_bytes, allocated_tree(self.cache))

    def _wait_for_link(self, wanted: float) -> None:
        """Wait until the samplers have drawn the wanted samples, or wait for training to use the cached ones."""
        began = time.time()
        while read_index(self.cache).totals.drawn < wanted:
            time.sleep(POLL_SECONDS)
            if time.time() > began + SETTLED_SECONDS and self._link_waits(began):
                return

    def _link_waits(self, began: float) -> bool:
        status = read_status(self.cache)
        told = status.updated_at or 0.0
        return status.waiting_reason == "readers" and told > began + SETTLED_SECONDS

    def egress_bytes(self) -> int:
        """Return the bytes that samplers have read from the store."""
        return read_status(self.cache).egress_bytes

    def figures(self) -> dict[str, float]:
        """Return what the loader reports, the mean number of cached samples, and the peak of allocated bytes."""
        report = self.loader.report
        return {
            "reuse": report.reuse,
            "reuse_recent": report.reuse_recent,
            "uses_max": report.uses_max,
            "ess_samples": report.ess_samples,
            "cache_samples": float(np.mean(self.pool)) if self.pool else report.cache_samples,
            "disk_bytes": max(self.disk_bytes, allocated_tree(self.cache)),
        }


@contextmanager
def growing_feed(
    place: Place,
    per_object: int,
    first_samples: int,
    sampling: Settings,
    cache: Settings,
    link: float | None = None,
    patch: str = "",
) -> Iterator[GrowingFeed]:
    """Run the service while the block lasts.

    Epochs are of a fixed length, so that batches run on from pass to pass and no rest of a pass is dropped.
    `patch` is code that the service runs first, to take out what no setting turns off.
    """
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
    program = (
        [sys.executable, "-c", patch + RUN] if patch else [sys.executable, "-m", "growcache"]
    )
    service = Child([*program, "run", str(config)], log=place.folder / "service.log")
    try:
        wait_for_samples(service, root, first_samples)
        with EpochLoader(
            root,
            batch_size=place.batch_size,
            min_samples=first_samples,
            samples_per_epoch=EPOCH_STEPS * place.batch_size,
            seed=place.seed,
        ) as loader:
            yield GrowingFeed(loader, root, first_samples, link)
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
