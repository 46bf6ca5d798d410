"""Reads epochs of shuffled batches, as a training loop would: with Ray Data in three ways, or from a growing cache.

The program of one reader; the benchmark `ray_engine` starts it, and reads the line that it prints.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from benchmarks.ray_objects import (
    BUCKET,
    HEADER_BYTES,
    OBJECT_WINDOWS,
    WINDOW,
    WINDOW_BYTES,
    key,
)
from benchmarks.servers import KEY, SECRET, Server

BATCH = 64
BUFFER_WINDOWS = 1024  # of a local shuffle
AHEAD = 4  # batches
MIN_SAMPLES = 1000  # growcache's default

Epochs = Iterable[Iterable[Any]]  # of batches of windows


def read_files(endpoint: str, objects: int, epochs: int) -> Epochs:
    """Objects in a new order in each epoch, and a buffer that is shuffled."""
    return _shuffled(_dataset(endpoint, objects, shuffle="files"), epochs)


def read_kept(endpoint: str, objects: int, epochs: int) -> Epochs:
    """The same, but read once and kept in the object stores."""
    kept = _dataset(endpoint, objects).materialize()
    return (
        epoch for _ in range(epochs) for epoch in _shuffled(kept.randomize_block_order(), 1)
    )


def read_windows(endpoint: str, objects: int, epochs: int) -> Epochs:
    """Windows in a random order over all objects, each by a request of its own; one dataset for all epochs.

    A dataset for each would start its actors anew.
    """
    import ray

    rng, windows = np.random.default_rng(0), objects * OBJECT_WINDOWS
    orders = np.concatenate([rng.permutation(windows) for _ in range(epochs)])
    blocks = np.array_split(orders, len(orders) // (4 * BATCH))
    fetched = ray.data.from_numpy(blocks).map_batches(
        FetchWindows, fn_constructor_args=(endpoint,), batch_size=BATCH, concurrency=2
    )
    yield _columns(fetched.iter_batches(batch_size=BATCH, prefetch_batches=AHEAD))


class FetchWindows:
    """An actor of Ray Data that reads windows by range, many at a time."""

    def __init__(self, endpoint: str) -> None:
        self._store = Server("nginx", endpoint).bucket(BUCKET)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the windows of these numbers."""
        return {"data": asyncio.run(self._fetch(batch["data"]))}

    async def _fetch(self, numbers: Any) -> Any:
        return np.stack(await asyncio.gather(*map(self._window, numbers.tolist())))

    async def _window(self, number: int) -> Any:
        place, within = divmod(number, OBJECT_WINDOWS)
        start = HEADER_BYTES + within * WINDOW_BYTES
        data = await self._store.get_range_async(key(place), start=start, length=WINDOW_BYTES)
        return np.frombuffer(memoryview(data), np.float32).reshape(WINDOW)


def _dataset(endpoint: str, objects: int, **options: Any) -> Any:
    import pyarrow.fs
    import ray

    host = endpoint.removeprefix("http://")
    bucket = pyarrow.fs.S3FileSystem(
        access_key=KEY,
        secret_key=SECRET,
        endpoint_override=host,
        scheme="http",
        region="us-east-1",
    )
    paths = [f"{BUCKET}/{key(number)}" for number in range(objects)]
    return ray.data.read_numpy(paths, filesystem=bucket, **options)


def _shuffled(dataset: Any, epochs: int) -> Epochs:
    for _ in range(epochs):
        yield _columns(
            dataset.iter_batches(
                batch_size=BATCH,
                prefetch_batches=AHEAD,
                local_shuffle_buffer_size=BUFFER_WINDOWS,
            )
        )


def _columns(batches: Iterable[Any]) -> Iterator[Any]:
    return (batch["data"] for batch in batches)


def read_growing(cache: str, objects: int, epochs: int) -> Epochs:
    """Epochs over what the cache holds, from its first samples on."""
    return _cached(cache, objects * OBJECT_WINDOWS * epochs, MIN_SAMPLES)


def read_whole(cache: str, objects: int, epochs: int) -> Epochs:
    """Epochs over all windows, once the cache has them."""
    windows = objects * OBJECT_WINDOWS
    return _cached(cache, windows * epochs, windows)


def _cached(cache: str, samples: int, min_samples: int) -> Epochs:
    from growcache.numpy import EpochLoader

    left = samples
    with EpochLoader(
        cache, batch_size=BATCH, min_samples=min_samples, drop_last=False
    ) as loader:
        while left > 0:
            for batch in loader:
                yield [batch["x"]]
                left -= len(batch["x"])
                if left <= 0:
                    return


KEPT = "read_numpy, materialized"
WAYS: dict[str, Callable[[str, int, int], Epochs]] = {
    "read_numpy": read_files,
    KEPT: read_kept,
    "map_batches of range reads": read_windows,
    "growcache, growing": read_growing,
    "growcache, whole": read_whole,
}


def main() -> None:
    way, where, ray_address, *numbers = sys.argv[1:]
    objects, epochs, began = int(numbers[0]), int(numbers[1]), float(numbers[2])
    if not way.startswith("growcache"):
        _connect(ray_address)
    seen = np.zeros(objects * OBJECT_WINDOWS, bool)
    first, samples = 0.0, 0
    for epoch in WAYS[way](where, objects, epochs):
        for windows in epoch:
            first = first or time.time() - began
            seen[np.asarray(windows[:, 0, 0]).astype(int)] = True
            samples += len(windows)
    found = {"first": first, "seconds": time.time() - began}
    print(json.dumps({**found, "samples": samples, "different": int(seen.sum())}), flush=True)


def _connect(address: str) -> None:
    import ray
    from ray.data import DataContext

    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
