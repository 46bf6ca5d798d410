"""Counters as nested mappings, which are summed over processes and restarts. Pure.

A leaf is a number, or a list of numbers: the buckets of a histogram, followed by the sum of the
observed values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Leaf: TypeAlias = "float | list[float]"
Counts: TypeAlias = "dict[str, Leaf | Counts]"
CountsView: TypeAlias = "Mapping[str, Leaf | Counts]"


def plus(total: CountsView, more: CountsView) -> Counts:
    """Return the sums, with the keys of both.

    >>> plus({"get": {"ok": 2}}, {"get": {"ok": 1, "missing": 1}, "seconds": [1, 0, 0.5]})
    {'get': {'ok': 3, 'missing': 1}, 'seconds': [1, 0, 0.5]}
    """
    found = dict(total)
    for key, value in more.items():
        found[key] = _sum(found[key], value) if key in found else _copy(value)
    return found


def _sum(a: Leaf | Counts, b: Leaf | Counts) -> Leaf | Counts:
    match a, b:
        case dict(), dict():
            return plus(a, b)
        case list(), list() if len(a) == len(b):
            return [x + y for x, y in zip(a, b, strict=True)]
        case ((int() | float()), (int() | float())):
            return a + b
    return _copy(b)  # the other is of another version, so counting starts anew


def _copy(value: Leaf | Counts) -> Leaf | Counts:
    return plus({}, value) if isinstance(value, dict) else value


def minus(total: CountsView, before: CountsView) -> Counts:
    """Return what was added since ``before``, without zeros.

    >>> minus({"get": {"ok": 3, "missing": 1}, "bytes": 7}, {"get": {"ok": 3}, "bytes": 5})
    {'get': {'missing': 1}, 'bytes': 2}
    """
    found: Counts = {}
    for key, value in total.items():
        difference = _difference(value, before.get(key))
        if difference and (not isinstance(difference, list) or any(difference)):
            found[key] = difference
    return found


def _difference(a: Leaf | Counts, b: Leaf | Counts | None) -> Leaf | Counts:
    match a, b:
        case dict(), dict():
            return minus(a, b)
        case list(), list():
            return [x - y for x, y in zip(a, b, strict=True)]
        case ((int() | float()), (int() | float())):
            return a - b
    return a


def observe(
    histograms: dict[str, list[float]], key: str, value: float, bounds: Sequence[float]
) -> None:
    """Count a value in the histogram of a key.

    >>> histograms = {}
    >>> observe(histograms, "get", 0.3, (0.1, 1.0)), histograms
    (None, {'get': [0, 1, 0, 0.3]})
    """
    buckets = histograms.setdefault(key, [0] * (len(bounds) + 1) + [0.0])
    buckets[bisect_left(bounds, value)] += 1
    buckets[-1] += value


def number_in(counts: CountsView, *keys: str) -> float:
    """Return a number, or the sum of all numbers below a key, or 0 without that key.

    >>> number_in({"get": {"ok": 3, "missing": 1}}, "get"), number_in({}, "get", "ok")
    (4, 0)
    """
    value: Leaf | Counts = dict(counts)
    for key in keys:
        value = value.get(key, 0) if isinstance(value, dict) else 0
    if isinstance(value, dict):
        return sum(number_in(value, key) for key in value)
    return 0 if isinstance(value, list) else value
