"""Taking a cache directory over: who owned it, what is in it, what is left of a crash."""

from __future__ import annotations

from collections.abc import Callable

from growcache.cache.beside import (
    longest,
    read_deferrals,
    read_editions,
    read_issued,
    write_beside,
)
from growcache.cache.deferrals import newest
from growcache.cache.files import Layout, fsync_directory
from growcache.cache.identity import Identity, read_identity, write_identity
from growcache.cache.index import Contents, Index, ShardState, StockRow
from growcache.cache.locks import FileLock, holder
from growcache.cache.ownership import is_initialised, mark_initialised
from growcache.cache.rebuild import look, numbers_in, remade
from growcache.cache.sweep import match_rows, remove_strangers, remove_temporary, shard_files
from growcache.errors import CacheBusyError, CacheError

# Readers probe the lock for microseconds, by holding it themselves.
PROBE_SECONDS = 0.5

Write = Callable[[Callable[[], None]], None]


def take_over(layout: Layout, samplers_seconds: float) -> FileLock:
    """Return the supervisor's lock, once no sampler of an earlier service lives.

    Raises:
        CacheBusyError: somebody else has the cache.
    """
    try:
        lock = FileLock.acquire(layout.supervisor_lock, seconds=PROBE_SECONDS)
    except CacheError:
        who = holder(layout.supervisor_lock)
        raise CacheBusyError(
            f"the cache at {layout.root} is in use by pid {who.get('pid', '?')} on "
            f"{who.get('host', '?')} ({who.get('command', '?')}); stop that service, or "
            "choose another cache.path"
        ) from None
    try:
        FileLock.acquire(layout.samplers_lock, seconds=samplers_seconds).close()
    except CacheError:
        lock.close()
        raise CacheBusyError(
            f"samplers of an earlier service still write into {layout.root}; they end by "
            "themselves within seconds, else end them (growcache … sampler)"
        ) from None
    except BaseException:
        lock.close()
        raise
    return lock


def restore(layout: Layout, index: Index, write: Write) -> tuple[list[StockRow], int]:
    """Bring rows and files together; return the rows that remain and the bytes of strangers.

    Afterwards every row that is live or retired has its whole files, and no other file of
    ours is in the way.

    Raises:
        CacheError: index or identity are damaged.
    """
    remove_temporary(layout)
    index.verify()
    if is_initialised(index):
        _heal_identity(layout, index)
        return reconcile(layout, index, write)
    identity = read_identity(layout.root)
    if identity is None:
        # Index and identity knew of which source the listing is: it is made anew.
        layout.catalog.unlink(missing_ok=True)
        fsync_directory(layout.root)
        if numbers_in(layout):  # whose they are, the configuration will tell
            return [], sum(found.allocated for found in shard_files(layout).values())
        _forget(layout)
    rebuild(layout, index, write, identity)
    return reconcile(layout, index, write)


def reconcile(layout: Layout, index: Index, write: Write) -> tuple[list[StockRow], int]:
    """Compare rows and files; see `restore`."""
    files = shard_files(layout)
    match = match_rows(index.shards(), files)
    if match.lost or match.gone:
        write(lambda: _bury(index, match.lost, match.gone))
    known = {row.number for row in match.rows}
    return match.rows, remove_strangers(layout, files, known)


def rebuild(layout: Layout, index: Index, write: Write, identity: Identity | None) -> None:
    """Fill a new index from whatever lies in the directory, in one transaction."""
    if identity is None:
        write(lambda: mark_initialised(index))
        return
    seen = look(layout, identity)
    editions = longest([read_editions(layout) or [], seen.editions])
    noted = read_issued(layout)
    old = Contents(meta={"claim": index.meta("claim")} if index.meta("claim") else {})
    issued = -1 if noted is None else noted
    deferrals = newest([read_deferrals(layout)]) or seen.deferrals(issued)
    made = remade(old, seen, identity, editions, deferrals, issued)
    write_beside(layout, editions, noted, made)
    write(lambda: index.replace(made))


def _heal_identity(layout: Layout, index: Index) -> None:
    """Write the identity again where its file is lost or damaged: the index has a copy."""
    copy = index.meta("identity")
    if copy is None:
        return
    try:
        if read_identity(layout.root) == Identity.from_values(copy):
            return
    except CacheError:
        pass  # it is written anew
    write_identity(layout.root, Identity.from_values(copy))


def _forget(layout: Layout) -> None:
    """Remove what nobody can vouch for, and no shard needs."""
    for path in (layout.editions, layout.deferrals, layout.issued):
        path.unlink(missing_ok=True)
    fsync_directory(layout.root)


def _bury(index: Index, lost: list[StockRow], gone: list[StockRow]) -> None:
    index.set_state([row.number for row in [*lost, *gone]], ShardState.DELETED)
    index.add_totals(lost_shards=len(lost), lost_samples=sum(row.samples for row in lost))
