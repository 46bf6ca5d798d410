"""The tables that an index must have are those that the migrations make."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from sqlite_utils import Database

from growcache.cache.check import check, repair
from growcache.cache.files import CacheLayout
from growcache.cache.index.contents import verified_contents
from growcache.cache.index.database import IndexFile
from growcache.cache.index.migrations import migrations
from growcache.cache.index.reader import read_editions, read_index
from growcache.cache.index.schema import (
    MIGRATION_NAMES,
    SEAL_META,
    SHARD_COLUMNS,
    TABLES,
    ShardState,
    ShardTableRow,
    row_seal,
)
from growcache.cache.index.structure import read_sealed_tables, table_columns, tables_state
from growcache.cache.side_files import Edition
from growcache.cache.status import read_status
from growcache.errors import CacheError, CachePathError
from tests.cache.making import add, opened


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        yield connection


@pytest.fixture
def made(connection: sqlite3.Connection) -> sqlite3.Connection:
    migrations.apply(Database(connection))
    return connection


def test_the_tables_are_those_of_the_migrations(made: sqlite3.Connection) -> None:
    assert table_columns(made) == TABLES
    assert [one.name for one in migrations.applied(Database(made))] == MIGRATION_NAMES
    assert tables_state(made) == "whole"


def test_before_they_are_made_there_are_none(connection: sqlite3.Connection) -> None:
    assert tables_state(connection) == "unmade"
    migrations.apply(Database(connection), stop_before="a_checksum_per_row")
    assert tables_state(connection) == "unmade"


def test_an_index_before_lanes_is_whole_and_keeps_its_checksum(
    connection: sqlite3.Connection,
) -> None:
    db = Database(connection)
    migrations.apply(db, stop_before="lanes_of_editions")
    connection.execute("INSERT INTO editions VALUES (0, 100, 'digest', 0)")
    seal = read_sealed_tables(connection).right_seal()
    db.table("meta").insert({"key": SEAL_META, "value": str(seal)})
    assert tables_state(connection) == "whole"
    before = read_editions(connection)
    migrations.apply(db)
    assert tables_state(connection) == "whole"
    assert read_editions(connection) == before == [Edition(0, 100, "digest", 0)]
    account = read_sealed_tables(connection)
    assert account.seal == account.right_seal() != seal


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_another_name_is_damage(table: str, made: sqlite3.Connection) -> None:
    made.execute("INSERT INTO shards (number) VALUES (1)")
    made.execute(f'ALTER TABLE "{table}" RENAME TO "{table}s"')
    assert tables_state(made) == "damaged"


@pytest.mark.parametrize(
    ("table", "column"),
    [
        (table, typed.split()[0])
        for table, columns in TABLES.items()
        for typed in columns.partition(" |")[0].split(", ")
    ],
)
def test_a_column_of_another_name_is_damage(
    table: str, column: str, made: sqlite3.Connection
) -> None:
    made.execute("INSERT INTO meta (key) VALUES ('a')")
    made.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{column}s"')
    assert tables_state(made) == "damaged"


@pytest.mark.parametrize("made_until", ["lanes_of_editions", "no_table_of_samples"])
def test_an_index_of_an_earlier_version_is_whole_and_keeps_its_shards(
    made_until: str, connection: sqlite3.Connection
) -> None:
    db = Database(connection)
    migrations.apply(db, stop_before=made_until)
    row = ShardTableRow(*(1, 2, ShardState.LIVE, 3, 0, 0, 4, 5, 6, 7, 8, 9, "digest", 1.5, 10))
    marks = ",".join("?" * 16)
    connection.execute(
        f"INSERT INTO shards ({SHARD_COLUMNS}, seal, samples_indexed) VALUES ({marks}, 1)",
        [*row, row_seal(row)],
    )
    connection.execute("INSERT INTO samples VALUES (1, 0, 'key', NULL, 0, 1)")
    connection.executemany(
        "INSERT INTO totals VALUES (?, ?)", [("drawn", 4), ("drawn_shards", 1)]
    )
    seal = read_sealed_tables(connection).right_seal()
    db.table("meta").insert({"key": SEAL_META, "value": str(seal)})
    assert tables_state(connection) == "whole"
    assert verified_contents(connection).rows == [row]
    migrations.apply(db)
    assert tables_state(connection) == "whole"
    assert table_columns(connection) == TABLES
    assert verified_contents(connection).rows == [row]


def test_an_index_of_a_newer_version_is_refused_and_stays(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with opened(root) as cache:
        add(cache, 0)
    with closing(sqlite3.connect(root / "index.sqlite")) as connection, connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations VALUES (99, 'growcache', 'later', '')"
        )
        connection.execute("ALTER TABLE shards RENAME COLUMN drawn_at TO committed_at")
    before = read_bytes(root)
    message = r"index\.sqlite was written by a newer growcache: upgrade growcache"
    for use in (lambda: opened(root).__enter__(), lambda: check(root), lambda: repair(root)):
        with pytest.raises(CachePathError, match=message):
            use()
    for read in (read_index, read_status):
        with pytest.raises(CachePathError, match=message):
            read(root)
    assert read_bytes(root) == before


def test_an_index_that_is_refused_is_closed(tmp_path: Path) -> None:
    layout = CacheLayout(tmp_path)
    with closing(sqlite3.connect(layout.index)) as connection:
        connection.execute("CREATE TABLE shards (number)")
    with pytest.raises(CacheError) as refused:
        IndexFile.open(layout)
    assert str(layout.index) not in [file.path for file in psutil.Process().open_files()]
    del refused  # until here it holds the frames, and with them a connection that is open


def read_bytes(root: Path) -> dict[str, bytes]:
    """Return every file but SQLite's shared memory and the locks."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {p.name: p.read_bytes() for p in files if p.suffix not in (".lock", ".sqlite-shm")}


def test_a_migration_of_another_name_is_damage(made: sqlite3.Connection) -> None:
    made.execute("INSERT INTO totals VALUES ('drawn', 1)")
    made.execute("UPDATE _sqlite_migrations SET name = 'the_cachf' WHERE id = 1")
    assert tables_state(made) == "damaged"
