"""The SQLite file of the index: atomic transactions, its log, and the space of both."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from growcache.cache.files import CacheLayout, allocated
from growcache.cache.index.connection import (
    BUSY_SECONDS,
    damaged_index_error,
    newer_index_error,
)
from growcache.cache.index.contents import verified_contents
from growcache.cache.index.schema import SEAL_META
from growcache.cache.index.structure import (
    SQLITE_ERRORS,
    WRONG_TABLES,
    read_sealed_tables,
    tables_state,
)
from growcache.errors import CacheError, CacheFullError, IndexInDoubtError
from growcache.modes import FILE_MODE, share_if_folder_is

if TYPE_CHECKING:
    from sqlite_utils import Database

# A paused reader may keep the WAL from being truncated. The supervisor must not wait for it. It
# retries later, and grants no permits meanwhile.
CHECKPOINT_BUSY_MS = 20

_FULL_DISK_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
}


class IndexFile:
    """The SQLite file: its transactions, its log and its notes.

    `IndexDatabase` adds the tables.
    """

    def __init__(self, layout: CacheLayout, db: Database) -> None:
        self._layout = layout
        self._db = db
        self._connection: sqlite3.Connection = db.conn
        self._wal = layout.index.with_name(layout.index.name + "-wal")

    @classmethod
    def open(cls, layout: CacheLayout) -> Self:
        """Open or create the index, and apply migrations. May raise CacheError."""
        try:
            _create_file(layout)
            connection = sqlite3.connect(
                layout.index, timeout=BUSY_SECONDS, isolation_level=None
            )
            try:
                return cls._set_up(layout, connection)
            except BaseException:
                connection.close()
                raise
        except (*SQLITE_ERRORS, TypeError) as error:
            raise index_error(layout, error) from error

    @classmethod
    def _set_up(cls, layout: CacheLayout, connection: sqlite3.Connection) -> Self:
        from sqlite_utils import Database  # readers do not need it, nor its 0.2 s

        from growcache.cache.index.migrations import migrations

        match tables_state(connection):
            case "damaged":
                raise damaged_index_error(layout, WRONG_TABLES)
            case "newer":
                raise newer_index_error(layout)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # maintain() checkpoints
        connection.execute("PRAGMA temp_store = MEMORY")
        # So that purged keys leave the file, too.
        connection.execute("PRAGMA secure_delete = ON")
        index = cls(layout, Database(connection))
        migrations.apply(index._db)
        return index

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make everything in the block durable together, or nothing.

        Raises:
            CacheFullError: Nothing was changed.
            CacheError: Nothing was changed.
            IndexInDoubtError: The disk failed at the end of the block. The next start finds all
                of it or nothing.
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
            # SQLite forgets it, but it may be complete in the log, which is read again after a
            # crash. Repeating a failed sync would not tell.
            raise IndexInDoubtError(str(named)) from error

    def _seal(self) -> None:
        account = read_sealed_tables(self._connection)
        if account.right_seal() != account.seal:  # a transaction without changes writes nothing
            self.set_meta(SEAL_META, account.right_seal())

    def verify(self) -> None:
        """Raise CacheError if a value differs from its checksum.

        This takes tens of milliseconds.
        """
        if problems := verified_contents(self._connection).problems:
            raise damaged_index_error(self._layout, problems[0])

    def _rollback(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    # --- notes ---

    def meta(self, key: str, default: Any = None) -> Any:
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", [key]).fetchone()
        return json.loads(row[0]) if row else default

    def set_meta(self, key: str, value: Any) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [key, json.dumps(value)]
        )

    def clear(self) -> None:
        for table in self._db.table_names():
            if not table.startswith(("sqlite_", "_sqlite_")):
                self._connection.execute(f"DELETE FROM {table}")

    # --- log and space ---

    def wal_bytes(self) -> int:
        return allocated(self._wal)

    def pages_bytes(self) -> int:
        """Return the bytes of used pages, including those in the log."""
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
        """Release unused pages; return False if that must wait.

        All used pages go to the log first.
        """
        try:
            self._connection.execute("VACUUM")
        except sqlite3.OperationalError as error:
            if index_error(self._layout, error).__class__ is CacheFullError:
                return False
            raise index_error(self._layout, error) from error
        return self.checkpoint()

    def checkpoint(self) -> bool:
        """Move the log into the database and truncate it; return False while a reader prevents it."""
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
        """Close.

        The index of a stopped cache is one file, which works on read-only media, too.
        """
        self._connection.execute("PRAGMA busy_timeout = 1000")
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.OperationalError:
            pass  # a reader prevents it, or the disk is full; the log stays valid
        finally:
            self._connection.close()

    def abandon(self) -> None:
        """Leave the index as a crash would, and never close it.

        SQLite removes the log by its path when the last connection is closed, even if that path
        belongs to another index by now. One more reference keeps the connection open until the
        process ends.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))


def _create_file(layout: CacheLayout) -> None:
    """Create the file with its mode, which SQLite then also gives to its log and shared memory."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    # Only a new file is opened, because closing it frees this process's SQLite locks on it.
    with contextlib.suppress(OSError):  # SQLite will report it better
        descriptor = os.open(layout.index, flags, FILE_MODE)
        try:
            share_if_folder_is(descriptor, layout.root)
        finally:
            os.close(descriptor)


def index_error(layout: CacheLayout, error: Exception) -> CacheError:
    if getattr(error, "sqlite_errorcode", None) in _FULL_DISK_CODES:
        return CacheFullError(f"no room on the disk for the index {layout.index}: {error}")
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
        return CacheError(
            f"the disk cannot read or write the index {layout.index} ({error}); see the "
            "kernel's log, and start again on a working disk",
            code="GC413",
        )
    return damaged_index_error(layout, error)
