"""Tests of frequencies: a false alarm in a million runs, were the draws not seeded."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

FALSE_ALARM = 1e-6
PLANTED = 0.05  # a bias of so much must be found


def agree(counts: npt.ArrayLike, expected: npt.ArrayLike) -> bool:
    """Whether frequencies are those expected, by Pearson's chi-squared test.

    The quantile is by Wilson and Hilferty (PNAS 17, 1931), good to a per cent from three
    degrees of freedom on.
    """
    found = np.asarray(counts, np.float64)
    wanted = np.asarray(expected, np.float64)
    wanted = wanted / wanted.sum() * found.sum()
    assert wanted.min() >= 20, "too few for the test to mean anything"
    freedom = len(found) - 1
    z = NormalDist().inv_cdf(1 - FALSE_ALARM)
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + z * math.sqrt(spread)) ** 3
    return bool(((found - wanted) ** 2 / wanted).sum() <= limit)


def balanced(hits: float, share: float, draws: int) -> bool:
    """Whether the number of hits agrees with the share of draws that should be hits."""
    z = NormalDist().inv_cdf(1 - FALSE_ALARM / 2)
    return abs(hits - share * draws) <= z * math.sqrt(share * (1 - share) * draws) + 1


def planted(expected: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return frequencies of which the first half is favoured by `PLANTED` over the other."""
    biased = np.asarray(expected, np.float64).copy()
    biased[: len(biased) // 2] *= 1 + PLANTED
    biased /= biased.sum()
    return biased
