"""How often each stratum is drawn: shares of the draws, and which draw is whose.

Draws are dealt in blocks. Each block has the same number of draws of every stratum, in a
random order of its own ("permuted blocks", as trials are randomised: Matts & Lachin, Controlled
Clinical Trials 9, 1988). So the shares are exact from block to block, no stratum is drawn by
turns, and where a draw stands follows from its number alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from growcache.errors import ConfigError
from growcache.sampling.draws import Ints
from growcache.seeding import generator

Floats = npt.NDArray[np.float64]

BLOCK_DRAWS = 1024  # of a block, or
DRAWS_PER_STRATUM = 32  # on average, where that is more: it bounds the error of a share
DRAWS_OF_THE_LEAST = 128  # of a source; it bounds the error of its share to 0.4 %
MOST_BLOCK_DRAWS = 1 << 18  # which takes milliseconds to permute
MOST_STRATA = 100_000
_BLOCKS_IN_MEMORY = 4
_SHOWN = 5
_POWERS = {"balanced": 0.0, "natural": 1.0, "sqrt": 0.5}  # of the number of parts

Weights = str | Mapping[str, float]


def shares(names: Sequence[str], parts: Ints, weights: Weights) -> Floats:
    """Return the share of the draws that each stratum shall have; they add up to 1.

    Args:
        names: of the strata.
        parts: that each has; none of a stratum that cannot be drawn now.
        weights: ``balanced``: all alike; ``natural``: as many as it has parts; ``sqrt``: by the
            square root of that; or a number for each by its name, 1 where it is not named.

    Raises:
        ConfigError: a stratum is named that does not exist, or nothing is left to draw.

    >>> shares(["a", "b"], np.array([100, 900]), "sqrt").round(2).tolist()
    [0.25, 0.75]
    """
    if isinstance(weights, str):
        wanted = np.power(np.asarray(parts, np.float64), _POWERS[weights]) * (parts > 0)
    else:
        _refuse_unknown(names, weights)
        wanted = np.array([float(weights.get(name, 1.0)) for name in names]) * (parts > 0)
    if not wanted.sum():
        raise ConfigError(
            "sampling.strata.weights: expected a stratum with a weight above 0 that has samples, "
            f"found none among {_named(names)}"
        )
    found: Floats = wanted / wanted.sum()
    return found


def _refuse_unknown(names: Sequence[str], weights: Mapping[str, float]) -> None:
    known = set(names)
    if unknown := [name for name in weights if name not in known]:
        raise ConfigError(
            f"sampling.strata.weights: there is no stratum {_named(unknown)}; the source has "
            f"{_named(sorted(known))}"
        )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def mixture(weights: Sequence[float], parts: Ints, per_visit: Floats) -> Floats:
    """Return the share of the draws that each source shall have; they add up to 1.

    Args:
        weights: what samples are to be mixed by.
        parts: that each source has.
        per_visit: samples that a visit yields: the more, the fewer visits.

    >>> mixture([1.0, 1.0], np.array([9, 9]), np.array([1.0, 3.0])).tolist()
    [0.75, 0.25]
    """
    wanted = np.asarray(weights) / per_visit * (parts > 0)
    found: Floats = wanted / wanted.sum()
    return found


def block_of(wanted: Floats) -> int:
    """Return of how many draws a block must be for the smallest share to come out.

    >>> block_of(np.array([0.5, 0.5])), block_of(np.array([0.999, 0.001]))
    (1024, 128000)
    """
    least = float(wanted[wanted > 0].min())
    return min(MOST_BLOCK_DRAWS, max(BLOCK_DRAWS, round(DRAWS_OF_THE_LEAST / least)))


def quotas(wanted: Floats, block: int | None = None) -> Ints:
    """Return how many draws of a block each stratum has: at least one, unless it has no share.

    Args:
        wanted: shares that add up to 1.
        block: draws in all; None: enough for so many strata.

    >>> quotas(np.array([0.5, 0.4999, 0.0001, 0.0])).tolist()
    [512, 511, 1, 0]
    """
    drawn = np.flatnonzero(wanted)
    total = block or max(BLOCK_DRAWS, DRAWS_PER_STRATUM * len(drawn))
    exact = wanted[drawn] * total
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    # The largest remainders first; rare strata that were raised to one are paid for by the rest.
    order = np.argsort(counts - exact, kind="stable")
    missing = total - int(counts.sum())
    if missing > 0:
        counts[order[:missing]] += 1
    while missing < 0:
        over = [i for i in order[::-1] if counts[i] > 1][:-missing]
        counts[over] -= 1
        missing += len(over)
    found = np.zeros(len(wanted), np.int64)
    found[drawn] = counts
    return found


class Slots:
    """Which stratum each draw is of, by its number.

    Args:
        counts: draws of each stratum in a block.
        where: what the order within blocks depends on, beside the block's number.
    """

    def __init__(self, counts: Ints, *where: int | str) -> None:
        self.counts = counts
        self._where = where
        self._size = int(counts.sum())
        self._blocks: OrderedDict[int, Ints] = OrderedDict()

    def run(self, start: int, stop: int) -> Ints:
        """Return the strata of the draws [start, stop)."""
        first, last = start // self._size, -(-stop // self._size)
        blocks = [self._block(number) for number in range(first, last)]
        whole = np.concatenate([*blocks, np.zeros(0, np.int64)])
        return whole[start - first * self._size : stop - first * self._size]

    def before(self, number: int) -> Ints:
        """Return how many of the draws before this one each stratum has."""
        whole, within = divmod(number, self._size)
        head = self._block(whole)[:within] if within else np.zeros(0, np.int64)
        return whole * self.counts + np.bincount(head, minlength=len(self.counts))

    def _block(self, number: int) -> Ints:
        if number not in self._blocks:
            strata = np.repeat(np.arange(len(self.counts)), self.counts)
            rng = generator("strata", *self._where, number)
            self._blocks[number] = rng.permutation(strata)
            if len(self._blocks) > _BLOCKS_IN_MEMORY:
                self._blocks.popitem(last=False)
        return self._blocks[number]
