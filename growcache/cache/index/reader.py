"""Read the index: one consistent view, on a connection that is closed before the return."""

from __future__ import annotations

import json
import operator
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from growcache.cache.files import CacheLayout
from growcache.cache.index.connection import reading_index, unreadable_index_error
from growcache.cache.index.schema import (
    LEASE_BYTES_META,
    SEAL_META,
    CacheTotals,
    ShardRow,
    ShardState,
)
from growcache.cache.side_files import Edition, Identity, read_identity
from growcache.errors import CacheError

if TYPE_CHECKING:
    from growcache.schema import Schema

_SEQ = operator.attrgetter("seq")
_NUMBER = operator.attrgetter("number")

# All rows arrive as one, because sqlite3 releases the GIL for every row that it fetches.
# Getting it back next to a busy main thread takes a switch interval (5 ms) each time.
_NUMBERS = ("number", "seq", "group_number", "edition", "samples", "shard_bytes")
_TEXTS = (*_NUMBERS, "'\"' || digest || '\"'", "printf('%!.17g', drawn_at)")
_PACKED_COLUMNS = ", ".join(f"group_concat({text})" for text in _TEXTS)
# Unlike `ShardRow._make`, without Python code per row.
_new_row = partial(tuple.__new__, ShardRow)


@dataclass(frozen=True, slots=True)
class IndexView:
    """The index at one moment."""

    shards: list[ShardRow] = field(default_factory=list)  # live, oldest first
    totals: CacheTotals = field(default_factory=CacheTotals)
    identity: Identity | None = None  # None before the first sample is measured
    complete: bool = False  # the whole population is cached
    population: int | None = None  # parts, after the listing
    population_samples: float | None = None  # estimated
    editions: list[Edition] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)  # the supervisor's other values
    retired: list[ShardRow] = field(default_factory=list)  # oldest first; only on request
    uses: dict[int, int] = field(default_factory=dict)  # of a job, by shard; only on request
    root: Path | None = None  # of its generation
    counted: frozenset[str] = frozenset()  # leases in uses that may still have a file

    @property
    def schema(self) -> Schema | None:
        return self.identity.schema if self.identity else None

    @property
    def fingerprint(self) -> str | None:
        return self.identity.fingerprint if self.identity else None

    @property
    def cache_format(self) -> str:
        return self.identity.cache_format if self.identity else "tfrecord"


def max_lease_bytes(view: IndexView) -> int | None:
    found = view.meta.get(LEASE_BYTES_META)
    return None if found is None else int(found)


def read_index(
    root: str | os.PathLike[str], *, retired: bool = False, job: str | None = None
) -> IndexView:
    """Return the current index, with ``retired`` shards and the uses of a ``job`` on request.

    The connection is closed before the return, because an open cursor would keep seeing retired
    shards as live.

    Raises:
        CacheMissingError: No cache is at the path.
        CacheError: The index is damaged.
    """
    layout = CacheLayout(root)
    layout.require()
    try:
        with reading_index(layout) as connection:
            connection.execute("BEGIN")  # one consistent view, whatever is committed meanwhile
            live, meta, editions, totals = _read_view(connection)
            going = _rows_in_state(connection, ShardState.RETIRED) if retired else []
            uses, counted = ({}, ()) if job is None else _uses_of_job(connection, job)
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        # Other errors than SQLite's, too, because a flipped bit may turn a number into a text.
        if "no such table" in str(error):  # it is being created
            return IndexView()
        if not layout.index.exists():
            layout.require()
        raise unreadable_index_error(layout, error) from error
    return IndexView(
        shards=live,
        totals=totals,
        identity=read_identity(layout.root),
        complete=bool(meta.pop("complete", False)),
        population=meta.pop("population", None),
        population_samples=meta.pop("population_samples", None),
        editions=editions,
        meta=meta,
        retired=going,
        uses=uses,
        counted=frozenset(counted),
        root=layout.root,
    )


def known_identity(layout: CacheLayout) -> Identity | None:
    """Return the cache's identity, or its copy in the index, or None if both are missing.

    Raises:
        CacheError: It is damaged, and the index has no copy.
    """
    try:
        if found := read_identity(layout.root):
            return found
        return _identity_copy(layout)
    except CacheError:
        if copy := _identity_copy(layout):
            return copy
        raise


def _identity_copy(layout: CacheLayout) -> Identity | None:
    try:
        with reading_index(layout) as connection:
            query = "SELECT value FROM meta WHERE key = 'identity'"
            row = connection.execute(query).fetchone()
        return Identity.from_values(json.loads(row[0])) if row else None
    except (CacheError, sqlite3.Error, ValueError, TypeError, KeyError):  # missing or damaged
        return None


def _read_view(
    connection: sqlite3.Connection,
) -> tuple[list[ShardRow], dict[str, Any], list[Edition], CacheTotals]:
    live = _rows_in_state(connection, ShardState.LIVE)
    _, live_bytes = _sums_in_state(connection, ShardState.LIVE)
    retired, retired_bytes = _sums_in_state(connection, ShardState.RETIRED)
    meta = {
        key: json.loads(value)
        for key, value in connection.execute("SELECT key, value FROM meta").fetchall()
    }
    editions = read_editions(connection)
    meta.pop(SEAL_META, None)
    sums = dict(connection.execute("SELECT name, value FROM totals").fetchall())
    totals = CacheTotals(
        shards=len(live),
        samples=sum(row.samples for row in live),
        bytes=live_bytes,
        retired_shards=retired,
        retired_bytes=retired_bytes,
        **sums,
    )
    return live, meta, editions, totals


def _rows_in_state(connection: sqlite3.Connection, state: ShardState) -> list[ShardRow]:
    query = f"SELECT {_PACKED_COLUMNS} FROM shards WHERE state = ?"
    packed = connection.execute(query, [state]).fetchone()
    columns = [orjson.loads(f"[{column or ''}]") for column in packed]
    rows = list(map(_new_row, zip(*columns, strict=True)))
    rows.sort(key=_SEQ)  # nearly sorted already, so this takes half the time of ORDER BY
    if operator.countOf(map(type, map(_NUMBER, rows)), int) != len(rows):
        raise ValueError(
            "a shard's number is not a number"
        )  # the column has lost its definition
    return rows


def read_history_rows(layout: CacheLayout, since: float) -> list[tuple[float, str]]:
    """Return time and text of each record of the history after ``since``.

    Raises the errors of `read_index`.
    """
    layout.require()
    query = "SELECT at, record FROM history WHERE at > ? ORDER BY id"
    try:
        with reading_index(layout) as connection:
            rows: list[tuple[float, str]] = connection.execute(query, [since]).fetchall()
            return rows
    except sqlite3.Error as error:
        if "no such table" in str(error):  # it is being created
            return []
        if not layout.index.exists():
            layout.require()
        raise unreadable_index_error(layout, error) from error


def live_digests(root: str | os.PathLike[str]) -> dict[int, str]:
    """Return the digests of the live shards by number, which is cheaper than `read_index`.

    Raises the errors of `read_index`.
    """
    return _digests_in(root, [ShardState.LIVE])


def all_digests(root: str | os.PathLike[str]) -> dict[int, str]:
    """Return the digests of all shards with a row, including evicted ones.

    Raises the errors of `read_index`.
    """
    return _digests_in(root, list(ShardState))


def _digests_in(root: str | os.PathLike[str], states: Sequence[ShardState]) -> dict[int, str]:
    layout = CacheLayout(root)
    layout.require()
    query = (
        "SELECT group_concat(number), group_concat(digest) FROM shards "
        f"WHERE state IN ({', '.join('?' * len(states))})"
    )
    try:
        with reading_index(layout) as connection:
            packed, digests = connection.execute(query, states).fetchone()
        numbers = orjson.loads(f"[{packed or ''}]")
        return dict(zip(numbers, (digests or "").split(",") if numbers else [], strict=True))
    except (sqlite3.Error, ValueError, TypeError) as error:
        if not layout.index.exists():
            layout.require()
        raise unreadable_index_error(layout, error) from error


def _uses_of_job(
    connection: sqlite3.Connection, job: str
) -> tuple[dict[int, int], Iterable[str]]:
    query = "SELECT group_concat(shard), group_concat(uses) FROM uses WHERE job = ?"
    packed = connection.execute(query, [job]).fetchone()
    shards, uses = (orjson.loads(f"[{column or ''}]") for column in packed)
    names = connection.execute("SELECT name FROM finished_leases").fetchall()
    return dict(zip(shards, uses, strict=True)), [name for (name,) in names]


def _sums_in_state(connection: sqlite3.Connection, state: ShardState) -> tuple[int, int]:
    query = "SELECT count(*), coalesce(sum(allocated), 0) FROM shards WHERE state = ?"
    shards, nbytes = connection.execute(query, [state]).fetchone()
    return shards, nbytes


def read_editions(connection: sqlite3.Connection) -> list[Edition]:
    rows = connection.execute("SELECT * FROM editions ORDER BY edition").fetchall()
    return [Edition(*row) for row in rows]
