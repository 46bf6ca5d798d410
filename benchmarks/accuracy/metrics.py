"""The metrics of runs: how two runs differ, and by how much an arm may be worse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.statistics import (
    Floats,
    Interval,
    Verdict,
    not_worse,
    paired_differences,
)


class Metric(NamedTuple):
    """A metric, and the margin that margins.md sets for it.

    Attributes:
        heading: of its column.
        margin: by which an arm may be worse than the reference and still as good, in the unit
            of the differences.
        less_is_better: whether a lower value is better.
        relative: whether differences are in percent of the reference.
        decimals: that its values are shown with.
    """

    heading: str
    margin: float
    less_is_better: bool = False
    relative: bool = False
    decimals: int = 2

    def differences(self, arm: Mapping[int, float], reference: Mapping[int, float]) -> Floats:
        """Return arm − reference for each seed that both have."""
        found = paired_differences(arm, reference)
        if not self.relative:
            return found
        seeds = sorted(arm.keys() & reference.keys())
        percent: Floats = 100 * found / np.array([reference[seed] for seed in seeds])
        return percent

    def gain(self, difference: Interval) -> Interval:
        """Return a difference as one of a metric of which more is better."""
        if not self.less_is_better:
            return difference
        return Interval(-difference.value, -difference.high, -difference.low)

    def verdict(self, difference: Interval) -> Verdict:
        """Judge a difference (arm − reference) by the margin.

        >>> BITS_PER_BYTE.verdict(Interval(0.4, 0.2, 0.6))
        'as good'
        >>> BITS_PER_BYTE.verdict(Interval(8.0, 7.0, 9.0))
        'worse'
        """
        return not_worse(self.gain(difference), self.margin)

    def is_better(self, difference: Interval) -> bool:
        """Whether the whole interval is on the better side of zero."""
        return self.gain(difference).low > 0


ACCURACY = Metric("accuracy, %", margin=0.5)
BITS_PER_BYTE = Metric(
    "bits per byte", margin=1.0, less_is_better=True, relative=True, decimals=3
)
