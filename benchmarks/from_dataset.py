"""A Dataset of slow items: torch's DataLoader against `EpochLoader.from_dataset`.

Both get the same Dataset, whose items take 50 ms each, as a request to a distant store does. The
loader of growcache is measured once its cache holds all of it, and, as `filling`, from a cold start
until then: the rate at which samplers call the Dataset.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import median, parser, report, verdict
from growcache.cache.status import read_status
from growcache.torch import EpochLoader

ITEM_SECONDS = 0.05
BATCH = 32
WORKERS = 2
GOAL = 10.0
SHAPE = (16, 1024)  # float32, 64 KiB


class SlowItems(Dataset[Any]):
    """Items that are waited for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(ITEM_SECONDS)
        values = np.random.default_rng(index).random(SHAPE, np.float32)
        return torch.from_numpy(values), index


def rate(batches: Iterable[Any]) -> float:
    """Return the samples a second of one epoch, from its first batch request to its last batch."""
    began, samples = time.perf_counter(), 0
    for _, index in batches:
        samples += len(index)
    return samples / (time.perf_counter() - began)


def filled(path: Path, count: int, seconds: float = 300.0) -> float:
    """Return the seconds until all is cached."""
    began = time.perf_counter()
    while read_status(path).samples < count:
        if time.perf_counter() - began > seconds:
            raise SystemExit(f"the cache was not filled in {seconds:.0f} s")
        time.sleep(0.05)
    return time.perf_counter() - began


def measure(count: int, rounds: int, place: Path) -> list[dict[str, Any]]:
    """Return a line per variant."""
    make = functools.partial(SlowItems, count)
    by_hand = DataLoader(make(), BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)
    began = time.perf_counter()
    options: dict[str, Any] = {"names": ["x", "i"], "as_tuple": ("x", "i")}
    with EpochLoader.from_dataset(
        make, place, max_bytes="4GB", workers=WORKERS, batch_size=BATCH, **options
    ) as loader:
        next(iter(loader))  # which waits for `min_samples`
        filled(place, count)
        filling = count / (time.perf_counter() - began)
        rate(loader)  # maps and checks the shards
        pairs = [(rate(by_hand), rate(loader)) for _ in range(rounds)]
    ratio = median([ours / theirs for theirs, ours in pairs])
    return [
        {
            "variant": f"DataLoader, {WORKERS} workers",
            "samples/s": median([p[0] for p in pairs]),
        },
        {"variant": "growcache, filling", "samples/s": filling},
        {
            "variant": "growcache, cached",
            "samples/s": median([p[1] for p in pairs]),
            "x DataLoader": ratio,
            "goal": verdict(ratio, GOAL, at_most=False),
        },
    ]


def main() -> int:
    given = parser(__doc__).parse_args()
    count, rounds = (512, 1) if given.quick else (2048, given.rounds or 3)
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="dataset-") as place:
        rows = measure(count, rounds, Path(place) / "cache")
    report(f"{count} items of {ITEM_SECONDS * 1000:.0f} ms each", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
