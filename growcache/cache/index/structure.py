"""Which tables an index has, and what they hold besides shards: is it growcache's, whole, newer?"""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

from growcache.cache.index.schema import (
    MIGRATION_NAMES,
    MIGRATIONS_TABLE,
    OWN_TABLES,
    SEAL_META,
    TABLES,
    TABLES_AFTER,
)

# SQLite's complaint about damaged bytes may be invalid UTF-8, which Python rejects.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)


WRONG_TABLES = "it has other tables than growcache makes"

TablesState: TypeAlias = Literal["whole", "unmade", "damaged", "newer"]


def table_columns(connection: sqlite3.Connection) -> dict[str, str]:
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        name: _columns_of_table(connection, name)
        for (name,) in names
        if name != MIGRATIONS_TABLE
    }


def tables_state(connection: sqlite3.Connection) -> TablesState:
    """Return the state of the tables. "unmade" means that a supervisor died at its first start.

    The last migrations may be missing; the next supervisor applies them.
    """
    names, columns = _applied_migrations(connection), table_columns(connection)
    known = MIGRATION_NAMES[: len(names)]
    if len(names) > len(known) and names[: len(known)] == known:
        return "newer"
    if names == known and columns == TABLES_AFTER.get(len(names)):
        return "whole"
    return "damaged" if any(_has_rows(connection, name) for name in columns) else "unmade"


def has_our_tables(path: Path) -> bool:
    """Whether a file is growcache's index. Nothing is written, so its log is not read.

    Normally, opening another program's database would create a log or roll back its
    transaction.
    """
    names = _table_names(path)
    return names is not None and names >= OWN_TABLES


def is_other_database(path: Path) -> bool:
    names = _table_names(path)
    return names is not None and len(names) > 0 and names.isdisjoint(TABLES)


def _table_names(path: Path) -> set[str] | None:
    if path.is_symlink() or not path.is_file():
        return None
    uri = f"file:{quote(str(path))}?mode=ro&immutable=1"
    query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return {name for (name,) in connection.execute(query).fetchall()}
    except SQLITE_ERRORS:
        return None


def _columns_of_table(connection: sqlite3.Connection, table: str) -> str:
    query = "SELECT name, type, pk FROM pragma_table_info(?) ORDER BY cid"
    columns = connection.execute(query, [table]).fetchall()
    keys = sorted((pk, name) for name, _, pk in columns if pk)
    typed = ", ".join(f"{name} {kind}" for name, kind, _ in columns)
    return f"{typed} | {', '.join(name for _, name in keys)}"


def _applied_migrations(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    if connection.execute(query, [MIGRATIONS_TABLE]).fetchone() is None:
        return []
    columns = "id, name, applied_at"  # everything that sqlite-utils will read
    query = f"SELECT {columns} FROM {MIGRATIONS_TABLE} WHERE migration_set = 'growcache' ORDER BY id"
    return [name for _, name, _ in connection.execute(query).fetchall()]


def _has_rows(connection: sqlite3.Connection, table: str) -> bool:
    quoted = table.replace('"', '""')
    return connection.execute(f'SELECT 1 FROM "{quoted}" LIMIT 1').fetchone() is not None


class SealedTables(NamedTuple):
    """The tables without shards that count. ``seal`` is the last one written, if any."""

    totals: list[tuple[str, int]]
    meta: list[tuple[str, str]]
    editions: list[tuple[int, int, str, int, str | None]]
    seal: object

    def is_empty(self) -> bool:
        return not (self.totals or self.meta or self.editions)

    def right_seal(self) -> int:
        return zlib.crc32(repr(self[:3]).encode("utf-8", "backslashreplace"))


def read_sealed_tables(connection: sqlite3.Connection) -> SealedTables:
    """Read the tables themselves, because their SQL indexes may be damaged, too."""

    def rows(table: str) -> list[Any]:
        return sorted(connection.execute(f"SELECT * FROM {table} NOT INDEXED"), key=repr)

    meta = rows("meta")
    seal = next((value for key, value in meta if key == SEAL_META), None)
    noted = [row for row in meta if row[0] != SEAL_META]
    return SealedTables(
        rows("totals"), noted, rows("editions"), None if seal is None else int(seal)
    )
