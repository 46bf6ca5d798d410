"""Taking a cache directory over: who owned it, what is in it, what is left of a crash."""

from __future__ import annotations

import time
from collections.abc import Callable

from growcache.cache.files import Layout, fsync_directory
from growcache.cache.identity import read_identity
from growcache.cache.index import Index, ShardState, StockRow
from growcache.cache.locks import FileLock, holder
from growcache.cache.rebuild import adoptable, gaps, read_editions
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
    """
    remove_temporary(layout)
    if not is_initialised(index):
        if read_identity(layout.root) is None:
            _forget_source(layout)
        write(lambda: _rebuild(layout, index))
    files = shard_files(layout)
    match = match_rows(layout, index.shards(), files)
    if match.lost or match.gone:
        write(lambda: _bury(index, match.lost, match.gone))
    known = {row.number for row in match.rows}
    return match.rows, remove_strangers(layout, files, known)


def _forget_source(layout: Layout) -> None:
    """Remove what nobody can vouch for: index and identity knew whose it was.

    A cache whose clearing was cut short has lost these two and may have kept the rest.
    Its listing must not go on with that of another source.
    """
    for path in (layout.catalog, layout.editions, layout.issued):
        path.unlink(missing_ok=True)
    fsync_directory(layout.root)


def _bury(index: Index, lost: list[StockRow], gone: list[StockRow]) -> None:
    index.set_state([row.number for row in [*lost, *gone]], ShardState.DELETED)
    index.add_totals(lost_shards=len(lost))


def _rebuild(layout: Layout, index: Index) -> None:
    """Fill a new index from whatever lies in the directory, in one transaction."""
    mark_initialised(index)
    identity = read_identity(layout.root)
    shards = list(adoptable(layout, identity))
    if identity is None or not shards:
        return
    for edition in read_editions(layout):
        index.insert_edition(edition)
    index.insert_shards(shards, with_samples=False)
    numbers = [row.number for row, _ in shards]
    per_group = int(identity.sizes.get("group_shards", 1))
    missing = gaps(numbers, max(numbers[-1] + 1, (read_issued(layout) + 1) * per_group))
    index.insert_gaps(missing)
    # Whatever those held, it was drawn and is not here: the cache cannot be complete.
    index.add_totals(evicted_shards=sum(stop - first for first, stop in missing))
    index.append_history({"event": "rebuilt", "at": time.time()}, keep=1_000)


def mark_initialised(index: Index) -> None:
    """Note that what the index says is all there is: files that it misses are litter."""
    index.set_meta("initialised", True)


def is_initialised(index: Index) -> bool:
    """Return whether `mark_initialised` was called since the index was made or emptied."""
    return bool(index.meta("initialised"))


def read_issued(layout: Layout) -> int:
    """Return the highest group a permit was issued for; -1 if none."""
    try:
        return int(layout.issued.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return -1
