"""Read the whole index and verify all of it, for checks and repairs.

SQLite detects a page that is no longer a page. It does not detect a number that became another
number, or a column that got another name. A wrong number may draw samples twice or lose good
shards. So every row of a shard has a checksum, and totals, notes and editions share another
one. The tables are compared with those that were created.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from growcache.cache.files import CacheLayout
from growcache.cache.index.connection import newer_index_error, reading_index
from growcache.cache.index.schema import SHARD_COLUMNS, ShardState, ShardTableRow, row_seal
from growcache.cache.index.structure import (
    SQLITE_ERRORS,
    WRONG_TABLES,
    read_sealed_tables,
    tables_state,
)
from growcache.cache.side_files import Edition
from growcache.errors import CacheMissingError, CachePathError

MOST_MESSAGES = 10  # from SQLite, about one file


class DeletedRange(NamedTuple):
    first: int
    last: int
    shards: int
    samples: int


@dataclass(slots=True)
class IndexContents:
    """The contents of a whole index. If it has ``problems``, none of it counts."""

    problems: list[str] = field(default_factory=list)
    rows: list[ShardTableRow] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    editions: list[Edition] = field(default_factory=list)
    ranges: list[DeletedRange] = field(default_factory=list)
    history: list[tuple[float, str]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether it has a row or a range for every number that was ever committed."""
        return not self.problems and bool(self.meta.get("initialised"))


def read_contents(layout: CacheLayout) -> IndexContents:
    """Return the current contents, or their problems.

    May raise CacheMissingError or CachePathError.
    """
    if not layout.index.exists():
        raise CacheMissingError(f"{layout.index} is missing")
    try:
        with reading_index(layout) as connection:
            connection.text_factory = _decode
            connection.execute("BEGIN")  # one consistent view, whatever is committed meanwhile
            match tables_state(connection):
                case "whole":
                    found = verified_contents(connection)
                    found.problems += _wrong_types(connection)
                case "damaged":
                    found = IndexContents([WRONG_TABLES, *_integrity_problems(connection)])
                case "newer":
                    raise newer_index_error(layout)
                case "unmade":
                    found = IndexContents(_integrity_problems(connection))
    except CachePathError:
        raise
    except (
        *SQLITE_ERRORS,
        ValueError,
        TypeError,
    ) as error:  # a table's name may be a number
        found = IndexContents([str(error)])
    found.problems = [f"{layout.index}: {problem}" for problem in found.problems]
    return found


def verified_contents(connection: sqlite3.Connection) -> IndexContents:
    try:
        if problems := _integrity_problems(connection):
            return IndexContents(problems)
        found = _sealed_contents(connection)
        seals = connection.execute("SELECT number, seal FROM shards").fetchall()
        problems = [*_wrong_rows(found, dict(seals))]
    except (*SQLITE_ERRORS, ValueError, TypeError) as error:
        problems = [str(error)]
    return IndexContents(problems) if problems else found


def _integrity_problems(connection: sqlite3.Connection) -> list[str]:
    try:
        rows = connection.execute(f"PRAGMA integrity_check({MOST_MESSAGES})").fetchall()
    except SQLITE_ERRORS as error:
        return [str(error)]
    return [text for (text,) in rows if text != "ok"]


def _sealed_contents(connection: sqlite3.Connection) -> IndexContents:
    sealed = read_sealed_tables(connection)
    if sealed.seal is None and not sealed.is_empty():
        raise ValueError("the checksum of totals and notes is missing")
    if sealed.seal not in (None, sealed.right_seal()):
        raise ValueError("totals, notes or editions are not what was written")
    rows = connection.execute(f"SELECT {SHARD_COLUMNS} FROM shards").fetchall()
    query = "SELECT first, last, shards, samples FROM deleted_ranges ORDER BY first"
    return IndexContents(
        rows=list(map(ShardTableRow._make, rows)),
        totals=dict(sealed.totals),
        meta={key: json.loads(value) for key, value in sealed.meta},
        editions=[Edition(*row) for row in sealed.editions],
        ranges=list(map(DeletedRange._make, connection.execute(query).fetchall())),
    )


def _wrong_rows(found: IndexContents, seals: Mapping[int, object]) -> Iterator[str]:
    """Compare rows with their checksums, ranges with their counts, and both with the totals."""
    for row in found.rows:
        if row.state not in set(ShardState) or row_seal(row) != seals[row.number]:
            yield f"the row of shard {row.number} is not what was written"
    if any(r.shards != r.last - r.first + 1 for r in found.ranges):
        yield "ranges of deleted shards are not what was written"
    shards = len(found.rows) + sum(r.shards for r in found.ranges)
    samples = sum(row.samples for row in found.rows) + sum(r.samples for r in found.ranges)
    for name, counted in (("drawn_shards", shards), ("drawn", samples)):
        if found.totals.get(name, 0) != counted:
            yield f"{name} is {found.totals.get(name, 0)}, but its rows add up to {counted}"


# These have no checksum, because a wrong number here decides no sample. But each must be a
# number.
_TYPES = {
    "uses": (int, str, int),
    "jobs": (str, float),
    "finished_leases": (str, float),
    "history": (int, float, str),
}


def _wrong_types(connection: sqlite3.Connection) -> Iterator[str]:
    for table, types in _TYPES.items():
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()
        if any(tuple(map(type, row)) != types for row in rows):
            yield f"rows of {table} are not what was written"
    for (record,) in connection.execute("SELECT record FROM history").fetchall():
        json.loads(record)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
