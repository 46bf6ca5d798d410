"""Emptying a cache for good, whatever cuts it short."""

from __future__ import annotations

import os

from growcache.cache.files import Layout, fsync_directory, write_atomic
from growcache.cache.folders import folder, inner_folders, parted, remove, root_folder
from growcache.cache.names import is_temporary


def clear(layout: Layout) -> None:
    """Delete everything but marker and locks, so that a crash anywhere leaves all or nothing.

    Shards are taken over wherever they lie, for they describe themselves. So a note comes
    first that they are not wanted, and goes last; who finds it goes on with the deletion.
    What is not growcache's stays.
    """
    write_atomic(layout.clearing, b"")
    finish_clearing(layout)


def finish_clearing(layout: Layout) -> None:
    """Delete the rest of a cache whose deletion had begun; nothing where that is not so."""
    if not layout.clearing.exists():
        return
    with root_folder(layout) as root:
        for name in _names_in_root(layout):
            remove(root, name)
        for name in parted(root, is_temporary)[0]:
            remove(root, name)
    for directory, ours in inner_folders(layout):
        with folder(directory) as descriptor:
            for name in parted(descriptor, ours)[0]:
                remove(descriptor, name)
            os.fsync(descriptor)
    fsync_directory(layout.root)
    layout.clearing.unlink()
    fsync_directory(layout.root)


def _names_in_root(layout: Layout) -> list[str]:
    """Return the index first: readers see all of the cache, or that it is gone."""
    kept = (layout.marker, layout.supervisor_lock, layout.samplers_lock, layout.clearing)
    first = [layout.index]
    return [
        path.name for path in first + [p for p in layout.own_files if p not in (*kept, *first)]
    ]
