"""The order in which a pass visits the samples of a snapshot. Pure: values in, values out.

A pass shuffles the shards and cuts them into windows of about equal size; inside a
window the samples of all its shards are permuted. Every shard is a random mixture
already, so a window of a few is shuffled as well as a whole epoch would be, while each
gather still finds many rows in one map.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from growcache.seeding import generator

WINDOW_BYTES = 256_000_000
WINDOW_SHARDS = 4  # a window of fewer would mix too little

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """Shards that are shuffled together.

    Attributes:
        seed: of the loader.
        pass_number: which pass over the snapshot this is part of.
        index: of the window in its pass.
        first: position in the pass of the window's first sample.
        numbers: its shards, in the order in which they were drawn.
        counts: samples of each of them.
        shuffle: whether the samples are permuted.
    """

    seed: int
    pass_number: int
    index: int
    first: int
    numbers: tuple[int, ...]
    counts: tuple[int, ...]
    shuffle: bool = True

    def __len__(self) -> int:
        return sum(self.counts)

    def order(self) -> tuple[Integers, Integers]:
        """Return which shard (as its place in ``numbers``) and which row comes when."""
        starts = np.cumsum((0, *self.counts), dtype=np.int64)
        places = np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts)
        rows = np.arange(len(self), dtype=np.int64) - starts[places]
        if not self.shuffle:
            return places, rows
        rng = generator(self.seed, "window", self.pass_number, self.index)
        chosen = rng.permutation(len(self))
        return places[chosen], rows[chosen]


def window_samples(sample_bytes: int) -> int:
    """Return how many samples of ``sample_bytes`` a window should hold.

    >>> window_samples(256 * 1024)
    976
    """
    return max(1, WINDOW_BYTES // max(1, sample_bytes))


def plan_pass(
    shards: Iterable[tuple[int, int]],
    *,
    seed: int,
    pass_number: int,
    target_samples: int,
    shuffle: bool = True,
) -> tuple[Window, ...]:
    """Return the windows of one pass over all samples.

    The windows hold the same number of samples to within one shard, and about
    ``target_samples``, or as many shards as it takes to mix; the plan is a function of
    the set of shards, whatever order they come in.

    Args:
        shards: (number, samples) of each shard; those without samples are left out.
        seed: of the loader.
        pass_number: 0, 1, …; each pass has an order of its own.
        target_samples: in a window.
        shuffle: False gives shards by number and rows as they lie.
    """
    order = visiting_order(shards, seed=seed, pass_number=pass_number, shuffle=shuffle)
    return cut(
        order,
        seed=seed,
        pass_number=pass_number,
        target_samples=target_samples,
        shuffle=shuffle,
    )


def visiting_order(
    shards: Iterable[tuple[int, int]], *, seed: int, pass_number: int, shuffle: bool = True
) -> list[tuple[int, int]]:
    """Return the (number, samples) of shards with samples in the order of their visit."""
    chosen = sorted(shard for shard in shards if shard[1] > 0)
    if not shuffle:
        return chosen
    order = generator(seed, "shards", pass_number).permutation(len(chosen))
    return [chosen[i] for i in order]


def cut(
    order: Sequence[tuple[int, int]],
    *,
    seed: int,
    pass_number: int,
    target_samples: int,
    shuffle: bool = True,
) -> tuple[Window, ...]:
    """Return the windows of shards that are in the order of their visit; see `plan_pass`."""
    windows, first = [], 0
    for index, (start, stop) in enumerate(_cuts([n for _, n in order], target_samples)):
        numbers, counts = zip(*order[start:stop], strict=True)
        windows.append(Window(seed, pass_number, index, first, numbers, counts, shuffle))
        first += sum(counts)
    return tuple(windows)


def _cuts(counts: Sequence[int], target_samples: int) -> list[tuple[int, int]]:
    """Cut a row of shards where the running sum comes nearest to equal shares."""
    total, most = sum(counts), max(1, len(counts) // WINDOW_SHARDS)
    windows = min(most, max(1, round(total / target_samples)))
    ends = np.cumsum(counts, dtype=np.float64)
    shares = np.arange(1, windows) * (total / windows)
    right = np.searchsorted(ends, shares)
    left = np.maximum(right - 1, 0)
    nearest = np.where(shares - ends[left] < ends[right] - shares, left, right) + 1
    edges = sorted({0, *nearest.tolist(), len(counts)})
    return list(pairwise(edges))
