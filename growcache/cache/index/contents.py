"""All that an index file says, as far as it can be believed: for `check` and for repair."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from growcache.cache.files import Layout
from growcache.cache.index.reader import reading
from growcache.cache.index.rows import Edition, ShardState, StockRow
from growcache.cache.index.seals import STOCK_COLUMNS, read_account, split_rows
from growcache.cache.index.structure import OTHER_TABLES, REFUSALS, State, state_of
from growcache.errors import CacheMissingError

MOST_MESSAGES = 10  # of SQLite, about one file


class Range(NamedTuple):
    """Numbers first … last that were drawn and are gone, and the samples they had."""

    first: int
    last: int
    shards: int
    samples: int


@dataclass(slots=True)
class Contents:
    """What an index says.

    Attributes:
        problems: what is wrong with it, in words.
        rows: of shards in any state, whose checksums are right.
        totals: running totals by name; None where their checksum is wrong.
        meta: notes; empty where their checksum is wrong.
        editions: the same.
        ranges: of numbers that are gone; None where they cannot be right.
        uses: (shard, job, uses).
        jobs: (job, when it was seen last).
        history: (wall time, record).
        finished: (name of a lease whose uses are counted, when).
        spoiled: numbers of rows whose checksums are wrong.
        coherent: whether rows, ranges and totals are all there and agree.
        counted: whether no row or range is missing, but for the spoiled: what none of them
            speaks of was never committed.
        readable: whether SQLite finds nothing wrong with the file, and all tables are there.
    """

    problems: list[str] = field(default_factory=list)
    rows: list[StockRow] = field(default_factory=list)
    totals: dict[str, int] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    editions: list[Edition] = field(default_factory=list)
    ranges: list[Range] | None = None
    uses: list[tuple[int, str, int]] = field(default_factory=list)
    jobs: list[tuple[str, float]] = field(default_factory=list)
    history: list[tuple[float, str]] = field(default_factory=list)
    finished: list[tuple[str, float]] = field(default_factory=list)
    spoiled: list[object] = field(default_factory=list)
    coherent: bool = False
    counted: bool = False
    readable: bool = False


def read_contents(layout: Layout) -> Contents:
    """Return what the index says now; of one that SQLite refuses, what can still be read.

    Raises:
        CacheMissingError: there is no index.
    """
    if not layout.index.exists():
        raise CacheMissingError(f"{layout.index} is missing")
    found = Contents()
    try:
        with reading(layout) as connection:
            connection.text_factory = _text
            connection.execute("BEGIN")  # one picture, whatever commits meanwhile
            found.problems += _integrity(connection)
            made = _tables(connection, found)
            found.readable = made == "whole" and not found.problems
            if made != "unmade":
                _read_all(connection, found)
    except REFUSALS as error:
        found.problems.append(str(error))
    found.problems = [f"{layout.index}: {problem}" for problem in found.problems]
    return found


def flaws(connection: sqlite3.Connection) -> list[str]:
    """Return what is wrong with the index of a cache that is being opened."""
    found = Contents(problems=_integrity(connection))
    _read_account(connection, found)
    _read_shards(connection, found)
    return found.problems


def _integrity(connection: sqlite3.Connection) -> list[str]:
    try:
        rows = connection.execute(f"PRAGMA integrity_check({MOST_MESSAGES})").fetchall()
    except REFUSALS as error:
        return [str(error)]
    return [text for (text,) in rows if text != "ok"]


def _tables(connection: sqlite3.Connection, found: Contents) -> State:
    try:
        state = state_of(connection)
    except (*REFUSALS, TypeError) as error:  # a table may have a number for its name
        found.problems.append(str(error))
        return "damaged"
    if state == "damaged":
        found.problems.append(OTHER_TABLES)
    return state


def _read_all(connection: sqlite3.Connection, found: Contents) -> None:
    for read in (_read_account, _read_shards, _read_uses, _read_history):
        try:
            read(connection, found)
        except (*REFUSALS, ValueError, TypeError) as error:
            found.problems.append(str(error))


def _read_account(connection: sqlite3.Connection, found: Contents) -> None:
    account = read_account(connection)
    if account.seal is None and not account.is_empty():
        found.problems.append("the checksum of totals and notes is missing")
    elif account.seal not in (None, account.right_seal()):
        found.problems.append("totals, notes or editions are not what was written")
    else:
        found.totals = dict(account.totals)
        found.meta = {key: json.loads(value) for key, value in account.meta}
        found.editions = [Edition(*row) for row in account.editions]


def _read_shards(connection: sqlite3.Connection, found: Contents) -> None:
    rows = connection.execute(f"SELECT {STOCK_COLUMNS}, seal FROM shards").fetchall()
    found.rows, found.spoiled = split_rows(rows)
    found.problems += [f"the row of shard {n} is not what was written" for n in found.spoiled]
    query = "SELECT first, last, shards, samples FROM deleted_ranges ORDER BY first"
    ranges = list(map(Range._make, connection.execute(query).fetchall()))
    if not _disjoint(ranges, found.rows):
        found.problems.append("ranges of deleted shards are not what was written")
        return
    found.ranges = ranges
    if found.totals is None or found.spoiled:
        found.counted = found.readable
        return
    wrong = [*_miscounted(found.totals, found.rows, ranges)]
    found.problems += wrong
    found.coherent = found.counted = not wrong and bool(found.meta.get("initialised"))


def _disjoint(ranges: Sequence[Range], rows: Sequence[StockRow]) -> bool:
    """Whether every number is in one range, or has one row, or neither."""
    edge, numbers = -1, sorted(row.number for row in rows)
    place = 0
    for first, last, shards, samples in ranges:
        if not all(type(n) is int for n in (first, last, shards, samples)):
            return False
        if first <= edge or shards != last - first + 1 or shards < 1 or samples < 0:
            return False
        while place < len(numbers) and numbers[place] < first:
            place += 1
        if place < len(numbers) and numbers[place] <= last:
            return False
        edge = last
    return True


def _miscounted(
    totals: dict[str, int], rows: Sequence[StockRow], ranges: Sequence[Range]
) -> Iterator[str]:
    shards = len(rows) + sum(r.shards for r in ranges)
    samples = sum(row.samples for row in rows) + sum(r.samples for r in ranges)
    for name, counted in (("drawn_shards", shards), ("drawn", samples)):
        if totals.get(name, 0) != counted:
            yield f"{name} is {totals.get(name, 0)}, but there are rows of {counted}"


def _read_uses(connection: sqlite3.Connection, found: Contents) -> None:
    live = {row.number for row in found.rows if row.state != ShardState.DELETED}
    uses = connection.execute("SELECT shard, job, uses FROM uses").fetchall()
    found.uses = [(n, str(job), int(count)) for n, job, count in uses if n in live]
    jobs = connection.execute("SELECT job, last_seen FROM jobs").fetchall()
    found.jobs = [(str(job), float(seen)) for job, seen in jobs]
    names = connection.execute("SELECT name, finished_at FROM finished_leases").fetchall()
    found.finished = [(str(name), float(at)) for name, at in names]


def _read_history(connection: sqlite3.Connection, found: Contents) -> None:
    for at, record in connection.execute("SELECT at, record FROM history ORDER BY id"):
        json.loads(record)
        found.history.append((float(at), record))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
