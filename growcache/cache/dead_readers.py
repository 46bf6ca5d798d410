"""Dead readers: how long a lease outlives its reader, and which shards it still protects.

A dead reader that saved a state may return for the shards that it had not finished. They are
held for ``cache.resume_seconds``. Together, dead readers may hold a fifth of the bound, and
their leases a fifth of the space for leases. Afterwards the lease has ended, and its uses are
counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from growcache.cache.files import CacheLayout, allocated
from growcache.cache.lease_views import (
    STAGE_CLOSED,
    LeaseView,
    lease_path,
    protected_shards,
    split_lease,
)
from growcache.cache.locks import close_owned, open_owned, try_lock

if TYPE_CHECKING:  # a status does not need these imports
    from growcache.cache.space import ShardTable, SpaceAccount

# Shards and leases of dead readers take at most this fraction of their bounds.
DEAD_READERS_SHARE = 5


@dataclass(frozen=True, slots=True)
class DeadReader:
    """Shards that are held for a dead reader in case it returns, and for how many seconds."""

    lease: LeaseView
    shards: tuple[int, ...]
    seconds: float


class DeadReaders:
    def __init__(
        self,
        layout: CacheLayout,
        resume_seconds: float,
        shard_table: ShardTable,
        space: SpaceAccount,
    ) -> None:
        self._layout = layout
        self._resume_seconds = resume_seconds
        self._shard_table = shard_table
        self._space = space
        self._now = 0.0
        self._dead_since: dict[str, float] = {}
        self._held: dict[str, tuple[int, ...]] = {}  # by lease

    def update_from_leases(self, leases: Iterable[LeaseView], now: float | None) -> None:
        """Note which readers are dead.

        ``now`` is in monotonic seconds; None means the previous time.
        """
        self._now = self._now if now is None else now
        before = self._dead_since
        dead = [lease.name for lease in leases if not lease.open and not lease.closed]
        self._dead_since = {name: before.get(name, self._now) for name in dead}

    def has_ended(self, lease: LeaseView) -> bool:
        """Whether the lease was closed, or its reader has not returned in time."""
        if lease.open:
            return False
        if not lease.resumable or self._held.get(lease.name) == ():
            return True  # others took the space, so nothing is held for it
        return self.seconds_left(lease) <= 0

    def seconds_left(self, lease: LeaseView) -> float:
        return self._dead_since.get(lease.name, self._now) + self._resume_seconds - self._now

    @property
    def max_shard_bytes(self) -> int:
        return self._space.max_bytes // DEAD_READERS_SHARE

    def hold(self, leases: Iterable[LeaseView]) -> frozenset[int]:
        """Return the shards to hold for dead readers, latest reader first, within their limit.

        Shards are taken by number, so that the choice is stable while others are evicted.
        """
        self._held, held, left = {}, set[int](), self.max_shard_bytes
        left_for_leases = self._space.budget.leases // DEAD_READERS_SHARE
        dead = [lease for lease in leases if not lease.open]
        for lease in sorted(dead, key=lambda lease: (-self.seconds_left(lease), lease.name)):
            mine: list[int] = []
            left_for_leases -= allocated(lease_path(self._layout, lease.name))
            if left_for_leases < 0 and self._held:  # at least one is held
                self._held[lease.name] = ()
                continue
            for number in protected_shards(lease, resumable=True):
                row = self._shard_table.get(number)
                nbytes = row.allocated if row is not None and number not in held else 0
                if row is not None and nbytes <= left:
                    left -= nbytes
                    mine.append(number)
            held.update(mine)
            self._held[lease.name] = tuple(mine)
        return frozenset(held)

    def held_for(self, leases: Iterable[LeaseView]) -> list[DeadReader]:
        return [
            DeadReader(lease, self._held[lease.name], max(0.0, self.seconds_left(lease)))
            for lease in leases
            if not lease.open
        ]


def end_dead_lease(layout: CacheLayout, name: str) -> bool:
    """End a dead reader's lease as the reader would have; return False if it lives.

    May raise PermissionError.
    """
    try:
        descriptor = open_owned(lease_path(layout, name), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if not try_lock(descriptor, shared=True):
            return False
        start, length, _ = split_lease(data)
        os.pwrite(descriptor, STAGE_CLOSED, start + length)
        return True
    finally:
        close_owned(descriptor)
