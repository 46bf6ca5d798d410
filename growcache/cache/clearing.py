"""Emptying a cache for good, whatever cuts it short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from growcache.cache.files import (
    Layout,
    entries_of,
    fsync_directory,
    remove_entry,
    write_atomic,
)


def clear(layout: Layout) -> None:
    """Delete everything but the locks, so that a crash anywhere leaves all or nothing.

    Shards are taken over wherever they lie, for they describe themselves. So a note comes
    first that they are not wanted, and goes last; who finds it goes on with the deletion.
    """
    write_atomic(layout.clearing, b"")
    finish_clearing(layout)


def finish_clearing(layout: Layout) -> None:
    """Delete the rest of a cache whose deletion had begun; nothing where that is not so."""
    if not layout.clearing.exists():
        return
    for path in _all(layout):
        remove_entry(path)
    for directory in (layout.root, layout.shards, layout.incoming, layout.leases):
        if directory.is_dir():
            fsync_directory(directory)
    layout.clearing.unlink()
    fsync_directory(layout.root)


def _all(layout: Layout) -> Iterator[Path]:
    """Yield the index first: readers see all of the cache, or that it is gone."""
    yield from (layout.index, *layout.root.glob(f"{layout.index.name}-*"), layout.identity)
    yield from (
        layout.editions,
        layout.deferrals,
        layout.issued,
        layout.catalog,
        layout.ballast,
        layout.status,
    )
    for directory in (layout.shards, layout.incoming, layout.leases):
        if directory.is_dir():
            yield from entries_of(directory)
    yield from layout.root.glob(".*.tmp")
