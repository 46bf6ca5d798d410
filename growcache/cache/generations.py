"""Generations: consecutive caches in one directory, each of another configuration.

The first generation is the directory itself. Each later one is a complete cache in a folder
``generation-N``, so nothing of one generation can mix with another: no index, snapshot or
listing. `CacheLayout` of the directory means the newest generation with an index. The link
``generation-0`` names the first one. A generation exists as long as its index or marker. No
other file records that, so a crash leaves no contradiction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from growcache.cache.directory import adopt, clear_cache, finish_clear, write_marker
from growcache.cache.eviction_policy import Candidate
from growcache.cache.files import (
    FIRST_GENERATION,
    LAYOUT_VERSION,
    CacheLayout,
    allocated,
    directory_of,
    fsync_directory,
    generation_numbers,
    generation_path,
    write_atomic,
)
from growcache.cache.purge_list import copy_list
from growcache.modes import make_inner_directory

if TYPE_CHECKING:
    from growcache.cache.cache import Cache

PURGE_SECONDS = 0.02  # per call


def begin_generation(root: Path, *, any_owner: bool) -> CacheLayout:
    """Make the folder of the next generation, durably. It is the newest from then on."""
    newest, first = generation_numbers(root)[-1], root / FIRST_GENERATION
    number = newest + 1
    if not os.path.lexists(first):
        # An earlier growcache knows only this version.
        write_marker(CacheLayout(root), LAYOUT_VERSION)
        first.symlink_to(".")
        fsync_directory(root)
    layout = CacheLayout(generation_path(root, number))
    make_inner_directory(layout.root)
    before = CacheLayout(generation_path(root, newest)).purged
    # Purged objects stay purged. The marker makes the folder a generation, so it comes after.
    if before.exists():
        write_atomic(layout.purged, before.read_bytes())
    write_marker(layout)
    adopt(layout, any_owner=any_owner)
    fsync_directory(root)
    return layout


def end_generation(layout: CacheLayout) -> None:
    """Remove a generation without shards. Foreign files in it stay."""
    clear_cache(layout)  # index first, so that readers use the previous one
    if layout.root.name == FIRST_GENERATION:
        return
    for path in (layout.marker, layout.purged, layout.supervisor_lock, layout.samplers_lock):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty, because it has foreign files
        for folder in layout.folders:
            folder.rmdir()
        layout.root.rmdir()


def finish_ended(root: Path) -> None:
    """Finish the removal of the first generation, which has no marker of its own, after a crash."""
    first = root / FIRST_GENERATION
    if os.path.lexists(first) and generation_numbers(root)[0] != 0:
        finish_clear(CacheLayout(first))


def to_give_way(
    candidates: Sequence[Candidate], need_bytes: int
) -> tuple[list[int], list[int]]:
    """Return shards of an older generation to evict, and to retire although readers hold them.

    The oldest shards are first. Held shards are retired only if the others do not suffice.

    >>> free, held = Candidate(1, 1, 10, 0, 0, False), Candidate(0, 0, 10, 0, 0, True)
    >>> to_give_way([held, free], 5), to_give_way([held, free], 15)
    (([1], []), ([1], [0]))
    """
    evict: list[int] = []
    ahead: list[int] = []
    for candidate in sorted(candidates, key=lambda c: (c.leased, c.seq)):
        if need_bytes <= 0:
            break
        (ahead if candidate.leased else evict).append(candidate.number)
        need_bytes -= candidate.allocated
    return evict, ahead


class OlderGenerations:
    """The generations that are being replaced. They only shrink, as the newest needs room."""

    def __init__(self, root: Path, caches: Sequence[Cache] = ()) -> None:
        self._root = root
        self.caches = list(caches)

    def __bool__(self) -> bool:
        return bool(self.caches)

    @property
    def bytes(self) -> int:
        """Bytes that count against the bound, in addition to the newest generation's."""
        return self._left_bytes() + sum(cache.space.used() for cache in self.caches)

    def _left_bytes(self) -> int:
        """Bytes of marker and locks in the directory, after its own generation has ended."""
        if generation_numbers(self._root)[0] == 0:
            return 0
        with os.scandir(self._root) as entries:
            return sum(allocated(Path(e.path)) for e in entries if not e.is_dir())

    @property
    def samples(self) -> int:
        return sum(cache.totals().samples for cache in self.caches)

    def poll(self, now: float) -> None:
        """Delete what readers have released. No shard of these generations is drawn again."""
        for cache in self.caches:
            cache.poll_leases(now)
            self._purge(cache, now + PURGE_SECONDS)
            if pending := cache.refetch_queue.pending:
                reason = "its generation is being replaced by one of another configuration"
                cache.refetch_queue.refuse(dict.fromkeys(pending, reason))

    def _purge(self, cache: Cache, until: float) -> None:
        if cache.purger.look():  # a command that started before the newest generation
            copy_list(cache.layout, CacheLayout(self._root))
        if cache.purger.busy:
            cache.purger.step(until, rewrites=False)

    def follow_list(self, newest: CacheLayout) -> None:
        """Purge the objects in the newest generation's purge list, and vice versa."""
        for cache in self.caches:
            copy_list(cache.layout, newest)
            copy_list(newest, cache.layout)

    def give_way(self, need_bytes: int) -> None:
        for cache in self.caches:
            before = cache.bytes_used
            evict, ahead = to_give_way(cache.candidates(), need_bytes - cache.clearing_bytes)
            cache.retire(ahead)
            cache.evict(evict)
            need_bytes -= before - cache.bytes_used
            if need_bytes <= 0:
                return

    def movable(self) -> tuple[int, int]:
        """Return the bytes of shards that can go now, and after their readers release them."""
        found = [candidate for cache in self.caches for candidate in cache.candidates()]
        held = sum(c.allocated for c in found if c.leased)
        going = sum(cache.totals().retired_bytes for cache in self.caches)
        return sum(c.allocated for c in found) - held, held + going

    @property
    def movable_bytes(self) -> int:
        return sum(self.movable())

    def end_empty(self) -> None:
        for cache in list(self.caches):
            totals = cache.totals()
            if not (totals.shards or totals.retired_shards):
                self.caches.remove(cache)
                end_generation(cache.layout)
                cache.abandon()

    def maintain(self) -> None:
        for cache in self.caches:
            cache.maintain()

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


def makes_room_for_next(cache: Cache, need_bytes: int) -> bool:
    """Evict for another generation's index next to this one; return whether it fits now.

    If readers hold the needed shards, a later call succeeds after they have finished their
    passes.
    """
    every = OlderGenerations(directory_of(cache.layout.root), [*cache.older.caches, cache])
    every.poll(time.monotonic())
    cache.count_older()
    if (short := cache.bytes_used + need_bytes - cache.max_bytes) > 0:
        every.give_way(short)
        cache.count_older()
    return cache.bytes_used + need_bytes <= cache.max_bytes or not every.movable_bytes
