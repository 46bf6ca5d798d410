"""The one writer of the index; every change is a transaction, within a budget, on a full disk too."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sqlite3
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from growcache.cache.files import FILE_MODE, CacheLayout, allocated
from growcache.cache.index.reader import (
    BUSY_SECONDS,
    SQLITE_ERRORS,
    WRONG_TABLES,
    IndexContents,
    damaged_index_error,
    newer_index_error,
    read_editions,
    read_sealed_tables,
    tables_state,
    verified_contents,
)
from growcache.cache.index.schema import (
    KEPT_JOBS,
    SEAL_META,
    SHARD_COLUMNS,
    STATE_MASK,
    EvictedShard,
    FinishedLease,
    ShardState,
    ShardTableRow,
    merge_ranges,
    row_seal,
    split_range,
)
from growcache.cache.side_files import Edition
from growcache.cache.sidecar import EMPTY, Sidecar
from growcache.cache.space import Ballast, SpaceAccount
from growcache.errors import CacheError, CacheFullError, IndexInDoubtError

if TYPE_CHECKING:
    from sqlite_utils import Database


KEPT_HOLES = 200


# A paused reader may keep the WAL from being truncated. The supervisor must not wait for
# it: it tries again later, and lets no permits out meanwhile.
CHECKPOINT_BUSY_MS = 20

_FULL_DISK_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
}


class IndexDatabase:
    def __init__(self, layout: CacheLayout, db: Database) -> None:
        self._layout = layout
        self._db = db
        self._connection: sqlite3.Connection = db.conn
        self._wal = layout.index.with_name(layout.index.name + "-wal")

    @classmethod
    def open(cls, layout: CacheLayout) -> IndexDatabase:
        """Open or create the index, and apply migrations. May raise CacheError."""
        from sqlite_utils import Database  # readers need neither it nor its 0.2 s

        from growcache.cache.index.migrations import migrations

        try:
            _create_file(layout)
            connection = sqlite3.connect(
                layout.index, timeout=BUSY_SECONDS, isolation_level=None
            )
            match tables_state(connection):
                case "damaged":
                    raise damaged_index_error(layout, WRONG_TABLES)
                case "newer":
                    raise newer_index_error(layout)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # maintain() does it
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA secure_delete = ON")  # purged keys leave the file, too
            index = cls(layout, Database(connection))
            migrations.apply(index._db)
        except (*SQLITE_ERRORS, TypeError) as error:
            raise index_error(layout, error) from error
        return index

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make everything in the block durable together, or nothing.

        CacheFullError, CacheError: nothing happened. IndexInDoubtError: the disk failed at the end of the
        block, and all of it may be there at the next start, or nothing.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._seal()
        except SQLITE_ERRORS as error:
            self._rollback()
            raise index_error(self._layout, error) from error
        except BaseException:
            self._rollback()
            raise
        self._commit()

    def _commit(self) -> None:
        try:
            self._connection.execute("COMMIT")
        except SQLITE_ERRORS as error:
            self._rollback()
            named = index_error(self._layout, error)
            if isinstance(named, CacheFullError):  # before its last page was in the log
                raise named from error
            # SQLite forgets it, but it may stand whole in the log, which is read anew
            # after a crash. No second try of a failed sync would tell.
            raise IndexInDoubtError(str(named)) from error

    def _seal(self) -> None:
        account = read_sealed_tables(self._connection)
        if account.right_seal() != account.seal:  # a turn without a change writes nothing
            self.set_meta(SEAL_META, account.right_seal())

    def verify(self) -> None:
        """Raise CacheError if a value differs from its checksum; takes tens of milliseconds."""
        if problems := verified_contents(self._connection).problems:
            raise damaged_index_error(self._layout, problems[0])

    def replace(self, contents: IndexContents) -> None:
        """Replace all contents; uses and notes of holes are lost."""
        self.clear()
        self._put_shards(contents.rows)
        for edition in contents.editions:
            self.insert_edition(edition)
        self.add_totals(**contents.totals)
        for key, value in contents.meta.items():
            self.set_meta(key, value)
        for query, rows in (
            ("INSERT INTO deleted_ranges VALUES (?, ?, ?, ?)", contents.ranges),
            ("INSERT INTO history (at, record) VALUES (?, ?)", contents.history),
        ):
            self._connection.executemany(query, rows)

    def forget_shards(self, rows: Sequence[ShardTableRow], retried: int) -> None:
        """Forget damaged shards: retired ones are deleted, live ones are drawn again.

        ``retried`` holes of theirs count neither as holes nor as visits already.
        """
        live = [row for row in rows if row.state == ShardState.LIVE]
        retired = [row.number for row in rows if row.state == ShardState.RETIRED]
        self.set_state(retired, ShardState.DELETED)
        numbers = [(row.number,) for row in live]
        for table, column in (("shards", "number"), ("uses", "shard"), ("holes", "shard")):
            self._connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", numbers)
        self.add_totals(
            drawn=-sum(row.samples for row in live),
            drawn_shards=-len(live),
            drawn_parts=retried - sum(row.parts for row in live),
            holes=retried - sum(row.holes for row in live),
        )
        self.set_meta("complete", False)

    def _rollback(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    # Shards

    def shards(self) -> list[ShardTableRow]:
        rows = self._connection.execute(
            f"SELECT {SHARD_COLUMNS} FROM shards WHERE state != ? ORDER BY seq",
            [ShardState.DELETED],
        )
        return list(map(ShardTableRow._make, rows.fetchall()))

    def next_seq(self) -> int:
        (last,) = self._connection.execute("SELECT max(seq) FROM shards").fetchone()
        return max(-1 if last is None else last, int(self.meta("pruned_seq", -1))) + 1

    def insert_shards(self, shards: Sequence[tuple[ShardTableRow, Sidecar]]) -> None:
        self._put_shards([row for row, _ in shards])
        for row, sidecar in shards:
            self._insert_holes(row.number, sidecar)
            self.add_totals(
                drawn=row.samples,
                drawn_parts=row.parts,
                drawn_shards=1,
                holes=row.holes,
                empty_visits=sidecar.counts.get(EMPTY, 0),
            )

    def take_out(self, row: ShardTableRow, empty_visits: int) -> None:
        """Forget a shard that a purge rewrites. Until then it counts as never drawn."""
        for table, column in (("shards", "number"), ("holes", "shard")):
            self._connection.execute(f"DELETE FROM {table} WHERE {column} = ?", [row.number])
        self.add_totals(
            drawn=-row.samples,
            drawn_parts=-row.parts,
            drawn_shards=-1,
            holes=-row.holes,
            empty_visits=-empty_visits,
        )

    def forget_holes(self, is_purged: Callable[[str], bool]) -> None:
        """Forget what is noted of holes in purged objects."""
        rows = self._connection.execute("SELECT id, key FROM holes").fetchall()
        gone = [(id_,) for id_, key in rows if is_purged(key)]
        self._connection.executemany("DELETE FROM holes WHERE id = ?", gone)

    def return_shards(self, rows: Sequence[ShardTableRow]) -> None:
        """Add shards that had been evicted; they do not count as drawn again."""
        for row in rows:
            self.add_totals(
                refetched_samples=row.samples, refetched_shards=1, **self._returned(row)
            )
        self._put_shards(rows)

    def _returned(self, row: ShardTableRow) -> dict[str, int]:
        """Return the change of totals that keeps drawn = live + evicted + lost."""
        remains = self.remains([row.number]).get(row.number)
        before = remains.samples if remains else self._leave_range(row.number, row.samples)
        totals = self.totals()
        evicted = totals.get("evicted_shards", 0) and totals.get("evicted_samples", 0) >= before
        gone = "evicted" if evicted else "lost"
        change = {
            "drawn": row.samples - before,
            f"{gone}_samples": -before,
            f"{gone}_shards": -1,
        }
        if remains is None and not before:  # a rebuilt index knew only that it was drawn
            change |= {"drawn_parts": row.parts, "holes": row.holes}
        return change

    def _leave_range(self, number: int, samples: int) -> int:
        """Take a number out of the ranges; return the samples that were counted for it."""
        row = self._connection.execute(
            "SELECT * FROM deleted_ranges WHERE first <= ?1 AND last >= ?1", [number]
        ).fetchone()
        left = split_range(row, number, samples)
        self._connection.execute("DELETE FROM deleted_ranges WHERE first = ?", [row[0]])
        self._connection.executemany("INSERT INTO deleted_ranges VALUES (?, ?, ?, ?)", left)
        return int(row[3]) - sum(piece[3] for piece in left)

    def _put_shards(self, rows: Sequence[ShardTableRow]) -> None:
        marks = ",".join("?" * 16)
        self._connection.executemany(
            f"INSERT OR REPLACE INTO shards ({SHARD_COLUMNS}, seal) VALUES ({marks})",
            [(*row, row_seal(row)) for row in rows],
        )

    def _insert_holes(self, number: int, sidecar: Sidecar) -> None:
        self._db.table("holes").insert_all(
            {
                "shard": number,
                "key": _valid_unicode(hole.key),
                "part": hole.part,
                "reason": _valid_unicode(hole.reason)[:200],
            }
            for hole in sidecar.holes[-KEPT_HOLES:]
        )
        self._connection.execute(
            "DELETE FROM holes WHERE id <= (SELECT max(id) FROM holes) - ?", [KEPT_HOLES]
        )

    def holes(self) -> list[tuple[int, str, int]]:
        return self._connection.execute(
            "SELECT shard, key, part FROM holes ORDER BY id"
        ).fetchall()

    def set_state(self, numbers: Iterable[int], state: ShardState) -> None:
        """Set the state of shards; deleted ones lose their uses."""
        rows = [(number,) for number in numbers]
        self._connection.executemany(
            f"UPDATE shards SET state = {state:d}, seal = (seal & ~{STATE_MASK}) | {state:d} "
            "WHERE number = ?",
            rows,
        )
        if state is ShardState.DELETED:
            self._connection.executemany("DELETE FROM uses WHERE shard = ?", rows)

    def remains(self, numbers: Iterable[int]) -> dict[int, EvictedShard]:
        """Return by number what is known of evicted shards; nothing of pruned ones."""
        found: dict[int, EvictedShard] = {}
        query = "SELECT samples, allocated FROM shards WHERE number = ?"
        for number in numbers:
            if row := self._connection.execute(query, [number]).fetchone():
                found[number] = EvictedShard(*row)
        return found

    def known(self, numbers: Sequence[int]) -> set[int]:
        """Return those of the numbers, ascending, that have a row."""
        rows = self._connection.execute(
            "SELECT number FROM shards WHERE number BETWEEN ? AND ?", [numbers[0], numbers[-1]]
        )
        found = {number for (number,) in rows.fetchall()}.intersection(numbers)
        ranges = self._connection.execute("SELECT first, last FROM deleted_ranges").fetchall()
        for low, high in ranges:
            found.update(numbers[bisect_left(numbers, low) : bisect_right(numbers, high)])
        return found

    def unknown(self, stop: int) -> list[range]:
        """Return the numbers below ``stop`` without a row; a cache of months has drawn millions."""
        rows = self._connection.execute(
            "SELECT number AS low, number FROM shards WHERE number < ? "
            "UNION ALL SELECT first, last FROM deleted_ranges ORDER BY low",
            [stop],
        )
        found, at = [], 0
        for low, high in rows.fetchall():
            if min(low, stop) > at:
                found.append(range(at, min(low, stop)))
            at = max(at, high + 1)
        return [*found, range(at, stop)] if at < stop else found

    def last_group(self) -> int:
        """Return the highest group with a row; -1 if there is none."""
        (last,) = self._connection.execute("SELECT max(group_number) FROM shards").fetchone()
        return -1 if last is None else int(last)

    def prune_deleted(self, keep: int) -> None:
        """Merge all but the newest deleted rows into ranges with sums."""
        (count,) = self._connection.execute(
            "SELECT count(*) FROM shards WHERE state = ?", [ShardState.DELETED]
        ).fetchone()
        if count <= 2 * keep:  # in batches, because each costs a pass over the ranges
            return
        old = self._connection.execute(
            "SELECT number, samples, seq FROM shards WHERE state = ? ORDER BY seq LIMIT ?",
            [ShardState.DELETED, count - keep],
        ).fetchall()
        ranges = self._connection.execute("SELECT * FROM deleted_ranges").fetchall()
        merged = merge_ranges(ranges + [(n, n, 1, samples) for n, samples, _ in old])
        self._connection.executemany(
            "DELETE FROM shards WHERE number = ?", [(number,) for number, _, _ in old]
        )
        self._connection.execute("DELETE FROM deleted_ranges")
        self._connection.executemany("INSERT INTO deleted_ranges VALUES (?, ?, ?, ?)", merged)
        self.set_meta("pruned_seq", max(self.meta("pruned_seq", -1), old[-1][2]))

    # Readers

    def uses(self) -> dict[str, dict[int, int]]:
        """Return the uses per job and shard; the job that ended a lease last comes last."""
        jobs = self._connection.execute("SELECT job FROM jobs ORDER BY last_seen").fetchall()
        found: dict[str, dict[int, int]] = {job: {} for (job,) in jobs}
        for shard, job, uses in self._connection.execute("SELECT * FROM uses").fetchall():
            found.setdefault(job, {})[shard] = uses
        return found

    def finish_leases(self, leases: Iterable[FinishedLease], at: float) -> None:
        for name, job, numbers, delivered in leases:
            rows = [(number,) for number in numbers]
            self._connection.executemany(
                "INSERT INTO uses SELECT number, ?2, 1 FROM shards WHERE number = ?1 "
                "AND state < 2 ON CONFLICT DO UPDATE SET uses = uses + 1",
                [(number, job) for number in numbers],
            )
            if delivered is not None:
                self.add_totals(delivered=delivered)
            else:
                self._connection.executemany(
                    "INSERT INTO totals SELECT 'delivered', samples FROM shards WHERE number = ? "
                    "ON CONFLICT DO UPDATE SET value = value + excluded.value",
                    rows,
                )
            self._connection.executemany(
                "UPDATE shards SET uses = uses + 1 WHERE number = ?", rows
            )
            self._db.table("jobs").upsert({"job": job, "last_seen": at}, pk="job")
            self._db.table("finished_leases").insert(
                {"name": name, "finished_at": at}, replace=True
            )
        self._forget_old_jobs()

    def _forget_old_jobs(self) -> None:
        old = f"SELECT job FROM jobs ORDER BY last_seen DESC LIMIT -1 OFFSET {KEPT_JOBS}"
        self._connection.execute(f"DELETE FROM uses WHERE job IN ({old})")
        self._connection.execute(f"DELETE FROM jobs WHERE job IN ({old})")

    def finished_leases(self) -> set[str]:
        rows = self._connection.execute("SELECT name FROM finished_leases").fetchall()
        return {name for (name,) in rows}

    def forget_leases(self, names: Iterable[str]) -> None:
        self._connection.executemany(
            "DELETE FROM finished_leases WHERE name = ?", [(name,) for name in names]
        )

    # Small things

    def editions(self) -> list[Edition]:
        return read_editions(self._connection)

    def insert_edition(self, edition: Edition) -> None:
        row = {name: getattr(edition, name) for name in edition.__slots__}
        self._db.table("editions").insert(row)

    def totals(self) -> dict[str, int]:
        return dict(self._connection.execute("SELECT name, value FROM totals").fetchall())

    def add_totals(self, **amounts: int) -> None:
        """Add to running totals, in the transaction of what they count."""
        self._connection.executemany(
            "INSERT INTO totals VALUES (?, ?) "
            "ON CONFLICT DO UPDATE SET value = value + excluded.value",
            [(name, amount) for name, amount in amounts.items() if amount],
        )

    def meta(self, key: str, default: Any = None) -> Any:
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", [key]).fetchone()
        return json.loads(row[0]) if row else default

    def set_meta(self, key: str, value: Any) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [key, json.dumps(value)]
        )

    def append_history(self, record: dict[str, Any], keep: int) -> None:
        """Add a record to the history; beyond ``keep``, every other old one goes."""
        self._db.table("history").insert({"at": time.time(), "record": json.dumps(record)})
        (count,) = self._connection.execute("SELECT count(*) FROM history").fetchone()
        if count > keep:
            self._connection.execute(
                "DELETE FROM history WHERE id IN (SELECT id FROM (SELECT id, row_number() "
                "OVER (ORDER BY id) AS place FROM history) WHERE place % 2 = 0 AND place <= ?)",
                [count * 3 // 4],
            )

    def history(self) -> list[tuple[float, dict[str, Any]]]:
        rows = self._connection.execute("SELECT at, record FROM history ORDER BY id").fetchall()
        return [(at, json.loads(record)) for at, record in rows]

    def clear(self) -> None:
        for table in self._db.table_names():
            if not table.startswith(("sqlite_", "_sqlite_")):
                self._connection.execute(f"DELETE FROM {table}")

    # SpaceAccount

    def wal_bytes(self) -> int:
        return allocated(self._wal)

    def pages_bytes(self) -> int:
        """Return the bytes of pages in use, including those in the log."""
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (size,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int((pages - free) * size)

    def free_bytes(self) -> int:
        """Return the bytes of unused pages, which the file keeps."""
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (size,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int(free * size)

    def compact(self) -> bool:
        """Give unused pages back; False if that must wait. Writes all used pages to the log first."""
        try:
            self._connection.execute("VACUUM")
        except sqlite3.OperationalError as error:
            if index_error(self._layout, error).__class__ is CacheFullError:
                return False
            raise index_error(self._layout, error) from error
        return self.checkpoint()

    def checkpoint(self) -> bool:
        """Move the log into the database and truncate it; False while a reader is in the way."""
        self._connection.execute(f"PRAGMA busy_timeout = {CHECKPOINT_BUSY_MS}")
        try:
            row = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError as error:
            if index_error(self._layout, error).__class__ is CacheFullError:
                return False
            raise index_error(self._layout, error) from error
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")
        return bool(row[0] == 0)

    def close(self) -> None:
        """Close; a stopped cache is one index file, which read-only media can hold too."""
        self._connection.execute("PRAGMA busy_timeout = 1000")
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.OperationalError:
            pass  # a reader is in the way, or the disk is full: the log stays, and is good
        finally:
            self._connection.close()

    def abandon(self) -> None:
        """Leave it as a crash would, and never close it.

        SQLite removes the log by its path when the last connection is closed, even if that path
        belongs to another index by now. One more reference keeps it open to the end of the process.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))


def _create_file(layout: CacheLayout) -> None:
    """Make the file for its owner only: SQLite gives its log and shared memory the same mode."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    # Only a new file is opened, for to close one frees SQLite's locks on it in this process.
    with contextlib.suppress(OSError):  # SQLite will say it better
        os.close(os.open(layout.index, flags, FILE_MODE))


def index_error(layout: CacheLayout, error: Exception) -> CacheError:
    if getattr(error, "sqlite_errorcode", None) in _FULL_DISK_CODES:
        return CacheFullError(f"no room on the disk for the index {layout.index}: {error}")
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
        return CacheError(
            f"the disk fails to read or write the index {layout.index} ({error}); the "
            "kernel's log says more; start again on a sound disk"
        )
    return damaged_index_error(layout, error)


def _valid_unicode(value: str) -> str:
    """Escape invalid Unicode of local file names, because SQLite stores only valid."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


class IndexWriter:
    """The index and the ballast that its transactions fall back on.

    Read ``index`` anywhere, but change it inside `write` only. ``log_is_short`` is False while a reader
    keeps the log from being truncated; writes that can wait should then wait.
    """

    def __init__(self, layout: CacheLayout, space: SpaceAccount) -> None:
        self._space = space
        self._ballast = Ballast(layout.ballast, space.budget.ballast)
        self._sums: dict[str, int] | None = None
        self._pages_bytes = 0
        self.log_is_short = True
        self.index = self._open(layout)

    def _open(self, layout: CacheLayout) -> IndexDatabase:
        try:
            return IndexDatabase.open(layout)
        except CacheFullError:
            if not self._ballast.drop():
                raise
            return IndexDatabase.open(layout)

    def write(self, change: Callable[[], None]) -> None:
        """Run one transaction, in the ballast's space if needed. CacheFullError: nothing was changed."""
        self._cut_log()
        try:
            self._transact(change)
        except CacheFullError:
            if not self._ballast.drop():
                raise
            self._transact(change)

    def _transact(self, change: Callable[[], None]) -> None:
        self._sums = None
        with self.index.transaction():
            change()

    def _cut_log(self) -> None:
        if self.index.wal_bytes() > self._space.budget.wal or not self.log_is_short:
            self.log_is_short = self.index.checkpoint()

    def sums(self) -> dict[str, int]:
        if self._sums is None:
            self._sums = self.index.totals()
        return self._sums

    @property
    def ok(self) -> bool:
        return self.log_is_short and self._pages_bytes <= self._space.budget.pages

    def maintain(self) -> None:
        budget, index = self._space.budget, self.index
        self._cut_log()
        if self.log_is_short:
            self.write(lambda: index.prune_deleted(budget.kept_deleted))
            self._compact()
        self._pages_bytes = index.pages_bytes()
        self._ballast.size = budget.ballast
        self._ballast.restore()

    def _compact(self) -> None:
        """Shrink the index file if it is larger than a lowered bound allows."""
        space, index = self._space, self.index
        spare = index.free_bytes() > space.budget.wal
        if spare and space.index_overflows and index.pages_bytes() <= space.slack():
            self.log_is_short = index.compact()

    def append_history(self, record: dict[str, Any]) -> None:
        """Add a JSON record to the history, unless the log must not grow."""
        keep = self._space.budget.kept_history
        if self.log_is_short:
            self.write(lambda: self.index.append_history(record, keep))
