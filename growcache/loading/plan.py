"""The order in which a pass visits the samples of a snapshot, and positions in it. Pure.

A pass shuffles the shards and cuts them into windows. Within a window, the samples of all
shards are permuted. Every shard is already a random mixture, so the shuffle of a window with a
few shards is as good as one of a whole epoch. Each gather finds many rows in one map.

Ranks that share a cache follow the same plan. Step s of an epoch takes the next rows for all of
them, a batch each. So they make equal numbers of steps and share the pages in memory. Separate
shards would need one window per rank.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from growcache.loading.framework import Integers
from growcache.loading.options import LoaderOptions
from growcache.seeding import generator_at

# Raise it if the order of a pass changes, because journals have positions in it.
ORDER_VERSION = 1

# A window is read ahead, mapped and verified as a whole. So memory bounds its bytes, the time
# to open it bounds its shards, and both bound its samples.
WINDOW_BYTES = 256_000_000
WINDOW_SAMPLES = 1 << 18
MIN_WINDOW_SHARDS = 4  # a smaller window would mix too little
MAX_WINDOW_SHARDS = 64
DIGEST_CHARACTERS = 32

SampleOrder = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    seed: int
    pass_number: int
    index: int
    first: int  # position of its first sample in the pass
    numbers: tuple[int, ...]  # shards, in visiting order
    counts: tuple[int, ...]  # samples of each
    shuffle: bool = True

    def __len__(self) -> int:
        return sum(self.counts)

    def order(self) -> SampleOrder:
        """Return the samples [n], numbered shard after shard, in four bytes each."""
        order = _smallest_dtype(np.arange(len(self)))
        if self.shuffle:
            generator_at(self.seed, "window", self.pass_number, self.index).shuffle(order)
        return order

    def starts(self) -> SampleOrder:
        """Return the first sample of each shard, and the end of the last one: [k + 1]."""
        return _smallest_dtype(np.cumsum((0, *self.counts)))


def locate_samples(order: SampleOrder, starts: SampleOrder) -> tuple[Integers, Integers]:
    """Return the index of each sample's shard, and its row in it: int64 [n] each."""
    places = np.searchsorted(starts, order, side="right") - 1
    return places, (order - starts[places]).astype(np.int64)


def _smallest_dtype(numbers: Integers) -> SampleOrder:
    last = numbers[-1] if len(numbers) else 0
    return numbers.astype(np.int32) if last <= np.iinfo(np.int32).max else numbers


def window_samples(sample_bytes: int, shard_samples: float = math.inf) -> int:
    """Return the number of samples that a window should have.

    >>> window_samples(256 * 1024), window_samples(64), window_samples(64, 1000)
    (976, 262144, 64000)
    """
    most = min(WINDOW_SAMPLES, MAX_WINDOW_SHARDS * shard_samples)
    return max(1, min(WINDOW_BYTES // max(1, sample_bytes), int(most)))


def shard_order(
    shards: Iterable[tuple[int, int]], *, seed: int, pass_number: int, shuffle: bool = True
) -> list[tuple[int, int]]:
    chosen = sorted(shard for shard in shards if shard[1] > 0)
    order = visit_order(len(chosen), seed=seed, pass_number=pass_number, shuffle=shuffle)
    return [chosen[i] for i in order.tolist()]


def visit_order(count: int, *, seed: int, pass_number: int, shuffle: bool = True) -> Integers:
    """Return the indices of the shards, sorted by number, in the visiting order of a pass."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    return generator_at(seed, "shards", pass_number).permutation(count)


def cut_windows(
    order: Sequence[tuple[int, int]],
    *,
    seed: int,
    pass_number: int,
    target_samples: int,
    shuffle: bool = True,
) -> tuple[Window, ...]:
    windows, first = [], 0
    for index, (start, stop) in enumerate(_window_edges([n for _, n in order], target_samples)):
        numbers, counts = zip(*order[start:stop], strict=True)
        windows.append(Window(seed, pass_number, index, first, numbers, counts, shuffle))
        first += sum(counts)
    return tuple(windows)


def _window_edges(counts: Sequence[int], target_samples: int) -> list[tuple[int, int]]:
    total, most = sum(counts), max(1, len(counts) // MIN_WINDOW_SHARDS)
    windows = min(most, max(1, round(total / target_samples)))
    ends = np.cumsum(counts, dtype=np.float64)
    shares = np.arange(1, windows) * (total / windows)
    right = np.searchsorted(ends, shares)
    left = np.maximum(right - 1, 0)
    nearest = np.where(shares - ends[left] < ends[right] - shares, left, right) + 1
    edges = sorted({0, *nearest.tolist(), len(counts)})
    return list(pairwise(edges))


def substitute_rows(good: npt.NDArray[np.bool_]) -> Integers:
    """Return the row to deliver for each row: the row itself if good, else a good row."""
    chosen = np.arange(len(good), dtype=np.int64)
    chosen[~good] = np.resize(np.flatnonzero(good), int((~good).sum()))
    return chosen


T = TypeVar("T")


class LazyPickle(Generic[T]):
    """A plan that is unpickled at first use.

    Unpickling the plan of ten thousand shards takes milliseconds, and may not be needed.
    """

    __slots__ = ("_data", "_value")

    def __init__(self, value: T) -> None:
        self._value: list[T] = [value]
        self._data = b""

    def get(self) -> T:
        if not self._value:
            self._value, self._data = [pickle.loads(self._data)], b""
        return self._value[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_lazily, (self._data or pickle.dumps(self.get(), protocol=5),)


def _unpickle_lazily(data: bytes) -> LazyPickle[Any]:  # called by pickle
    made = LazyPickle[Any](None)
    made._value, made._data = [], data
    return made


class PlannedShard(NamedTuple):
    """A shard in a plan.

    A substitute is planned with the samples of the shard that it replaces. In a loaded state
    the digest may be only a prefix, or empty.
    """

    number: int
    samples: int
    digest: str

    @property
    def is_named(self) -> bool:
        return len(self.digest) == DIGEST_CHARACTERS


class RestDigest(NamedTuple):
    """One digest of the digests of all shards from ``first`` on; empty if unknown."""

    first: int
    digest: str


@dataclass(frozen=True, slots=True)
class PassPlan:
    number: int
    shards: tuple[PlannedShard, ...]
    window_samples: int
    rest: RestDigest | None = None  # replaces digests that a loaded state omits

    def window_edges(self) -> list[tuple[int, int]]:
        """Return the first and the end of each window's shards."""
        return _window_edges([shard.samples for shard in self.shards], self.window_samples)

    def windows(self, options: LoaderOptions) -> tuple[Window, ...]:
        return cut_windows(
            [(shard.number, shard.samples) for shard in self.shards],
            seed=options.seed,
            pass_number=self.number,
            target_samples=self.window_samples,
            shuffle=options.is_shuffled,
        )

    def __len__(self) -> int:
        return sum(shard.samples for shard in self.shards)


class PassPosition(NamedTuple):
    pass_number: int
    position: int  # number of earlier rows in the plan
    corrupt: tuple[int, ...] = ()  # shards of its window that could not be read
