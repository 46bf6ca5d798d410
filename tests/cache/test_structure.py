"""The tables that an index must have are those that the migrations make."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from sqlite_utils import Database

from growcache.cache.index.migrations import migrations
from growcache.cache.index.reader import (
    read_editions,
    read_sealed_tables,
    table_columns,
    tables_state,
)
from growcache.cache.index.schema import MIGRATION_NAMES, SEAL_META, TABLES
from growcache.cache.side_files import Edition


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


def test_a_migration_of_another_name_is_damage(made: sqlite3.Connection) -> None:
    made.execute("INSERT INTO totals VALUES ('drawn', 1)")
    made.execute("UPDATE _sqlite_migrations SET name = 'the_cachf' WHERE id = 1")
    assert tables_state(made) == "damaged"
