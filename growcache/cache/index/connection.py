"""Open the index to read it, and describe an index that cannot be read."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from urllib.parse import quote

from growcache.cache.files import CacheLayout
from growcache.cache.index.structure import SQLITE_ERRORS, is_other_database, tables_state
from growcache.cache.locks import fork_lock
from growcache.errors import CacheError, CacheMissingError, CachePathError

BUSY_SECONDS = 10.0
# In a shared folder, the index and its log belong to the writer's user alone at first.
# Only then the group gets access.
OPENING_SECONDS = 2.0
_OPENING_PAUSE_SECONDS = 0.02


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
