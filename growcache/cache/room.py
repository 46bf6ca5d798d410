"""The bound, in allocated blocks: what is used, what is promised, what is left.

Everything under the cache directory counts. A fixed part of the bound is set aside for the
index, its log, leases and the ballast; shards, the catalog and what samplers are writing
share the rest.
"""

from __future__ import annotations

import os

from growcache.cache.budget import Budget, fixed_budget
from growcache.cache.files import Layout, allocated, allocated_tree
from growcache.cache.stock import Stock


class Room:
    """The account of one cache.

    A bound that is lowered is in force only once everything fits below it; until then the
    old one is (G1), and nothing new is promised.

    Attributes:
        catalog_bytes: what the catalog takes; its owner keeps this up to date.
        foreign_bytes: allocated by what is not ours, as far as `other_bytes` does not count it.
        listing_ahead: what shards leave free for the part of the listing that is yet to come.
    """

    def __init__(self, layout: Layout, max_bytes: int, stock: Stock) -> None:
        self._layout = layout
        self._stock = stock
        self._max_bytes = self._in_force = max_bytes
        self.catalog_bytes = 0
        self.foreign_bytes = 0
        self.listing_ahead = 0
        self._reserved: dict[str, int] = {}

    @property
    def max_bytes(self) -> int:
        """The bound that is wanted: what is promised stays below it."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._max_bytes = value
        self.settle()

    @property
    def in_force(self) -> int:
        """The bound that holds now; more than `max_bytes` while the cache shrinks."""
        return self._in_force

    def settle(self) -> None:
        """Look whether a lowered bound holds by now."""
        if self.left() >= 0:
            self._in_force = self._max_bytes
        else:
            self._in_force = max(self._in_force, self._max_bytes)

    def admit(self) -> None:
        """Count with what lies there at a start, which a larger bound may have let in."""
        self._in_force = max(self._in_force, self.used())

    @property
    def index_overflows(self) -> bool:
        """Whether index, log and the like take more than the bound sets aside for them."""
        return self.other_bytes() > self.budget.total

    def slack(self) -> int:
        """Return how many bytes may be written for a moment, below the bound in force."""
        return self._in_force - self.used() - self.reserved

    @property
    def budget(self) -> Budget:
        """The fixed part, by purpose."""
        return fixed_budget(self.max_bytes)

    def other_bytes(self) -> int:
        """Return what everything but shards and catalog takes on disk now."""
        layout = self._layout
        total = sum(map(allocated, (layout.root, layout.shards, layout.incoming)))
        total += allocated_tree(layout.leases)
        with os.scandir(layout.root) as entries:
            for entry in entries:
                if entry.name != layout.catalog.name and not entry.is_dir():
                    total += allocated(layout.root / entry.name)
        return total

    def used(self) -> int:
        """Return the bytes that count against the bound, the fixed part as a whole."""
        shards = self._stock.bytes + self.foreign_bytes
        catalog = max(self.catalog_bytes, allocated(self._layout.catalog))
        return shards + max(self.budget.total, self.other_bytes()) + catalog

    @property
    def reserved(self) -> int:
        """Bytes promised to permits."""
        return sum(self._reserved.values())

    def left(self) -> int:
        """Return how many more bytes could be used; negative while shrinking."""
        return self.max_bytes - self.used() - self.reserved

    def left_for_shards(self) -> int:
        """Return how many more bytes could be promised to permits."""
        return self.left() - self.listing_ahead

    def reserve(self, permit: str, nbytes: int) -> bool:
        """Promise bytes to a permit, in place of what it was promised before."""
        before = self._reserved.pop(permit, 0)
        if nbytes <= self.left_for_shards():
            self._reserved[permit] = nbytes
            return True
        if before:
            self._reserved[permit] = before
        return False

    def release(self, permit: str) -> None:
        """Take a promise back; the permit's files are gone or are counted as shards now."""
        self._reserved.pop(permit, None)


# Of a lease of thousands of shards, a byte each, in whole blocks.
LEASE_ROOM_BYTES = 1 << 16


def free_disk_bytes(layout: Layout) -> tuple[int, int]:
    """Return (free to this user, all) bytes of the file system that holds the cache."""
    found = os.statvfs(layout.root)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def min_free_bytes(min_free: float, total: int) -> int:
    """Return ``min_free`` in bytes, where a number below 1 is a share of the disk."""
    return int(min_free * total) if min_free < 1 else int(min_free)
