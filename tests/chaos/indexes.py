"""The content of an index file, which shows the effect of a flipped bit."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from urllib.parse import quote

from growcache.cache.files import CacheLayout

# The rows that decide which samples are served and drawn. The others are only shown: uses, the
# history, a row per sample, and disk usage, which each start measures again.
_DECISIVE = (
    "SELECT 'shard', number, seq, state, group_number, edition, round, samples, parts, holes,"
    " shard_bytes, record_bytes, digest FROM shards",
    "SELECT 'total', name, value FROM totals",
    "SELECT 'note', key, value FROM meta",
    "SELECT 'edition', edition, objects, digest, first_group FROM editions",
    "SELECT 'range', first, last, shards, samples FROM deleted_ranges",
)


@dataclass(frozen=True, slots=True)
class Content:
    """All rows of an index, and the decisive rows, each as text."""

    rows: frozenset[str]
    decisive: frozenset[str]


def content(layout: CacheLayout) -> Content:
    """Return the rows of the index that SQLite can read, up to the first error."""
    uri = f"file:{quote(str(layout.index))}?mode=ro"
    rows: set[str] = set()
    decisive: set[str] = set()
    with (
        contextlib.suppress(sqlite3.Error, UnicodeDecodeError),
        contextlib.closing(sqlite3.connect(uri, uri=True)) as db,
    ):
        for query in _DECISIVE:
            decisive.update(map(repr, db.execute(query).fetchall()))
        rows.update(db.iterdump())
    return Content(frozenset(rows), frozenset(decisive))
