"""Shuffled batches out of a warm cache: memcpy, EpochLoader, torch's DataLoader.

Every variant delivers the same samples, all of them once a round, in batches whose one
element the loop looks at. `memcpy` copies rows of an array in memory, one by one, into
recycled buffers that rotate (into a single one it would run in the CPU's cache); nothing
that shuffles can be faster by much. `DataLoader` has two persistent workers over
`np.load(mmap_mode="r")`, the same shards as .npy files. Whole rounds are timed, epoch
switches included.
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
from growcache.schema import Array
from growcache.torch import EpochLoader

BATCH = 64
ROTATED = 8  # buffers of the baseline; about as many as a prefetching loader has in flight
GOAL_MEMCPY, GOAL_DATALOADER = 0.4, 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """Samples of one size.

    Attributes:
        name: in the table.
        dtype: of a sample.
        shape: of a sample.
        shards: how many.
        samples: in each; about 64 MB of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: int
    samples: int

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of one."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


FULL = [
    Case("256 KiB", "<f4", (64, 1024), 16, 256),
    Case("3 KiB", "|u1", (32, 32, 3), 8, 20_480),
]
QUICK = [
    Case("256 KiB", "<f4", (64, 1024), 4, 64),
    Case("3 KiB", "|u1", (32, 32, 3), 4, 2048),
]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """The DataLoader's data set: rows of .npy shards, mapped in each worker.

    It travels as paths, for a pickled map would travel as its content.
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


def memcpy(rows: Array) -> Iterator[torch.Tensor]:
    """Yield one round of shuffled batches, copied row by row."""
    buffers = [np.zeros((BATCH, *rows.shape[1:]), rows.dtype) for _ in range(ROTATED)]
    order = np.random.default_rng(0).permutation(len(rows))
    for k in range(len(rows) // BATCH):
        out = buffers[k % ROTATED]
        for i, row in enumerate(order[k * BATCH : (k + 1) * BATCH].tolist()):
            out[i] = rows[row]
        yield torch.from_numpy(out)


def consume(batches: Iterator[Any]) -> int:
    """Look at one element of every batch; returns how many samples came."""
    samples = 0
    for batch in batches:
        x = batch["x"] if isinstance(batch, dict) else batch
        samples += len(x)
        x[-1].view(-1)[-1].item()
    return samples


def prepare(case: Case, directory: Path) -> tuple[Array, list[Path]]:
    """Write the cache and the .npy shards, and return the same rows in memory."""
    rng = np.random.default_rng(0)
    kept, paths = [], []
    with SyntheticCache(directory / "cache", case.dtype, case.shape) as cache:
        for number in range(case.shards):
            shard = random_samples(rng, case.dtype, (case.samples, *case.shape))
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
        loader = stack.enter_context(
            EpochLoader(directory / "cache", batch_size=BATCH, min_samples=BATCH)
        )
        dataloader = torch.utils.data.DataLoader(
            Rows(paths, case.samples),
            batch_size=BATCH,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            drop_last=True,
        )
        programs: dict[str, Callable[[], Iterator[Any]]] = {
            "memcpy": lambda: memcpy(rows),
            "EpochLoader": lambda: iter(loader),
            "DataLoader": lambda: iter(dataloader),
        }
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for repetition in range(rounds + 1):  # the first warms up
            for name in variants:
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
        for other in ("memcpy", "DataLoader"):
            if other in taken:
                ratios = [b / s for b, s in zip(taken[other], seconds, strict=True)]
                line[f"x {other}"] = median(ratios)
        if name == "EpochLoader" and len(taken) == 3:
            line["memcpy goal"] = verdict(line["x memcpy"], GOAL_MEMCPY, at_most=False)
            line["DataLoader goal"] = verdict(
                line["x DataLoader"], GOAL_DATALOADER, at_most=False
            )
        yield line


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", metavar="LOADER", help="variants to run")
    given = arguments.parse_args()
    variants = given.only or ["memcpy", "EpochLoader", "DataLoader"]
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
