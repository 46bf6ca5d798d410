"""The tables of the index and their only writer.

Each change is a transaction, within a budget, also on a full disk.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from growcache.cache.files import CacheLayout
from growcache.cache.history_thinning import move_jobs_on, records_to_drop
from growcache.cache.index.contents import IndexContents
from growcache.cache.index.database import IndexFile
from growcache.cache.index.reader import read_editions
from growcache.cache.index.schema import (
    KEPT_JOBS,
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
from growcache.errors import CacheFullError

KEPT_HOLES, MOST_REASON_CHARACTERS = 200, 600


class IndexDatabase(IndexFile):
    """The tables. Change them only inside `transaction`."""

    def replace(self, contents: IndexContents) -> None:
        """Replace all contents. Uses and the records of holes are lost."""
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
        """Forget damaged shards: retired ones are deleted, and live ones are drawn again.

        ``retried`` of their holes already count neither as holes nor as visits.
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

    # --- shards ---

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
        """Forget the records of holes in purged objects."""
        rows = self._connection.execute("SELECT id, key FROM holes").fetchall()
        gone = [(id_,) for id_, key in rows if is_purged(key)]
        self._connection.executemany("DELETE FROM holes WHERE id = ?", gone)

    def return_shards(self, rows: Sequence[ShardTableRow]) -> None:
        """Add shards that had been evicted. They do not count as drawn again."""
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
        """Remove a number from the ranges; return the samples that were counted for it."""
        row = self._connection.execute(
            "SELECT * FROM deleted_ranges WHERE ? BETWEEN first AND last", [number]
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
                "reason": _valid_unicode(hole.reason)[:MOST_REASON_CHARACTERS],
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
        """Set the state of shards. Deleted ones lose their uses."""
        rows = [(number,) for number in numbers]
        self._connection.executemany(
            f"UPDATE shards SET state = {state:d}, seal = (seal & ~{STATE_MASK}) | {state:d} "
            "WHERE number = ?",
            rows,
        )
        if state is ShardState.DELETED:
            self._connection.executemany("DELETE FROM uses WHERE shard = ?", rows)

    def remains(self, numbers: Iterable[int]) -> dict[int, EvictedShard]:
        """Return the known facts about evicted shards by number, without pruned ones."""
        found: dict[int, EvictedShard] = {}
        query = "SELECT samples, allocated FROM shards WHERE number = ?"
        for number in numbers:
            if row := self._connection.execute(query, [number]).fetchone():
                found[number] = EvictedShard(*row)
        return found

    def known(self, numbers: Sequence[int]) -> set[int]:
        """Return those of the ascending numbers that have a row."""
        rows = self._connection.execute(
            "SELECT number FROM shards WHERE number BETWEEN ? AND ?", [numbers[0], numbers[-1]]
        )
        found = {number for (number,) in rows.fetchall()}.intersection(numbers)
        ranges = self._connection.execute("SELECT first, last FROM deleted_ranges").fetchall()
        for low, high in ranges:
            found.update(numbers[bisect_left(numbers, low) : bisect_right(numbers, high)])
        return found

    def unknown(self, stop: int) -> list[range]:
        """Return the numbers below ``stop`` without a row, as ranges, because there may be millions."""
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
        """Return the highest group with a row, or -1."""
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

    # --- readers ---

    def uses(self) -> dict[str, dict[int, int]]:
        """Return the uses per job and shard. The job that ended a lease last comes last."""
        jobs = self._connection.execute("SELECT job FROM jobs ORDER BY last_seen").fetchall()
        found: dict[str, dict[int, int]] = {job: {} for (job,) in jobs}
        for shard, job, uses in self._connection.execute("SELECT * FROM uses").fetchall():
            found.setdefault(job, {})[shard] = uses
        return found

    def finish_leases(self, leases: Iterable[FinishedLease], at: float) -> None:
        for name, job, numbers, delivered in leases:
            rows = [(number,) for number in numbers]
            self._connection.executemany(
                "INSERT INTO uses SELECT number, ?, 1 FROM shards WHERE number = ? "
                "AND state < 2 ON CONFLICT DO UPDATE SET uses = uses + 1",
                [(job, number) for number in numbers],
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

    # --- notes and history ---

    def editions(self) -> list[Edition]:
        return read_editions(self._connection)

    def insert_edition(self, edition: Edition) -> None:
        row = {name: getattr(edition, name) for name in edition.__slots__}
        self._db.table("editions").insert(row)

    def totals(self) -> dict[str, int]:
        return dict(self._connection.execute("SELECT name, value FROM totals").fetchall())

    def add_totals(self, **amounts: int) -> None:
        """Add to running totals, in the transaction of the counted change."""
        self._connection.executemany(
            "INSERT INTO totals VALUES (?, ?) "
            "ON CONFLICT DO UPDATE SET value = value + excluded.value",
            [(name, amount) for name, amount in amounts.items() if amount],
        )

    def append_history(self, record: dict[str, Any], keep: int) -> None:
        """Add a record to the history and keep at most ``keep`` records; see `history_thinning`."""
        now = time.time()
        self._db.table("history").insert({"at": now, "record": _compact_json(record)})
        (count,) = self._connection.execute("SELECT count(*) FROM history").fetchone()
        if count > keep:
            self._thin_history(now, keep)

    def _thin_history(self, now: float, keep: int) -> None:
        found = self._connection.execute("SELECT id, at, record FROM history").fetchall()
        rows = [(at, _parsed(record)) for _, at, record in found]
        dropped = set(records_to_drop([at for at, _ in rows], now, keep))
        changed = move_jobs_on(rows, dropped)
        self._connection.executemany(
            "UPDATE history SET record = ? WHERE id = ?",
            [(_compact_json(record), found[index][0]) for index, record in changed.items()],
        )
        self._connection.executemany(
            "DELETE FROM history WHERE id = ?", [(found[index][0],) for index in dropped]
        )

    def insert_history(self, rows: Iterable[tuple[float, dict[str, Any]]]) -> None:
        self._connection.executemany(
            "INSERT INTO history (at, record) VALUES (?, ?)",
            [(at, _compact_json(record)) for at, record in rows],
        )

    def history(self) -> list[tuple[float, dict[str, Any]]]:
        rows = self._connection.execute("SELECT at, record FROM history ORDER BY id").fetchall()
        return [(at, json.loads(record)) for at, record in rows]


def _parsed(record: str) -> object:
    """Return a record, or None if it is damaged, because the history must not end the service."""
    try:
        return json.loads(record)
    except json.JSONDecodeError:
        return None


def _compact_json(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))


def _valid_unicode(value: str) -> str:
    """Escape invalid Unicode in local file names, because SQLite stores only valid Unicode."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


class IndexWriter:
    """The index, and the ballast that its transactions may use.

    Read ``index`` anywhere, but change it only inside `write`. ``log_is_short`` is False while
    a reader prevents the truncation of the log. Writes that can wait should then wait.
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
        """Run one transaction, in the ballast's space if needed.

        Raises:
            CacheFullError: Nothing was changed.
        """
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
