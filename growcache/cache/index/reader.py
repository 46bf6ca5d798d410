"""A reader's picture of the index."""

from __future__ import annotations

import json
import operator
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import orjson

from growcache.cache.files import Layout
from growcache.cache.identity import Identity, read_identity
from growcache.cache.index.rows import Edition, ShardRow, ShardState, Totals
from growcache.cache.index.seals import SEAL
from growcache.cache.index.structure import is_others
from growcache.cache.undivided import undivided
from growcache.errors import CacheError, CacheMissingError
from growcache.schema import Schema

BUSY_SECONDS = 10.0
LEASE_BYTES_META = "lease_bytes"  # what readers' leases may take, all together

_SEQ = operator.attrgetter("seq")
_NUMBER = operator.attrgetter("number")

# All rows come as one: sqlite3 lets go of the GIL for every row it fetches, and to get it
# back beside a busy main thread takes a switch interval (5 ms) each time.
_NUMBERS = ("number", "seq", "group_number", "edition", "samples", "shard_bytes")
_TEXTS = (*_NUMBERS, "'\"' || digest || '\"'", "printf('%!.17g', drawn_at)")
_PACKED = ", ".join(f"group_concat({text})" for text in _TEXTS)
_new_row = partial(tuple.__new__, ShardRow)  # unlike `ShardRow._make`, no Python per row


@dataclass(frozen=True, slots=True)
class IndexView:
    """The index at one moment.

    Attributes:
        shards: the live shards, oldest first.
        totals: see `Totals`.
        identity: what the cache is of; None before the first sample was measured.
        complete: whether the whole population is cached.
        population: parts of the source, once it is listed.
        population_samples: estimated samples of the source.
        editions: the recorded editions.
        meta: everything else that the supervisor noted, by name.
        retired: shards on their way out, oldest first; read only where they are asked for.
        uses: how often finished leases of a job used which shard; likewise.
        counted: the names of the finished leases in ``uses`` that may still have a file.
    """

    shards: list[ShardRow] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    identity: Identity | None = None
    complete: bool = False
    population: int | None = None
    population_samples: float | None = None
    editions: list[Edition] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    retired: list[ShardRow] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)
    counted: frozenset[str] = frozenset()

    @property
    def schema(self) -> Schema | None:
        """The schema of every sample; None before the first was measured."""
        return self.identity.schema if self.identity else None

    @property
    def fingerprint(self) -> str | None:
        """Of what the cache is filled from; None before the first sample was measured."""
        return self.identity.fingerprint if self.identity else None

    @property
    def cache_format(self) -> str:
        """The format of the shards."""
        return self.identity.cache_format if self.identity else "tfrecord"


def lease_bytes(view: IndexView) -> int | None:
    """Return what readers' leases may take, all together; None where no service noted that."""
    found = view.meta.get(LEASE_BYTES_META)
    return None if found is None else int(found)


def read_index(
    root: str | os.PathLike[str], *, retired: bool = False, job: str | None = None
) -> IndexView:
    """Return what the index says now.

    Args:
        root: of the cache.
        retired: whether to tell also of shards on their way out, which leases may hold.
        job: whose uses to tell.

    The connection is fresh and is closed before this returns: a cursor that stays open
    keeps seeing shards as live after they were retired.

    Raises:
        CacheMissingError: there is no cache at the path.
        CacheError: the index is damaged.
    """
    layout = Layout(root)
    layout.require()
    try:
        with reading(layout) as connection:
            connection.execute("BEGIN")  # one picture, whatever commits meanwhile
            live, meta, editions, totals = _read(connection)
            going = _rows(connection, ShardState.RETIRED) if retired else []
            uses, counted = ({}, ()) if job is None else _uses(connection, job)
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        # Not only what SQLite refuses: a flipped bit may make a text of a number.
        if "no such table" in str(error):  # created this instant
            return IndexView()
        if not layout.index.exists():
            layout.require()
        raise damaged(layout, error) from error
    return IndexView(
        shards=live,
        totals=totals,
        identity=read_identity(root),
        complete=bool(meta.pop("complete", False)),
        population=meta.pop("population", None),
        population_samples=meta.pop("population_samples", None),
        editions=editions,
        meta=meta,
        retired=going,
        uses=uses,
        counted=frozenset(counted),
    )


def _read(
    connection: sqlite3.Connection,
) -> tuple[list[ShardRow], dict[str, Any], list[Edition], Totals]:
    live = _rows(connection, ShardState.LIVE)
    _, live_bytes = _sums(connection, ShardState.LIVE)
    retired, retired_bytes = _sums(connection, ShardState.RETIRED)
    meta = {
        key: json.loads(value)
        for key, value in connection.execute("SELECT key, value FROM meta").fetchall()
    }
    editions = read_editions(connection)
    meta.pop(SEAL, None)
    sums = dict(connection.execute("SELECT name, value FROM totals").fetchall())
    totals = Totals(
        shards=len(live),
        samples=sum(row.samples for row in live),
        bytes=live_bytes,
        retired_shards=retired,
        retired_bytes=retired_bytes,
        **sums,
    )
    return live, meta, editions, totals


def _rows(connection: sqlite3.Connection, state: ShardState) -> list[ShardRow]:
    """Return the shards in a state, oldest first."""
    query = f"SELECT {_PACKED} FROM shards WHERE state = ?"
    packed = connection.execute(query, [state]).fetchone()
    columns = [orjson.loads(f"[{column or ''}]") for column in packed]
    rows = list(map(_new_row, zip(*columns, strict=True)))
    rows.sort(key=_SEQ)  # nearly in order already, so half the time of ORDER BY
    if operator.countOf(map(type, map(_NUMBER, rows)), int) != len(rows):
        raise ValueError("a shard's number is none")  # the column lost its definition
    return rows


def live_numbers(root: str | os.PathLike[str]) -> frozenset[int]:
    """Return the numbers of the live shards now: a second look that costs little.

    The connection is fresh, see `read_index`.

    Raises:
        CacheMissingError: there is no cache at the path any more.
        CacheError: the index is damaged.
    """
    layout = Layout(root)
    layout.require()
    query = "SELECT group_concat(number) FROM shards WHERE state = ?"
    try:
        with reading(layout) as connection:
            (packed,) = connection.execute(query, [ShardState.LIVE]).fetchone()
        return frozenset(orjson.loads(f"[{packed or ''}]"))
    except (sqlite3.Error, ValueError, TypeError) as error:
        if not layout.index.exists():
            layout.require()
        raise damaged(layout, error) from error


def _uses(connection: sqlite3.Connection, job: str) -> tuple[dict[int, int], Iterable[str]]:
    """Return the uses of a job by shard, and the names of the leases counted last."""
    query = "SELECT group_concat(shard), group_concat(uses) FROM uses WHERE job = ?"
    packed = connection.execute(query, [job]).fetchone()
    shards, uses = (orjson.loads(f"[{column or ''}]") for column in packed)
    names = connection.execute("SELECT name FROM finished_leases").fetchall()
    return dict(zip(shards, uses, strict=True)), [name for (name,) in names]


def _sums(connection: sqlite3.Connection, state: ShardState) -> tuple[int, int]:
    """Return (shards, allocated bytes) in a state."""
    query = "SELECT count(*), coalesce(sum(allocated), 0) FROM shards WHERE state = ?"
    shards, nbytes = connection.execute(query, [state]).fetchone()
    return shards, nbytes


def read_editions(connection: sqlite3.Connection) -> list[Edition]:
    """Return the recorded editions in order."""
    query = "SELECT edition, objects, digest, first_group FROM editions ORDER BY edition"
    return [Edition(*row) for row in connection.execute(query).fetchall()]


@contextmanager
def reading(layout: Layout) -> Iterator[sqlite3.Connection]:
    """Lend a connection that cannot write, for one read."""
    # Undivided, for SQLite has locks that all its connections in a process share.
    with undivided(), closing(connect_read_only(layout)) as connection:
        yield connection


def connect_read_only(layout: Layout) -> sqlite3.Connection:
    """Return a connection that cannot write.

    Raises:
        CacheMissingError: what is there is another program's, or was just removed.
    """
    if not layout.marker.exists() and is_others(layout.index):
        raise CacheMissingError(
            f"no cache at {layout.root}: {layout.index.name} there is another program's"
        )
    if layout.index.with_name(layout.index.name + "-journal").exists():
        _roll_back(layout)
    try:
        return _connect(layout, "ro")
    except sqlite3.OperationalError:
        if layout.index.exists():
            raise
        raise CacheMissingError(f"the cache at {layout.root} was removed") from None


def _roll_back(layout: Layout) -> None:
    """Undo what a service that died had begun while it made or closed the index.

    The log needs none of that, but going over to it and back does. SQLite does so only
    where no writer lives, and only for somebody who may write.
    """
    with suppress(sqlite3.OperationalError), closing(_connect(layout, "rw")) as connection:
        connection.execute("PRAGMA schema_version").fetchone()


def _connect(layout: Layout, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(layout.index))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)


def damaged(layout: Layout, reason: object) -> CacheError:
    """Return the error that says how to go on with an index that is not what was written."""
    return CacheError(
        f"the index {layout.index} is damaged ({reason}); mend it with: "
        f"growcache check {layout.root} --repair"
    )
