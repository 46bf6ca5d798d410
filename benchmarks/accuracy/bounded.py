"""Batches out of a cache that `growcache run` keeps within a bound, as a user's loop takes them.

Passes wait for `first_samples`, because passes over the few that have just come would repeat them in
consecutive steps, as data echoing does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.experiment import Place
from benchmarks.accuracy.growing import Settings, wait_for_samples, write_objects
from benchmarks.accuracy.training import Batch
from benchmarks.measure import Child, write_config
from growcache.cache.files import allocated_tree
from growcache.cache.status import read_status
from growcache.torch import EpochLoader


@dataclass
class BoundedFeed:
    """A loader over a cache, whose disk is measured after each pass."""

    loader: EpochLoader
    cache: Path
    most_samples: int = 0
    disk_bytes: int = 0

    def batches(self) -> Iterator[Batch]:
        """Yield batches without end, each pass over what is cached by then."""
        while True:
            for taken in self.loader:
                yield Batch(taken["x"], taken["y"].view(-1).long())
            self.most_samples = max(self.most_samples, self.loader.report.cache_samples)
            self.disk_bytes = max(self.disk_bytes, allocated_tree(self.cache))

    def egress_bytes(self) -> int:
        """Return the bytes that samplers have read from the store."""
        return read_status(self.cache).egress_bytes

    def figures(self) -> dict[str, float]:
        """Return what the loader reports, and the peaks of samples and of allocated bytes."""
        report = self.loader.report
        return {
            "reuse": report.reuse,
            "uses_max": report.uses_max,
            "ess_samples": report.ess_samples,
            "cache_samples": max(self.most_samples, report.cache_samples),
            "disk_bytes": max(self.disk_bytes, allocated_tree(self.cache)),
        }


@contextmanager
def bounded_feed(
    place: Place, per_object: int, first_samples: int, sampling: Settings, cache: Settings
) -> Iterator[BoundedFeed]:
    """Run the service while the block lasts."""
    objects, root = place.folder / "objects", place.folder / "cache"
    write_objects(place.task.training, objects, per_object)
    fields = {name: f"{objects}/{name}_{{k}}.npy" for name in ("x", "y")}
    config = place.folder / "config.yaml"
    write_config(
        config,
        {"fields": fields, "format": "npy", "options": {"axis": 0}},
        {"seed": place.seed, "workers": 1, **sampling},
        {"path": str(root), "max_bytes": place.task.max_bytes, **cache},
    )
    service = Child.growcache("run", str(config), log=place.folder / "service.log")
    try:
        wait_for_samples(service, root, first_samples)
        with EpochLoader(
            root, batch_size=place.batch_size, min_samples=first_samples, seed=place.seed
        ) as loader:
            yield BoundedFeed(loader, root)
    finally:
        service.interrupt()
