"""Taking a cache directory over: who owned it, what is in it, what is left of a crash."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from growcache.cache.locks import FileLock, LockedError, holder
from growcache.cache.names import is_shard
from growcache.cache.ownership import is_initialised, mark_initialised
from growcache.cache.processes import end_samplers, has_open, is_stopped
from growcache.cache.rebuild import look, numbers_in, remade
from growcache.cache.sweep import (
    count_strangers,
    match_rows,
    remove_temporary,
    remove_unknown,
    shard_files,
)
from growcache.errors import CacheBusyError, CacheError

# Readers probe the lock for microseconds, by holding it themselves.
PROBE_SECONDS = 0.5
GRACE_SECONDS = 0.5  # that samplers need to end by themselves, with room for a busy machine

_log = logging.getLogger(__name__)

Write = Callable[[Callable[[], None]], None]


def take_over(layout: Layout, samplers_seconds: float) -> FileLock:
    """Return the supervisor's lock, once no sampler of an earlier service lives.

    Args:
        layout: of the cache.
        samplers_seconds: how long to wait for samplers that cannot be ended from here.

    Raises:
        CacheBusyError: somebody else has the cache.
    """
    before = holder(layout.supervisor_lock)
    try:
        lock = FileLock.acquire(layout.supervisor_lock, seconds=PROBE_SECONDS)
    except LockedError:
        raise in_use(layout, "stop that service, or choose another cache.path") from None
    try:
        _outlive_samplers(layout, samplers_seconds, before)
    except BaseException:
        lock.close()
        raise
    return lock


def _outlive_samplers(layout: Layout, seconds: float, before: Mapping[str, Any]) -> None:
    """Return once the samplers of a service that died are gone, ended where they hang.

    They end by themselves within milliseconds of it. One that does not is stopped, or in a call
    that never returns; what it writes is worth nothing, and nobody can start while it lives.
    """
    path = layout.samplers_lock
    began = time.monotonic()
    try:
        FileLock.acquire(path, seconds=min(seconds, GRACE_SECONDS)).close()
        return
    except LockedError:
        ended = end_samplers(path)
    try:
        FileLock.acquire(path, seconds=seconds + began - time.monotonic()).close()
    except LockedError:
        raise CacheBusyError(_still_there(layout, before, ended)) from None
    _log.warning(
        "ended samplers of a service that died, for they hung: %s", ", ".join(map(str, ended))
    )


def _still_there(layout: Layout, before: Mapping[str, Any], ended: Sequence[int]) -> str:
    of = f"of the service with pid {before.get('pid', '?')} on {before.get('host', '?')}"
    if ended:
        pids = ", ".join(map(str, ended))
        return (
            f"samplers {of}, which died, still hold {layout.root}: {pids} were killed and do not "
            "end, so the kernel is waiting for a disk or a network share; try again later"
        )
    return (
        f"samplers {of}, which died, still hold {layout.root}, and cannot be seen from here: they "
        "are another user's, or run on another host or in another container; end them there "
        "(growcache sampler)"
    )


def in_use(layout: Layout, advice: str) -> CacheBusyError:
    """Return the refusal of a cache that a service has, which may be stopped by a signal.

    Args:
        layout: of the cache.
        advice: what to do about one that runs.
    """
    who = holder(layout.supervisor_lock)
    pid, host = who.get("pid", "?"), who.get("host", "?")
    told = f"the cache at {layout.root} is in use by pid {pid} on {host} ({who.get('command', '?')})"
    if type(pid) is int and has_open(pid, layout.supervisor_lock) and is_stopped(pid):
        return CacheBusyError(
            f"{told}, which is stopped by a signal; let it go on with: kill -CONT {pid}, or end "
            f"it with: kill -KILL {pid}"
        )
    return CacheBusyError(f"{told}; {advice}")


def restore(layout: Layout, index: Index, write: Write) -> tuple[list[StockRow], int]:
    """Bring rows and files together; return the rows that remain and the bytes of strangers.

    Afterwards every row that is live or retired has its whole files, and no other file of
    ours is in the way.

    Raises:
        CacheError: index or identity are damaged.
    """
    remove_temporary(layout)
    rows, waiting = _restored(layout, index, write)
    return rows, waiting + count_strangers(layout)


def _restored(layout: Layout, index: Index, write: Write) -> tuple[list[StockRow], int]:
    index.verify()
    if is_initialised(index):
        _heal_identity(layout, index)
        return reconcile(layout, index, write), 0
    identity = read_identity(layout.root)
    if identity is None:
        # Index and identity knew of which source the listing is: it is made anew.
        layout.catalog.unlink(missing_ok=True)
        fsync_directory(layout.root)
        if numbers_in(layout):  # whose they are, the configuration will tell
            found = shard_files(layout).items()
            return [], sum(one.allocated for name, one in found if is_shard(name))
        _forget(layout)
    rebuild(layout, index, write, identity)
    return reconcile(layout, index, write), 0


def reconcile(layout: Layout, index: Index, write: Write) -> list[StockRow]:
    """Compare rows and files; return the rows of shards that are there."""
    files = shard_files(layout)
    match = match_rows(index.shards(), files)
    if match.lost or match.gone:
        write(lambda: _bury(index, match.lost, match.gone))
    known = {row.number for row in match.rows}
    remove_unknown(layout, files, known)
    return match.rows


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
