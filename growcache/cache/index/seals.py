"""Checksums over what the index says and nothing else can tell.

SQLite finds a page that is no page any more. A number in it that became another number it
does not find, and a wrong one may draw samples twice or lose good shards. So every row of a
shard has a checksum, and so has the rest that counts: totals, notes and editions.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence

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


def account_seal(connection: sqlite3.Connection) -> int:
    """Return the checksum of the totals, the notes and the editions as they are now."""
    said = (
        connection.execute("SELECT name, value FROM totals ORDER BY name").fetchall(),
        connection.execute("SELECT key, value FROM meta WHERE key != ? ORDER BY key", [SEAL])
        .fetchall(),
        connection.execute("SELECT * FROM editions ORDER BY edition").fetchall(),
    )  # fmt: skip
    return zlib.crc32(repr(said).encode("utf-8", "backslashreplace"))


def kept_seal(connection: sqlite3.Connection) -> int | None:
    """Return the checksum that the last transaction wrote; None where there is none."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", [SEAL]).fetchone()
    return int(row[0]) if row else None


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
