"""The shards that this process has mapped, shared by its snapshots of one cache.

A map passes on from one snapshot to the next where that holds the shard: mapping anew
for every epoch costs a third of the speed in page faults. Of a cache beyond memory the
pages of most maps are forgotten once no window needs them (see `residency`).

What was found whole need not be read through once more where nobody held it for a moment,
as between two iterations of a dataset: who keeps the pool keeps that knowledge, of files
that are the same ones still (see `stamps`).
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias
from weakref import WeakValueDictionary

from growcache.cache.files import Layout
from growcache.cache.formats import open_shard, shard_files, shard_path
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.formats.mapping import FAR_BYTES, forget, read_ahead_bytes
from growcache.cache.index import ShardRow
from growcache.cache.memory import available_bytes
from growcache.cache.undivided import undivided
from growcache.errors import CorruptShardError
from growcache.loading.residency import is_kept
from growcache.loading.stamps import Stamp, stamp_of
from growcache.schema import Schema

Verify: TypeAlias = Literal["first", "always"]

# A cache that was cleared and filled anew has the same numbers with other content.
Key: TypeAlias = tuple[int, str]

# Epochs that are over sooner need not look at memory anew.
RECENT_SECONDS = 1.0

_log = logging.getLogger(__name__)
_pools: WeakValueDictionary[Path, MapPool] = WeakValueDictionary()
_pools_lock = threading.Lock()


def key_of(row: ShardRow) -> Key:
    """Return what identifies a shard's content."""
    return row.number, row.digest


class MapPool:
    """Maps of the shards that at least one snapshot of this process holds.

    Args:
        layout: of the cache.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # Reentrant, for the collector may let go of a snapshot wherever this thread is; and taken
        # where no fork divides it, for a child goes on with the pools of its snapshots.
        self._lock = threading.RLock()
        self._holds: Counter[Key] = Counter()
        self._maps: dict[Key, MappedShard] = {}
        self._stamps: dict[Key, Stamp | None] = {}  # of the files as they were mapped
        self._verified: set[Key] = set()  # of what is mapped
        self._known: dict[Key, Stamp] = {}  # of what was found whole
        self._bad: dict[Key, str] = {}
        self._users: Counter[Key] = Counter()  # open windows
        # Held while pages are let go of, so that no window begins to bring them meanwhile. Not
        # the lock above: whoever takes or closes a snapshot would wait for the kernel.
        self._leaving = threading.RLock()
        self._asking: bool | None = None  # known when there is a cache
        self._seen: dict[Key, float] = {}  # in memory, and when
        self._available = (-math.inf, 0)  # when it was asked for, and bytes

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> MapPool:
        """Return the pool that all snapshots of a cache in this process share."""
        where = Path(path).resolve()
        with _pools_lock:
            pool = _pools.get(where)
            if pool is None:
                pool = _pools[where] = cls(Layout(path))
            return pool

    def hold(self, keys: Iterable[Key]) -> None:
        """Keep the maps of these shards, those that are there and those to come."""
        with undivided(), self._lock:
            self._holds.update(keys)
            self._known = {key: s for key, s in self._known.items() if key in self._holds}

    def release(self, keys: Iterable[Key]) -> None:
        """Undo one `hold`; maps that nobody holds are closed."""
        with undivided(), self._lock:
            for key in keys:
                self._holds[key] -= 1
                if self._holds[key] <= 0:
                    del self._holds[key]
                    if key in self._maps:
                        self._maps.pop(key).close()
                    # When it is here again it may be another file: mended, or drawn once more.
                    self._stamps.pop(key, None)
                    self._verified.discard(key)
                    self._bad.pop(key, None)
                    self._seen.pop(key, None)

    def open(
        self, row: ShardRow, schema: Schema, cache_format: str, verify: Verify = "first"
    ) -> MappedShard:
        """Return the map of a shard that the caller holds, its content checked and in memory.

        Args:
            row: of the index.
            schema: of its samples.
            cache_format: of the cache.
            verify: ``first`` checks what this process has not seen yet, ``always`` also
                what it has.

        Raises:
            CorruptShardError: now or at an earlier look; this is logged once.
        """
        key = key_of(row)
        if key in self._bad:
            raise CorruptShardError(self._bad[key])
        mapped = kept = self._maps.get(key)
        try:
            if mapped is None:
                mapped = self._map(row, schema, cache_format)
            if verify == "always" or key not in self._verified:
                self._check(row, mapped, cache_format)
            elif kept is None:
                # Here, and not page by page where rows are copied: this is ahead of that.
                mapped.bring(asking=self._asks())
            else:
                self._bring(row, mapped, cache_format)
            if kept is None:
                mapped.remember_ends()
            if mapped.damaged or (
                kept is None and not self._is_long(row, mapped, cache_format)
            ):
                raise self._cut_short(row, cache_format)
        except CorruptShardError as error:
            self._condemn(key, error)
            raise
        with undivided(), self._lock:
            self._verified.add(key)
            return self._maps.setdefault(key, mapped)

    def condemn(self, row: ShardRow, cache_format: str) -> None:
        """Have a shard that the caller holds count as corrupt: its map is damaged."""
        self._condemn(key_of(row), self._cut_short(row, cache_format))

    def _condemn(self, key: Key, error: CorruptShardError) -> None:
        with undivided(), self._lock:
            if key in self._bad:
                return
            self._bad[key] = str(error)
        _log.warning("skipping a corrupt shard: %s", error)

    def _cut_short(self, row: ShardRow, cache_format: str) -> CorruptShardError:
        return CorruptShardError(
            f"{shard_path(self._layout, row.number, cache_format)}: it was cut short while it was "
            "read, or the disk fails; run growcache check"
        )

    def _map(self, row: ShardRow, schema: Schema, cache_format: str) -> MappedShard:
        key, before = key_of(row), self._stamp(row, cache_format)
        mapped = open_shard(self._layout, row.number, row.samples, schema, cache_format)
        # Only what had it before and after is sure to be what was mapped.
        stamp = before if before == self._stamp(row, cache_format) else None
        with undivided(), self._lock:
            first = self._stamps.setdefault(key, stamp)  # of the map that will be kept
            if stamp is not None and stamp == first == self._known.get(key):
                self._verified.add(key)
        return mapped

    def _is_long(self, row: ShardRow, mapped: MappedShard, cache_format: str) -> bool:
        """Whether the files have their length still, so that what was read of them was there."""
        files = shard_files(self._layout, row.number, cache_format) if row.samples else ()
        try:
            return sum(path.stat().st_size for path in files) == mapped.nbytes
        except FileNotFoundError:
            return False

    def _stamp(self, row: ShardRow, cache_format: str) -> Stamp | None:
        return stamp_of(shard_files(self._layout, row.number, cache_format))

    def _check(self, row: ShardRow, mapped: MappedShard, cache_format: str) -> None:
        # One pass over the file in order: this also brings a cold file into memory.
        found = mapped.digest(asking=self._asks())
        if found != row.digest:
            raise CorruptShardError(
                f"{shard_path(self._layout, row.number, cache_format)}: expected the digest "
                f"{row.digest}, found {found}; run growcache check"
            )
        stamp = self._stamps.get(key_of(row))
        if stamp is not None and stamp == self._stamp(row, cache_format):
            with undivided(), self._lock:
                self._known[key_of(row)] = stamp

    def _bring(self, row: ShardRow, mapped: MappedShard, cache_format: str) -> None:
        """Have a shard that was seen before in memory: it may have gone cold since."""
        key, now = key_of(row), time.monotonic()
        if now - self._seen.get(key, -math.inf) < RECENT_SECONDS:
            return
        # Of files that a user may not write the kernel does not tell what is in memory.
        known = os.access(shard_path(self._layout, row.number, cache_format), os.W_OK)
        if not (known and mapped.in_memory):
            mapped.bring(asking=self._asks())
        self._seen[key] = now

    def _asks(self) -> bool:
        """Whether the kernel must be asked to read ahead, for it reads less by itself."""
        if self._asking is None:
            self._asking = read_ahead_bytes(self._layout.shards) < FAR_BYTES
        return self._asking

    def available_bytes(self) -> int:
        """Return the memory that could be had, as of lately: to ask takes milliseconds."""
        when, nbytes = self._available
        if (now := time.monotonic()) - when >= RECENT_SECONDS:
            nbytes = available_bytes()
            self._available = now, nbytes
        return nbytes

    def enter(self, keys: Iterable[Key]) -> None:
        """Say that a window is about to read these shards: from here on their pages stay."""
        with self._leaving, undivided(), self._lock:
            self._users.update(keys)

    def leave(self, keys: Iterable[Key], cache_format: str, share: float) -> None:
        """Undo one `enter`; what no window reads any more may leave memory.

        Args:
            keys: of shards that the caller holds.
            cache_format: of the cache.
            share: of the shards that stay, see `kept_share`.
        """
        with undivided(), self._lock:
            self._users.subtract(keys)
            unused = [key for key in keys if self._users[key] <= 0]
            for key in unused:
                del self._users[key]
        for key in unused:
            if not is_kept(key[0], share):
                self._let_go(key, cache_format)

    def _let_go(self, key: Key, cache_format: str) -> None:
        with self._leaving:  # one shard at a time, for who enters waits for it
            if key in self._users:  # another window has entered since
                return
            # The pages of a map are its process's own: only without them can the files' go.
            self._seen.pop(key, None)
            if (mapped := self._maps.get(key)) is not None:
                mapped.let_go()
            with suppress(FileNotFoundError):  # its lease may be closed, and its folder go
                for path in shard_files(self._layout, key[0], cache_format):
                    forget(path)


def _forget_after_fork() -> None:
    global _pools, _pools_lock
    _pools, _pools_lock = WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
