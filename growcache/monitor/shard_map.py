"""The map of a cache: a cell per shard, as columns whose JSON is short for any number of shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from growcache.cache.files import generation_in
from growcache.cache.index.inspection import Column, IndexColumns
from growcache.cache.lease_views import read_leases


def encode_runs(values: Column) -> list[int]:
    """Return pairs of a value and its number of repetitions, in one list.

    >>> encode_runs(np.array([7, 7, 7, 0]))
    [7, 3, 0, 1]
    """
    if not len(values):
        return []
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    lengths = np.diff(starts, append=len(values))
    pairs: list[int] = np.column_stack((values[starts], lengths)).ravel().tolist()
    return pairs


def encode_steps(values: Column) -> list[int]:
    """Return the runs of the differences between neighbours. The first difference is to 0.

    >>> encode_steps(np.array([5, 6, 7, 8, 20]))
    [5, 1, 1, 3, 12, 1]
    """
    return encode_runs(np.diff(values, prepend=0))


def map_of(root: Path, columns: IndexColumns) -> dict[str, Any]:
    """Return the map of a generation, with the current holds and uses of readers."""
    now = time.time()
    held = np.zeros(len(columns.numbers), np.int64)
    uses = columns.uses.copy()
    for lease in read_leases(root):
        if lease.open:
            held |= np.isin(columns.numbers, lease.holding())
        if lease.job and lease.name not in columns.counted:
            uses += np.isin(columns.numbers, lease.used())
    return {
        "generation": generation_in(root) or 0,
        "now": int(now),
        "count": len(columns.numbers),
        "numbers": encode_steps(columns.numbers),
        "drawn_at": encode_steps(columns.drawn_at),
        "uses": encode_runs(uses),
        "samples": encode_runs(columns.samples),
        "bytes": encode_runs(columns.allocated),
        "retired": encode_runs(columns.retired),
        "held": encode_runs(held),
    }
