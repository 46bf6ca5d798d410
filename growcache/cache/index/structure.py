"""The tables that an index must have: a flipped bit may give a column another name.

SQLite keeps the definitions of tables as text in the file, and takes any text that it can
read for what was meant.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import quote

# Of damaged bytes SQLite's own complaint may be no UTF-8, of which Python complains then.
REFUSALS = (sqlite3.Error, UnicodeDecodeError)

# What the migrations make, each column with its type; behind the bar the primary key.
TABLES = {
    "shards": "number INTEGER, seq INTEGER, state INTEGER, group_number INTEGER, "
    "edition INTEGER, round INTEGER, samples INTEGER, parts INTEGER, holes INTEGER, "
    "shard_bytes INTEGER, allocated INTEGER, record_bytes INTEGER, digest TEXT, "
    "drawn_at REAL, uses INTEGER, samples_indexed INTEGER, seal INTEGER | number",
    "holes": "id INTEGER, shard INTEGER, key TEXT, part INTEGER, reason TEXT | id",
    "editions": "edition INTEGER, objects INTEGER, digest TEXT, first_group INTEGER | edition",
    "jobs": "job TEXT, last_seen REAL | job",
    "history": "id INTEGER, at REAL, record TEXT | id",
    "meta": "key TEXT, value TEXT | key",
    "totals": "name TEXT, value INTEGER | name",
    "finished_leases": "name TEXT, finished_at REAL | name",
    "deleted_ranges": "first INTEGER, last INTEGER, shards INTEGER, samples INTEGER | first",
    "samples": "shard INTEGER, i INTEGER, key TEXT, etag TEXT, start INTEGER, stop INTEGER "
    "| shard, i",
    "uses": "shard INTEGER, job TEXT, uses INTEGER | shard, job",
}
OURS = {"shards", "deleted_ranges", "finished_leases", "totals"}  # together nobody else's
MIGRATIONS = "_sqlite_migrations"  # sqlite-utils notes there what was made
MADE = ["the_cache", "a_checksum_per_row"]

MOST_PATH_BYTES = 504  # of a database, for SQLite; with the name of its journal it is 512

OTHER_TABLES = "its tables are not those that were made"

State: TypeAlias = Literal["whole", "unmade", "damaged"]


def tables(connection: sqlite3.Connection) -> dict[str, str]:
    """Return every table with its columns, in the words of `TABLES`."""
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {name: _columns(connection, name) for (name,) in names if name != MIGRATIONS}


def state_of(connection: sqlite3.Connection) -> State:
    """Return whether the tables are as they must be.

    They may also not be made yet, and hold nothing: a service died at its first start, or
    is just about to make them.
    """
    if tables(connection) == TABLES and _made(connection) == MADE:
        return "whole"
    return (
        "damaged" if any(_holds(connection, name) for name in tables(connection)) else "unmade"
    )


def has_our_tables(path: Path) -> bool:
    """Return whether a file is an index of ours, without a trace of the look.

    What is in its log alone is not seen. To open another program's database the usual way
    would make a log beside it, or undo what that program had begun.
    """
    names = _tables_of(path)
    return names is not None and names >= OURS


def is_others(path: Path) -> bool:
    """Return whether a file is a database of another program; likewise."""
    names = _tables_of(path)
    return names is not None and len(names) > 0 and names.isdisjoint(TABLES)


def _tables_of(path: Path) -> set[str] | None:
    if path.is_symlink() or not path.is_file():
        return None
    uri = f"file:{quote(str(path))}?mode=ro&immutable=1"
    query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return {name for (name,) in connection.execute(query).fetchall()}
    except REFUSALS:
        return None


def _columns(connection: sqlite3.Connection, table: str) -> str:
    query = "SELECT name, type, pk FROM pragma_table_info(?) ORDER BY cid"
    columns = connection.execute(query, [table]).fetchall()
    keys = sorted((pk, name) for name, _, pk in columns if pk)
    typed = ", ".join(f"{name} {kind}" for name, kind, _ in columns)
    return f"{typed} | {', '.join(name for _, name in keys)}"


def _made(connection: sqlite3.Connection) -> list[str]:
    columns = "id, name, applied_at"  # all that sqlite-utils will want to read
    query = f"SELECT {columns} FROM {MIGRATIONS} WHERE migration_set = 'growcache' ORDER BY id"
    return [name for _, name, _ in connection.execute(query).fetchall()]


def _holds(connection: sqlite3.Connection, table: str) -> bool:
    quoted = table.replace('"', '""')
    return connection.execute(f'SELECT 1 FROM "{quoted}" LIMIT 1').fetchone() is not None
