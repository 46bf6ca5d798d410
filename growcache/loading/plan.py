"""The order in which a pass visits the samples of a snapshot. Pure: values in, values out.

A pass shuffles the shards and cuts them into windows of about equal size; inside a
window the samples of all its shards are permuted. Every shard is a random mixture
already, so a window of a few is shuffled as well as a whole epoch would be, while each
gather still finds many rows in one map.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from growcache.seeding import generator

# A window is read ahead, mapped and verified as a whole, so its bytes are a matter of memory,
# its shards one of what it takes to begin, and its samples one of both.
WINDOW_BYTES = 256_000_000
WINDOW_SAMPLES = 1 << 18
WINDOW_SHARDS = 4  # a window of fewer would mix too little
MOST_SHARDS = 64

Integers = npt.NDArray[np.int64]
Order = npt.NDArray[np.int32] | npt.NDArray[np.int64]


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

    def order(self) -> Order:
        """Return which sample comes when, numbered shard after shard: [n], see `located`.

        Four bytes per sample, for a window of small ones holds many.
        """
        order = _compact(np.arange(len(self)))
        if self.shuffle:
            generator(self.seed, "window", self.pass_number, self.index).shuffle(order)
        return order

    def starts(self) -> Order:
        """Return the number of the first sample of each shard, and behind the last: [k + 1]."""
        return _compact(np.cumsum((0, *self.counts)))


def located(order: Order, starts: Order) -> tuple[Integers, Integers]:
    """Return where samples lie: int64 [n], the place of the shard; int64 [n], the row there.

    Args:
        order: [n], samples numbered shard after shard.
        starts: [k + 1], as `Window.starts`.
    """
    places = np.searchsorted(starts, order, side="right") - 1
    return places, (order - starts[places]).astype(np.int64)


def _compact(numbers: Integers) -> Order:
    """Return ascending numbers in half the memory, where they fit."""
    last = numbers[-1] if len(numbers) else 0
    return numbers.astype(np.int32) if last <= np.iinfo(np.int32).max else numbers


def window_samples(sample_bytes: int, shard_samples: float = math.inf) -> int:
    """Return how many samples a window should hold.

    Args:
        sample_bytes: of each.
        shard_samples: in a shard, on average.

    >>> window_samples(256 * 1024), window_samples(64), window_samples(64, 1000)
    (976, 262144, 64000)
    """
    most = min(WINDOW_SAMPLES, MOST_SHARDS * shard_samples)
    return max(1, min(WINDOW_BYTES // max(1, sample_bytes), int(most)))


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
