"""Shuffled batches of ragged samples from a warm cache: memcpy and the loaders.

Every variant delivers the same samples, all of them once an epoch, in batches of which the
loop looks at one element. `memcpy` copies values out of memory, one by one, into recycled
buffers that rotate (into a single one it would run in the CPU's cache); nothing that
shuffles can be faster by much. `pad` moves more bytes than memcpy: zeros up to the longest
value of a batch; it is compared by the bytes of the values all the same.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import median, parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache, random_samples
from growcache.loading.loader import Loader
from growcache.numpy import EpochLoader as NumpyLoader
from growcache.schema import Array
from growcache.torch import EpochLoader as TorchLoader

BATCH = 64
ROTATED = 8  # buffers of the baseline; about as many as a prefetching loader has in flight
GOAL_MEMCPY = 0.5
EPOCHS = 4  # in a round, because the first batches of an epoch are made before it is timed
FORMATS = ("tfrecord", "npy")


@dataclass(frozen=True, slots=True)
class Case:
    """Samples whose sizes are equally likely between two bounds.

    Attributes:
        name: in the table.
        dtype: of a sample, which has one dimension.
        sizes: least and most bytes.
        shards: how many, each of about 64 MB.
        samples: in each.
        goal: whether the goal is meant for such sizes.
    """

    name: str
    dtype: str
    sizes: tuple[int, int]
    shards: int
    samples: int
    goal: bool = True


KIB = 1024
FULL = [
    Case("20-200 KiB f4", "<f4", (20 * KIB, 200 * KIB), 16, 576),
    Case("20-200 KiB u1", "|u1", (20 * KIB, 200 * KIB), 16, 576),
    Case("2-20 KiB f4", "<f4", (2 * KIB, 20 * KIB), 8, 5760, goal=False),
    Case("0.1-1 KiB f4", "<f4", (100, 1000), 4, 60_000, goal=False),
]
QUICK = [
    Case("20-200 KiB f4", "<f4", (20 * KIB, 200 * KIB), 4, 512),
    Case("0.1-1 KiB f4", "<f4", (100, 1000), 4, 20_000, goal=False),
]


def rotated(values: list[Array]) -> list[Array]:
    """Return buffers for any batch, all their pages in memory."""
    most = BATCH * max(len(value) for value in values)
    return [np.ones(most, values[0].dtype) for _ in range(ROTATED)]


def memcpy(values: list[Array], buffers: list[Array]) -> Iterator[Array]:
    """Yield one epoch of shuffled batches, copied value by value."""
    order = np.random.default_rng(0).permutation(len(values))
    for k in range(len(values) // BATCH):
        out, end = buffers[k % ROTATED], 0
        for i in order[k * BATCH : (k + 1) * BATCH].tolist():
            value = values[i]
            out[end : end + len(value)] = value
            end += len(value)
        yield out[:end]


def consume(batches: Iterator[Any]) -> int:
    """Look at one element of every batch; returns how many batches came."""
    count = 0
    for batch in batches:
        x = batch["x"] if isinstance(batch, dict) else batch
        x.reshape(-1)[-1].item()
        count += 1
    return count


def prepare(case: Case, directory: Path) -> list[Array]:
    """Write a cache of each format, and return the same values in memory."""
    rng = np.random.default_rng(0)
    item = np.dtype(case.dtype).itemsize
    with ExitStack() as stack:
        caches = [
            stack.enter_context(
                SyntheticCache(directory / name, case.dtype, (None,), cache_format=name)
            )
            for name in FORMATS
        ]
        kept: list[Array] = []
        for number in range(case.shards):
            sizes = rng.integers(*case.sizes, case.samples) // item
            ends = np.cumsum(sizes)
            values = np.split(random_samples(rng, case.dtype, (int(ends[-1]),)), ends[:-1])
            for cache in caches:
                cache.add_arrays(number, values)
            kept += values
    return kept


def loaders(directory: Path, stack: ExitStack) -> dict[str, Loader]:
    """Return every loader that is measured, by name."""

    def made(kind: type[Loader], cache_format: str, ragged: Any) -> Loader:
        path = directory / cache_format
        return stack.enter_context(
            kind(path, batch_size=BATCH, min_samples=BATCH, ragged=ragged)
        )

    return {
        "torch offsets tfrecord": made(TorchLoader, "tfrecord", "offsets"),
        "torch offsets npy": made(TorchLoader, "npy", "offsets"),
        "torch pad tfrecord": made(TorchLoader, "tfrecord", "pad"),
        "numpy offsets tfrecord": made(NumpyLoader, "tfrecord", "offsets"),
        "numpy offsets npy": made(NumpyLoader, "npy", "offsets"),
        "numpy pad npy": made(NumpyLoader, "npy", "pad"),
    }


def measure(case: Case, directory: Path, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of an epoch, and its seconds by every variant, interleaved."""
    values = prepare(case, directory)
    with ExitStack() as stack:
        buffers = rotated(values)
        runs: dict[str, Callable[[], Iterator[Any]]] = {
            "memcpy": lambda: memcpy(values, buffers)
        }
        for name, loader in loaders(directory, stack).items():
            runs[name] = loader.__iter__
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                consume(run())  # or what was read ahead meanwhile would be taken for speed
                began = time.perf_counter()
                batches = sum(consume(run()) for _ in range(EPOCHS))
                seconds = (time.perf_counter() - began) / EPOCHS
                assert batches == len(values) // BATCH * EPOCHS, (name, batches)
                if number:  # the first round maps and checks the shards
                    taken[name].append(seconds)
    return sum(value.nbytes for value in values), taken


def table(case: Case, nbytes: int, taken: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield a line per variant; ratios are medians over rounds."""
    for name, seconds in taken.items():
        line: dict[str, Any] = {
            "samples": case.name,
            "variant": name,
            "MB/s": median([nbytes / s / 1e6 for s in seconds]),
            "samples/s": median([case.shards * case.samples / s for s in seconds]),
            "x memcpy": median([m / s for m, s in zip(taken["memcpy"], seconds, strict=True)]),
        }
        if case.goal and name != "memcpy" and "pad" not in name:
            line["goal"] = verdict(line["x memcpy"], GOAL_MEMCPY, at_most=False)
        yield line


def main() -> int:
    arguments = parser(__doc__)
    given = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for case in QUICK if given.quick else FULL:
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="ragged-") as place:
            rounds = given.rounds or (2 if given.quick else 7)
            rows += table(case, *measure(case, Path(place), rounds))
    report(f"Shuffled batches of {BATCH} ragged samples from a warm cache", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
