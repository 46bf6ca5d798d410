"""``growcache clear``: empty a cache that nobody uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from growcache.cache.files import (
    Layout,
    allocated_tree,
    entries_of,
    fsync_directory,
    remove_entry,
)
from growcache.cache.leases import read_leases
from growcache.cache.locks import FileLock, holder
from growcache.errors import CacheBusyError, CacheError, CacheMissingError
from growcache.service.words import in_bytes


def describe(root: Path) -> str:
    """Return the question to ask before.

    Raises:
        CacheMissingError: there is no cache at the path.
    """
    layout = _require(root)
    return f"Delete {in_bytes(allocated_tree(layout.root))} of cached samples in {layout.root}?"


def clear_cache(root: Path) -> str:
    """Delete all that a service has put into the folder; return what to tell.

    Only names of a cache's own are touched. Locks stay, for they are never unlinked.

    Raises:
        CacheMissingError: there is no cache at the path.
        CacheBusyError: a service or a reader uses it.
    """
    layout = _require(root)
    before = allocated_tree(layout.root)
    try:
        lock = FileLock.acquire(layout.supervisor_lock)
    except CacheError:
        found = holder(layout.supervisor_lock)
        raise CacheBusyError(
            f"a service fills {layout.root} (pid {found.get('pid')} on {found.get('host')}); "
            "stop it first"
        ) from None
    with lock:
        for lease in read_leases(layout.root):
            if lease.open and lease.holding():
                raise CacheBusyError(
                    f"{layout.root} is being read by {lease.command} (pid {lease.pid} on "
                    f"{lease.host}); stop it first"
                )
        _empty(layout)
    freed = in_bytes(before - allocated_tree(layout.root))
    return f"Emptied {layout.root}; {freed} are free again."


def _require(root: Path) -> Layout:
    """Return the layout of a cache, also of one whose clearing was cut short."""
    layout = Layout(root)
    if not layout.index.exists() and not (
        layout.supervisor_lock.exists() and layout.shards.is_dir()
    ):
        raise CacheMissingError(f"no cache at {layout.root}; nothing was deleted")
    return layout


def _empty(layout: Layout) -> None:
    """Delete everything, so that a crash anywhere leaves the whole cache or none of it.

    Shards are adopted where an index has their rows, or where there is none but an
    identity. So both are gone for good, power cut or not, before the first shard goes.
    Between the two a start finds every row with its file and says anew what they are of.
    """
    for path in (layout.identity, layout.index, *layout.root.glob(f"{layout.index.name}-*")):
        path.unlink(missing_ok=True)
    fsync_directory(layout.root)
    for path in _litter(layout):
        remove_entry(path)


def _litter(layout: Layout) -> Iterator[Path]:
    """Yield what the next start would remove, or would make again, by itself."""
    yield from (layout.editions, layout.issued, layout.catalog, layout.ballast, layout.status)
    for directory in (layout.shards, layout.incoming, layout.leases):
        if directory.is_dir():
            yield from entries_of(directory)
    yield from layout.root.glob(".*.tmp")
