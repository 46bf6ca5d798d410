"""Parts of the index that only a monitor needs: ages and uses of shards, holes and their reasons."""

from __future__ import annotations

import os
import sqlite3
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from growcache.cache.files import CacheLayout
from growcache.cache.index.connection import reading_index, unreadable_index_error
from growcache.cache.index.schema import ShardState

Column = npt.NDArray[np.int64]

_MAP_COLUMNS = ("number", "CAST(drawn_at AS INTEGER)", "uses", "samples", "allocated", "state")


class IndexColumns(NamedTuple):
    """All shards with samples, by ascending number, as columns."""

    numbers: Column
    drawn_at: Column  # whole seconds since the epoch
    uses: Column  # by finished leases of all jobs
    samples: Column
    allocated: Column  # bytes on disk
    retired: Column  # 1: it is deleted when its readers release it
    counted: frozenset[str]  # leases in ``uses`` that may still have a file


class HoleRow(NamedTuple):
    shard: int
    key: str
    part: int
    reason: str


def read_shard_columns(root: str | os.PathLike[str]) -> IndexColumns:
    """Return all live and retired shards. Raises the errors of `read_index`."""
    packed = ", ".join(f"group_concat({column})" for column in _MAP_COLUMNS)
    query = f"SELECT {packed} FROM shards WHERE state < ? AND samples > 0"
    (found,), leases = _fetch(
        root, (query, [ShardState.DELETED]), ("SELECT name FROM finished_leases", [])
    )
    columns = np.array([orjson.loads(f"[{text or ''}]") for text in found], np.int64)
    numbers, drawn_at, uses, samples, allocated, retired = columns[:, np.argsort(columns[0])]
    counted = frozenset(name for (name,) in leases)
    return IndexColumns(numbers, drawn_at, uses, samples, allocated, retired, counted)


def read_holes(root: str | os.PathLike[str]) -> tuple[int, list[HoleRow]]:
    """Return the number of holes, and the latest ones, oldest first.

    Raises the errors of `read_index`.
    """
    noted, totals = _fetch(
        root,
        ("SELECT shard, key, part, reason FROM holes ORDER BY id", []),
        ("SELECT value FROM totals WHERE name = 'holes'", []),
    )
    return sum(value for (value,) in totals), [HoleRow(*row) for row in noted]


def _fetch(root: str | os.PathLike[str], *queries: tuple[str, list[int]]) -> list[list[Any]]:
    layout = CacheLayout(root)
    layout.require()
    try:
        with reading_index(layout) as connection:
            connection.execute("BEGIN")
            return [connection.execute(*query).fetchall() for query in queries]
    except (sqlite3.Error, ValueError, TypeError) as error:
        if not layout.index.exists():
            layout.require()
        raise unreadable_index_error(layout, error) from error
