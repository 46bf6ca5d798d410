"""Shuffled batches out of a warm cache: the limits, the loaders, torch's DataLoader.

Every variant delivers the same samples, all of them once a round, in batches whose one
element the loop looks at. `memcpy` copies rows of an array in memory, one by one, into
recycled buffers that rotate (into a single one it would run in the CPU's cache); `take` is
one `numpy.take` per batch of the same rows into the same buffers. Nothing that shuffles
can be faster than the better of both by much. `DataLoader` reads `np.load(mmap_mode="r")`, the
same shards as .npy files, with two persistent workers and with none; other ways of using it,
and other libraries, are in `benchmarks.peers`. Whole epochs are timed, the switch to
them included, each right behind one that is not: what a loader read ahead while others ran
would otherwise be taken for speed.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import median, parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache, random_samples
from growcache.loading.loader import Loader
from growcache.numpy import EpochLoader as NumpyLoader
from growcache.schema import Array
from growcache.torch import EpochLoader as TorchLoader

BATCH = 64
ROTATED = 8  # buffers of the baseline; about as many as a prefetching loader has in flight
GOAL_DATALOADER = 2.0
FORMATS = ("tfrecord", "npy")
VARIANTS = [
    "memcpy",
    "take",
    *(f"{k} {f}" for k in ("torch", "numpy") for f in FORMATS),
    "DataLoader 0",
    "DataLoader 2",
]


@dataclass(frozen=True, slots=True)
class Case:
    """Samples of one size.

    Attributes:
        name: in the table.
        dtype: of a sample.
        shape: of a sample.
        shards: how many.
        samples: in each; about 64 MB of them.
        goal: the limit that the loaders are held to, and how near they come.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: int
    samples: int
    goal: tuple[str, float]

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of one."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


FULL = [
    Case("256 KiB", "<f4", (64, 1024), 16, 256, ("memcpy", 0.8)),
    Case("3 KiB", "|u1", (32, 32, 3), 8, 20_480, ("take", 0.6)),
]
QUICK = [
    Case("256 KiB", "<f4", (64, 1024), 4, 64, ("memcpy", 0.8)),
    Case("3 KiB", "|u1", (32, 32, 3), 4, 2048, ("take", 0.6)),
]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """The DataLoader's data set: rows of .npy shards, mapped in each worker.

    It is pickled as paths, because a map would be pickled as its content.
    """

    def __init__(self, paths: list[Path], samples: int) -> None:
        self._paths = paths
        self._samples = samples
        self._maps: list[Array] | None = None

    def __len__(self) -> int:
        return len(self._paths) * self._samples

    def __getitem__(self, i: int) -> torch.Tensor:
        if self._maps is None:
            # torch says that the map is read-only, once per worker.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self._maps = [np.load(path, mmap_mode="r") for path in self._paths]
        shard, row = divmod(i, self._samples)
        return torch.from_numpy(self._maps[shard][row])


def copied(
    rows: Array, copy: Callable[[Array, Array, Array], object]
) -> Iterator[torch.Tensor]:
    """Yield one round of shuffled batches, by ``copy(rows, chosen, out)``."""
    buffers = [np.zeros((BATCH, *rows.shape[1:]), rows.dtype) for _ in range(ROTATED)]
    order = np.random.default_rng(0).permutation(len(rows))
    for k in range(len(rows) // BATCH):
        out = buffers[k % ROTATED]
        copy(rows, order[k * BATCH : (k + 1) * BATCH], out)
        yield torch.from_numpy(out)


def memcpy(rows: Array, chosen: Array, out: Array) -> None:
    """Copy row by row."""
    for i, row in enumerate(chosen.tolist()):
        out[i] = rows[row]


def take(rows: Array, chosen: Array, out: Array) -> None:
    """Copy all rows by one operation; "raise" would copy them twice."""
    np.take(rows, chosen, axis=0, out=out, mode="clip")


def consume(batches: Iterator[Any]) -> int:
    """Look at one element of every batch; returns how many samples came."""
    samples = 0
    for batch in batches:
        x = batch["x"] if isinstance(batch, dict) else batch
        samples += len(x)
        x[-1].reshape(-1)[-1].item()
    return samples


def prepare(case: Case, directory: Path) -> tuple[Array, list[Path]]:
    """Write a cache of each format and .npy shards, and return the same rows in memory."""
    rng = np.random.default_rng(0)
    kept, paths = [], []
    with ExitStack() as stack:
        caches = [
            stack.enter_context(
                SyntheticCache(directory / name, case.dtype, case.shape, cache_format=name)
            )
            for name in FORMATS
        ]
        for number in range(case.shards):
            shard = random_samples(rng, case.dtype, (case.samples, *case.shape))
            for cache in caches:
                cache.add_arrays(number, shard)
            paths.append(directory / f"{number}.npy")
            np.save(paths[-1], shard)
            kept.append(shard)
    return np.concatenate(kept), paths


def measure(
    case: Case, directory: Path, rounds: int, variants: list[str]
) -> dict[str, list[float]]:
    """Return seconds per round of every variant, interleaved."""
    rows, paths = prepare(case, directory)
    with ExitStack() as stack:
        programs: dict[str, Callable[[], Iterator[Any]]] = {
            "memcpy": lambda: copied(rows, memcpy),
            "take": lambda: copied(rows, take),
        }
        kinds: dict[str, type[Loader]] = {"torch": TorchLoader, "numpy": NumpyLoader}
        for name in FORMATS:
            for kind, made in kinds.items():
                loader = made(directory / name, batch_size=BATCH, min_samples=BATCH)
                programs[f"{kind} {name}"] = stack.enter_context(loader).__iter__
        for workers in (0, 2):
            dataloader = torch.utils.data.DataLoader(
                Rows(paths, case.samples),
                batch_size=BATCH,
                shuffle=True,
                num_workers=workers,
                persistent_workers=workers > 0,
                drop_last=True,
            )
            programs[f"DataLoader {workers}"] = dataloader.__iter__
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for repetition in range(rounds + 1):  # the first warms up
            for name in variants:
                consume(programs[name]())
                began = time.perf_counter()
                samples = consume(programs[name]())
                seconds = time.perf_counter() - began
                assert samples == len(rows) // BATCH * BATCH, (name, samples)
                if repetition:
                    taken[name].append(seconds)
    return taken


def table(case: Case, taken: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield a line per variant; ratios are medians of ratios within a round."""
    samples = case.shards * case.samples // BATCH * BATCH
    for name, seconds in taken.items():
        rates = [samples / s for s in seconds]
        line: dict[str, Any] = {
            "samples of": case.name,
            "loader": name,
            "MB/s": median([rate * case.sample_bytes / 1e6 for rate in rates]),
            "samples/s": median(rates),
        }
        for other in ("memcpy", "take", "DataLoader 0", "DataLoader 2"):
            if other in taken:
                ratios = [b / s for b, s in zip(taken[other], seconds, strict=True)]
                line[f"x {other}"] = median(ratios)
        limit, goal = case.goal
        ours = "DataLoader" not in name and " " in name
        if ours and limit in taken:
            line["goal"] = verdict(line[f"x {limit}"], goal, at_most=False)
        if ours and "DataLoader 2" in taken:
            found = line["x DataLoader 2"]
            line["DataLoader 2 goal"] = verdict(found, GOAL_DATALOADER, at_most=False)
        yield line


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", choices=VARIANTS, help="variants to run")
    given = arguments.parse_args()
    variants = given.only or VARIANTS
    rows: list[dict[str, Any]] = []
    for case in QUICK if given.quick else FULL:
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="loading-") as place:
            taken = measure(
                case, Path(place), given.rounds or (2 if given.quick else 7), variants
            )
            rows += table(case, taken)
    report(f"Shuffled batches of {BATCH} from a warm cache", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
