"""Read the index: one consistent view, on a connection that is closed before the return.

SQLite detects a page that is no longer a page. It does not detect a number that became another
number, or a column that got another name. A wrong number may draw samples twice or lose good
shards. So every row of a shard has a checksum, and totals, notes and editions share another
one. The tables are compared with those that were created.
"""

from __future__ import annotations

import json
import operator
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

import orjson

from growcache.cache.files import CacheLayout
from growcache.cache.index.schema import (
    LEASE_BYTES_META,
    MIGRATION_NAMES,
    MIGRATIONS_TABLE,
    OWN_TABLES,
    SEAL_META,
    SHARD_COLUMNS,
    TABLES,
    TABLES_AFTER,
    CacheTotals,
    ShardRow,
    ShardState,
    ShardTableRow,
    row_seal,
)
from growcache.cache.locks import fork_lock
from growcache.cache.side_files import Edition, Identity, read_identity
from growcache.errors import CacheError, CacheMissingError, CachePathError

if TYPE_CHECKING:
    from growcache.schema import Schema

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


BUSY_SECONDS = 10.0
# In a shared folder, the index and its log belong to the writer's user alone at first.
# Only then the group gets access.
OPENING_SECONDS = 2.0
_OPENING_PAUSE_SECONDS = 0.02


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


@contextmanager
def reading_index(layout: CacheLayout) -> Iterator[sqlite3.Connection]:
    # Not split, because all connections of a process share SQLite's locks.
    with fork_lock(), closing(connect_read_only(layout)) as connection:
        yield connection


def connect_read_only(layout: CacheLayout) -> sqlite3.Connection:
    """Return a read-only connection.

    Raises:
        CacheMissingError: The database belongs to another program, or was just removed.
    """
    if not layout.marker.exists() and is_other_database(layout.index):
        raise CacheMissingError(
            f"no cache at {layout.directory}: {layout.index.name} there belongs to another "
            "program"
        )
    if layout.index.with_name(layout.index.name + "-journal").exists():
        _roll_back(layout)
    deadline = time.monotonic() + OPENING_SECONDS
    while True:
        try:
            return _opened_read_only(layout)
        except sqlite3.OperationalError as error:
            if not layout.index.exists():
                raise CacheMissingError(
                    f"the cache at {layout.directory} was removed"
                ) from None
            if not _cannot_open(error) or time.monotonic() > deadline:
                raise
            time.sleep(_OPENING_PAUSE_SECONDS)


def _opened_read_only(layout: CacheLayout) -> sqlite3.Connection:
    connection = _connect(layout, "ro")
    try:
        connection.execute("PRAGMA schema_version").fetchall()  # opens the log, too
    except BaseException:
        connection.close()
        raise
    return connection


def _cannot_open(error: sqlite3.OperationalError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN


def _roll_back(layout: CacheLayout) -> None:
    """Roll back the changes of a supervisor that died while it made or closed the index.

    The log needs no rollback, but switching to it and back does. SQLite does so only for users
    with write access, while no writer lives.
    """
    with suppress(sqlite3.OperationalError), closing(_connect(layout, "rw")) as connection:
        connection.execute("PRAGMA schema_version").fetchone()


def _connect(layout: CacheLayout, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(layout.index))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)


def newer_index_error(layout: CacheLayout) -> CachePathError:
    return CachePathError(
        f"the index {layout.index} was written by a newer growcache: upgrade growcache, or choose "
        "another cache.path",
        code="GC408",
    )


def unreadable_index_error(layout: CacheLayout, reason: object) -> CacheError:
    with suppress(*SQLITE_ERRORS, ValueError, TypeError), reading_index(layout) as connection:
        if tables_state(connection) == "newer":
            return newer_index_error(layout)
    return damaged_index_error(layout, reason)


def damaged_index_error(layout: CacheLayout, reason: object) -> CacheError:
    return CacheError(
        f"the index {layout.index} is damaged ({reason}); repair it with: growcache check "
        f"{layout.root} --repair",
        code="GC416",
    )


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
