"""What an index file says, so that it can be told what a flipped bit has changed."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from urllib.parse import quote

from growcache.cache.files import CacheLayout

# What decides which samples are served, and which are drawn. The rest is counted for show:
# uses, the history, what files take on disk (that is looked up at each start), a row per sample.
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
    """All rows of an index, and those that decide something, each as text."""

    rows: frozenset[str]
    decisive: frozenset[str]


def content(layout: CacheLayout) -> Content:
    """Return what SQLite can read of the index; nothing where it cannot read on."""
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
