"""The tables of the index as migrations of sqlite-utils. Every later change adds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlite_utils.migrations import Migrations

from growcache.cache.index.schema import SEAL_META, SHARD_COLUMNS, ShardTableRow, row_seal
from growcache.cache.index.structure import read_sealed_tables

if TYPE_CHECKING:
    from sqlite_utils import Database


migrations = Migrations("growcache")


@migrations()
def the_cache(db: Database) -> None:
    db.table("shards").create(
        {
            "number": int,
            "seq": int,
            "state": int,
            "group_number": int,
            "edition": int,
            "round": int,
            "samples": int,
            "parts": int,
            "holes": int,
            "shard_bytes": int,
            "allocated": int,
            "record_bytes": int,
            "digest": str,
            "drawn_at": float,
            "uses": int,
            "samples_indexed": int,
        },
        pk="number",
    )
    db.table("holes").create(
        {"id": int, "shard": int, "key": str, "part": int, "reason": str}, pk="id"
    )
    db.table("editions").create(
        {"edition": int, "objects": int, "digest": str, "first_group": int}, pk="edition"
    )
    db.table("jobs").create({"job": str, "last_seen": float}, pk="job")
    db.table("history").create({"id": int, "at": float, "record": str}, pk="id")
    db.table("meta").create({"key": str, "value": str}, pk="key")
    db.table("totals").create({"name": str, "value": int}, pk="name")
    db.table("finished_leases").create({"name": str, "finished_at": float}, pk="name")
    db.table("deleted_ranges").create(
        {"first": int, "last": int, "shards": int, "samples": int}, pk="first"
    )
    # Many narrow rows, which take a third less space without a rowid.
    db.execute(
        "CREATE TABLE samples (shard INTEGER, i INTEGER, key TEXT, etag TEXT, "
        "start INTEGER, stop INTEGER, PRIMARY KEY (shard, i)) WITHOUT ROWID"
    )
    db.execute(
        "CREATE TABLE uses (shard INTEGER, job TEXT, uses INTEGER, "
        "PRIMARY KEY (shard, job)) WITHOUT ROWID"
    )


@migrations()
def a_checksum_per_row(db: Database) -> None:
    """Add checksums that reveal changed numbers on disk; see `growcache.cache.index.reader`."""
    db.table("shards").add_column("seal", int)
    rows = db.execute(f"SELECT {SHARD_COLUMNS} FROM shards").fetchall()
    seals = [(row_seal(row), row.number) for row in map(ShardTableRow._make, rows)]
    db.conn.executemany("UPDATE shards SET seal = ? WHERE number = ?", seals)
    account = read_sealed_tables(db.conn)
    if not account.is_empty():
        db.table("meta").insert({"key": SEAL_META, "value": str(account.right_seal())})


@migrations()
def lanes_of_editions(db: Database) -> None:
    """Add the lanes that a node owned."""
    before = read_sealed_tables(db.conn)
    db.table("editions").add_column("lanes", str)
    if before.seal == before.right_seal():
        seal = read_sealed_tables(db.conn).right_seal()
        db.table("meta").upsert({"key": SEAL_META, "value": str(seal)}, pk="key")


@migrations()
def no_table_of_samples(db: Database) -> None:
    """Drop the row per sample, which nothing reads because the sidecars have the origins."""
    db.execute("DROP TABLE samples")
    db.execute("ALTER TABLE shards DROP COLUMN samples_indexed")
