"""``growcache clear``: empty a cache that nobody uses."""

from __future__ import annotations

from pathlib import Path

from growcache.cache.clearing import clear
from growcache.cache.files import Layout, allocated_tree
from growcache.cache.leases import survey_leases
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
        views, foreign = survey_leases(layout.root)
        for strange in foreign:
            if strange.protects:
                raise CacheBusyError(f"{layout.root} may be read: {strange}; {strange.advice}")
        for lease in views:
            if lease.open and lease.holding():
                raise CacheBusyError(
                    f"{layout.root} is being read by {lease.command} (pid {lease.pid} on "
                    f"{lease.host}); stop it first"
                )
        clear(layout)
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
