"""The samples that all contestants deliver: three kinds, each a function of its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.noise import Array, random_samples

BATCH = 64
KIB = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """Samples ``x`` of one kind, each with a label ``y``, which is its number.

    Attributes:
        name: in the tables.
        dtype: of x.
        shape: of x; None where samples are arrays of one dimension that differ in size.
        sizes: least and most bytes of such a sample.
        samples: in all; a multiple of `BATCH`, and so is every shard.
        shards: how many; formats that have no shards of their own ignore it.
        step_seconds: of pure Python between two batches, in the loop that has steps.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    sizes: tuple[int, int]
    samples: int
    shards: int
    step_seconds: float

    @property
    def shard_samples(self) -> int:
        """Return how many samples a shard has."""
        return self.samples // self.shards

    @property
    def shuffled(self) -> int:
        """Return the samples in the buffer of a stream that shuffles by one: an eighth."""
        return self.samples // 8

    def shard(self, number: int) -> tuple[list[Array], Array]:
        """Return the values of a shard, and their labels, int64 [shard_samples]."""
        rng = np.random.default_rng([number, 5])
        count = self.shard_samples
        labels = np.arange(number * count, (number + 1) * count, dtype=np.int64)
        if self.shape is not None:
            return list(random_samples(rng, self.dtype, (count, *self.shape))), labels
        ends = np.cumsum(rng.integers(*self.sizes, count))
        values = random_samples(rng, self.dtype, (int(ends[-1]),))
        return np.split(values, ends[:-1]), labels

    def each_shard(self) -> Iterator[tuple[list[Array], Array]]:
        """Yield all of them in order."""
        return map(self.shard, range(self.shards))

    def all_values(self) -> list[Array]:
        """Return every sample, by label."""
        return [value for values, _ in self.each_shard() for value in values]


FULL = {
    case.name: case
    for case in (
        Case("256KiB", "<f4", (64, 1024), (0, 0), 2048, 8, 5e-3),
        Case("3KiB", "|u1", (32, 32, 3), (0, 0), 65_536, 4, 0.5e-3),
        Case("ragged", "|u1", None, (20 * KIB, 200 * KIB), 4608, 8, 2.5e-3),
    )
}


def quick(case: Case) -> Case:
    """Return a few of its samples: to see whether everything works."""
    samples = {"256KiB": 256, "3KiB": 4096, "ragged": 512}.get(case.name, case.samples)
    return replace(case, samples=samples, shards=2)
