"""Numbers of deleted shards as ranges: what is left of their rows when those are too many. Pure."""

from __future__ import annotations

from typing import TypeAlias

Row: TypeAlias = tuple[int, int, int, int]  # first number, last, shards, samples


def merge_ranges(ranges: list[Row]) -> list[Row]:
    """Return (first, last, shards, samples) with neighbours merged.

    Ranges without a sample stay apart: a rebuilt index knows no more of what they held.

    >>> merge_ranges([(3, 3, 1, 10), (0, 1, 2, 20), (2, 2, 1, 5), (4, 5, 2, 0), (7, 7, 1, 1)])
    [(0, 3, 4, 35), (4, 5, 2, 0), (7, 7, 1, 1)]
    """
    merged: list[Row] = []
    for first, last, shards, samples in sorted(ranges):
        if merged and first == merged[-1][1] + 1 and (samples == 0) == (merged[-1][3] == 0):
            low, _, before, sums = merged.pop()
            merged.append((low, last, before + shards, sums + samples))
        else:
            merged.append((first, last, shards, samples))
    return merged


def split_range(row: Row, number: int, samples: int) -> list[Row]:
    """Return what is left of a range without one of its shards, which has so many samples.

    How the others share the rest was never noted, so it is divided as their number is.

    >>> split_range((0, 3, 4, 35), 1, 5)
    [(0, 0, 1, 10), (2, 3, 2, 20)]
    """
    first, last, _, before = row
    left, right, rest = number - first, last - number, max(0, before - samples)
    share = rest * left // (left + right) if left + right else 0
    pieces = [(first, number - 1, left, share), (number + 1, last, right, rest - share)]
    return [piece for piece in pieces if piece[2]]
