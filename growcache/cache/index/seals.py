"""Checksums over what the index says and nothing else can tell.

SQLite finds a page that is no page any more. A number in it that became another number it
does not find, and a wrong one may draw samples twice or lose good shards. So every row of a
shard has a checksum, and so has the rest that counts: totals, notes and editions.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from growcache.cache.index.rows import ShardState, StockRow

SEAL = "seal"  # its key among the notes
STATE_MASK = 3  # of a row's seal are its state, which changes while the rest stays

STOCK_COLUMNS = (
    "number, seq, state, group_number, edition, round, samples, parts, holes, "
    "shard_bytes, allocated, record_bytes, digest, drawn_at, uses"
)


def row_seal(row: StockRow) -> int:
    """Return the checksum of all of a row but what the files tell and what counts uses."""
    fixed = (*row._replace(state=0, allocated=0, uses=0),)
    return zlib.crc32(repr(fixed).encode("utf-8", "backslashreplace")) << 2 | row.state


class Account(NamedTuple):
    """What counts beside the rows of shards, as it lies in the tables.

    Attributes:
        totals: (name, value).
        meta: (key, JSON), without the seal.
        editions: their rows.
        seal: that the last transaction wrote; None where there is none.
    """

    totals: list[tuple[str, int]]
    meta: list[tuple[str, str]]
    editions: list[tuple[int, int, str, int]]
    seal: object

    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return not (self.totals or self.meta or self.editions)

    def right_seal(self) -> int:
        """Return the checksum of what is there now."""
        return zlib.crc32(repr(self[:3]).encode("utf-8", "backslashreplace"))


def read_account(connection: sqlite3.Connection) -> Account:
    """Return what the tables themselves have: an index of theirs may be damaged too."""

    def rows(table: str) -> list[Any]:
        return sorted(connection.execute(f"SELECT * FROM {table} NOT INDEXED"), key=repr)

    meta = rows("meta")
    seal = next((value for key, value in meta if key == SEAL), None)
    noted = [row for row in meta if row[0] != SEAL]
    return Account(rows("totals"), noted, rows("editions"), None if seal is None else int(seal))


def split_rows(rows: Iterable[Sequence[object]]) -> tuple[list[StockRow], list[object]]:
    """Return the rows whose checksum is right, and the numbers of the others.

    Args:
        rows: each with the columns of a `StockRow`, and its seal.
    """
    good: list[StockRow] = []
    spoiled: list[object] = []
    for *values, seal in rows:
        row = StockRow._make(values)
        if type(row.state) is int and row.state in set(ShardState) and row_seal(row) == seal:
            good.append(row)
        else:
            spoiled.append(row.number)
    return good, spoiled
