"""The shards that this process has mapped and verified, shared by its snapshots of one cache.

A map passes from one snapshot to the next, because mapping anew for every epoch costs a third
of the speed in page faults. A verified shard is not read again while its files are unchanged.

A pass reads every shard once, so a page cache smaller than the cache drops each shard just
before it is needed again. If the cache is larger than memory, a constant share of its shards
therefore stays resident. The pages of the others are dropped when no window reads them.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal, TypeAlias
from weakref import WeakValueDictionary

from growcache.cache.files import CacheLayout, directory_of, generation_in, generation_path
from growcache.cache.formats import open_shard, shard_files, shard_path
from growcache.cache.formats.mapped import (
    FAR_READ_AHEAD_BYTES,
    MappedShard,
    drop_from_page_cache,
    read_ahead_bytes,
)
from growcache.cache.index.schema import ShardRow
from growcache.cache.locks import fork_lock
from growcache.cache.system import available_memory_bytes
from growcache.errors import CorruptShardError
from growcache.schema import Schema

# Values of each file that change if the file is written or replaced.
FileIdentity: TypeAlias = tuple[tuple[int, int, int, int], ...]

# Two changes within one tick of the kernel's clock may have the same time.
TICK_NS = 20_000_000
SECOND_NS = 1_000_000_000


def file_identity(paths: Iterable[Path]) -> FileIdentity | None:
    """Return the identity of files, or None if it is uncertain.

    It is uncertain right after a change, and with times in whole seconds.
    """
    now, found = time.time_ns(), []
    for path in paths:
        try:
            file = path.stat()
        except OSError:
            return None
        changed = file.st_ctime_ns
        if not changed % SECOND_NS or changed > now - TICK_NS:
            return None
        found.append((file.st_dev, file.st_ino, file.st_size, changed))
    return tuple(found) or None


# Of the available memory. The rest is for other programs.
SHARE_OF_AVAILABLE = 0.5
RESIDENT_WINDOWS = 2  # one that is read, and one that is read ahead

_GOLDEN_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, whose multiples fill a circle evenly
_HASH_RANGE = 1 << 64


def resident_share(cache_bytes: int, available_bytes: int, window_bytes: int) -> float:
    """Return the share of the shards that stay in memory, besides those of a window.

    `available_bytes` includes these shards' pages in the page cache.

    >>> resident_share(10 * 10**9, 48 * 10**9, 10**9), resident_share(900 * 10**9, 40 * 10**9, 10**9)
    (1.0, 0.02)
    """
    room = SHARE_OF_AVAILABLE * max(0, available_bytes)
    if cache_bytes <= room:
        return 1.0
    return max(0.0, room - RESIDENT_WINDOWS * window_bytes) / cache_bytes


def is_resident(number: int, share: float) -> bool:
    """Whether a shard stays resident.

    All readers agree, and a shard that stays at one share stays at any larger share.
    """
    return (number * _GOLDEN_STEP) % _HASH_RANGE < share * _HASH_RANGE


Verify: TypeAlias = Literal["first", "always"]

# A cache that was emptied and filled anew has the same numbers with other content.
ShardKey: TypeAlias = tuple[int, str]

# Shorter epochs need not measure memory again.
RECENT_SECONDS = 1.0

_log = logging.getLogger(__name__)
_pools: WeakValueDictionary[Path, MapPool] = WeakValueDictionary()
_pools_lock = threading.Lock()


def shard_key(row: ShardRow) -> ShardKey:
    return row.number, row.digest


class MapPool:
    """Maps of the shards that at least one snapshot of this process holds."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        # Reentrant, because the garbage collector may release a snapshot at any point of this
        # thread. Taken within the fork lock, because a forked child continues with the pools of
        # its snapshots.
        self._lock = threading.RLock()
        self._holds: Counter[ShardKey] = Counter()
        self._maps: dict[ShardKey, MappedShard] = {}
        # Of the files when they were mapped.
        self._stamps: dict[ShardKey, FileIdentity | None] = {}
        self._verified: set[ShardKey] = set()  # of the mapped shards
        self._known: dict[ShardKey, FileIdentity] = {}  # of intact files
        self._bad: dict[ShardKey, str] = {}
        self._warned: set[ShardKey] = set()  # of corrupt shards, whether held or not
        self._users: Counter[ShardKey] = Counter()  # open windows
        # Held while pages are dropped, so that no window starts to read them meanwhile. Not the
        # lock above, because a thread that takes or closes a snapshot would wait for the
        # kernel.
        self._leaving = threading.RLock()
        self._asking: bool | None = None  # known after the cache exists
        self._seen: dict[ShardKey, float] = {}  # time at which they were in memory
        self._available = (-math.inf, 0)  # time of the measurement, and bytes

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> MapPool:
        layout = CacheLayout(path)
        # By number, because the link to the first generation resolves to the directory itself.
        generation = generation_in(layout.root) or 0
        where = generation_path(directory_of(layout.root).resolve(), generation)
        with _pools_lock:
            pool = _pools.get(where)
            if pool is None:
                pool = _pools[where] = cls(layout)
            return pool

    def hold(self, keys: Iterable[ShardKey]) -> None:
        with fork_lock(), self._lock:
            self._holds.update(keys)
            self._known = {key: s for key, s in self._known.items() if key in self._holds}

    def release(self, keys: Iterable[ShardKey]) -> None:
        with fork_lock(), self._lock:
            for key in keys:
                self._holds[key] -= 1
                if self._holds[key] <= 0:
                    del self._holds[key]
                    if key in self._maps:
                        self._maps.pop(key).close()
                    # A later shard with this number may be another file, because it was
                    # repaired or drawn again.
                    self._stamps.pop(key, None)
                    self._verified.discard(key)
                    self._bad.pop(key, None)
                    self._seen.pop(key, None)

    def open(
        self, row: ShardRow, schema: Schema, cache_format: str, verify: Verify = "first"
    ) -> MappedShard:
        """Return a mapped, checked shard.

        Raises:
            CorruptShardError: The shard's content differs from what was written.
        """
        key = shard_key(row)
        if key in self._bad:
            raise CorruptShardError(self._bad[key])
        mapped = kept = self._maps.get(key)
        try:
            if mapped is None:
                mapped = self._map(row, schema, cache_format)
            if verify == "always" or key not in self._verified:
                self._check(row, mapped, cache_format)
            elif kept is None:
                # Here, ahead of the copies, and not page by page during them.
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
        with fork_lock(), self._lock:
            self._verified.add(key)
            return self._maps.setdefault(key, mapped)

    def verify(self, row: ShardRow, schema: Schema, cache_format: str, verify: Verify) -> None:
        """Check a held shard without a map, which would keep its disk space after an eviction."""
        key, stamp = shard_key(row), self._stamp(row, cache_format)
        if key in self._bad:
            raise CorruptShardError(self._bad[key])
        if verify == "first" and stamp is not None and stamp == self._known.get(key):
            return
        try:
            mapped = open_shard(self._layout, row.number, row.samples, schema, cache_format)
            with fork_lock(), self._lock:
                self._stamps[key] = stamp
            with closing(mapped):
                self._check(row, mapped, cache_format)
        except CorruptShardError as error:
            self._condemn(key, error)
            raise

    def mark_corrupt(self, row: ShardRow, cache_format: str) -> None:
        self._condemn(shard_key(row), self._cut_short(row, cache_format))

    def _condemn(self, key: ShardKey, error: CorruptShardError) -> None:
        with fork_lock(), self._lock:
            if key in self._bad:
                return
            self._bad[key] = str(error)
            warned = key in self._warned
            self._warned.add(key)
        if not warned:
            _log.warning("loader skips a corrupt shard: %s", error)

    def _cut_short(self, row: ShardRow, cache_format: str) -> CorruptShardError:
        return CorruptShardError(
            f"{shard_path(self._layout, row.number, cache_format)}: it was cut short while it was "
            "read, or the disk fails; run growcache check"
        )

    def _map(self, row: ShardRow, schema: Schema, cache_format: str) -> MappedShard:
        key, before = shard_key(row), self._stamp(row, cache_format)
        mapped = open_shard(self._layout, row.number, row.samples, schema, cache_format)
        # Only files with the same identity before and after are certainly the mapped ones.
        stamp = before if before == self._stamp(row, cache_format) else None
        with fork_lock(), self._lock:
            first = self._stamps.setdefault(key, stamp)  # of the map that is kept
            if stamp is not None and stamp == first == self._known.get(key):
                self._verified.add(key)
        return mapped

    def _is_long(self, row: ShardRow, mapped: MappedShard, cache_format: str) -> bool:
        files = shard_files(self._layout, row.number, cache_format) if row.samples else ()
        try:
            return sum(path.stat().st_size for path in files) == mapped.nbytes
        except FileNotFoundError:
            return False

    def _stamp(self, row: ShardRow, cache_format: str) -> FileIdentity | None:
        return file_identity(shard_files(self._layout, row.number, cache_format))

    def _check(self, row: ShardRow, mapped: MappedShard, cache_format: str) -> None:
        # One pass over the file in order, which also reads a cold file into memory.
        found = mapped.digest(asking=self._asks())
        if found != row.digest:
            raise CorruptShardError(
                f"{shard_path(self._layout, row.number, cache_format)}: expected the digest "
                f"{row.digest}, found {found}; run growcache check"
            )
        stamp = self._stamps.get(shard_key(row))
        if stamp is not None and stamp == self._stamp(row, cache_format):
            with fork_lock(), self._lock:
                self._known[shard_key(row)] = stamp

    def _bring(self, row: ShardRow, mapped: MappedShard, cache_format: str) -> None:
        key, now = shard_key(row), time.monotonic()
        if now - self._seen.get(key, -math.inf) < RECENT_SECONDS:
            return
        # The kernel does not report residency of files that the user may not write.
        known = os.access(shard_path(self._layout, row.number, cache_format), os.W_OK)
        if not (known and mapped.in_memory):
            mapped.bring(asking=self._asks())
        self._seen[key] = now

    def _asks(self) -> bool:
        if self._asking is None:
            self._asking = read_ahead_bytes(self._layout.shards) < FAR_READ_AHEAD_BYTES
        return self._asking

    def available_bytes(self) -> int:
        when, nbytes = self._available
        if (now := time.monotonic()) - when >= RECENT_SECONDS:
            nbytes = available_memory_bytes()
            self._available = now, nbytes
        return nbytes

    def enter(self, keys: Iterable[ShardKey]) -> None:
        with self._leaving, fork_lock(), self._lock:
            self._users.update(keys)

    def leave(self, keys: Iterable[ShardKey], cache_format: str, share: float) -> None:
        with fork_lock(), self._lock:
            self._users.subtract(keys)
            unused = [key for key in keys if self._users[key] <= 0]
            for key in unused:
                del self._users[key]
        for key in unused:
            if not is_resident(key[0], share):
                self._let_go(key, cache_format)

    def _let_go(self, key: ShardKey, cache_format: str) -> None:
        with self._leaving:  # one shard at a time, because `enter` waits for it
            if key in self._users:  # another window has entered meanwhile
                return
            # The pages of a map belong to its process. The files' pages can only be dropped
            # without them.
            self._seen.pop(key, None)
            if (mapped := self._maps.get(key)) is not None:
                mapped.let_go()
            with suppress(FileNotFoundError):  # its lease may be closed, and its folder deleted
                for path in shard_files(self._layout, key[0], cache_format):
                    drop_from_page_cache(path)


def _forget_after_fork() -> None:
    global _pools, _pools_lock
    _pools, _pools_lock = WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
