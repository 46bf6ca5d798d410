"""growcache over a cache that a service fills meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.slow_link.loop import BATCH, Places
from growcache.torch import EpochLoader

MIN_SAMPLES = 256


def batches(places: Places) -> Iterator[int]:
    with EpochLoader(
        places.folder / "cache", batch_size=BATCH, min_samples=MIN_SAMPLES
    ) as loader:
        while True:
            for batch in loader:
                yield len(batch["x"])
