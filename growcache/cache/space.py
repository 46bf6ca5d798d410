"""The space account: the shards with their sums, and the bytes used, reserved and free in the bound.

Everything in the cache directory counts, in allocated blocks.

The ballast is a file that is deleted when the disk is full, because an eviction commits before
it unlinks. Without that space the commit would fail, so nothing could ever be freed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from growcache.cache.files import (
    CacheLayout,
    allocated,
    allocated_tree,
    is_full_disk,
)
from growcache.cache.index.schema import ShardState, ShardTableRow
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError
from growcache.modes import FILE_MODE, share_if_folder_is


class ShardTable:
    """The shards on disk: ``live`` by number, oldest first, ``retired``, and their sums."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.live: dict[int, ShardTableRow] = {}
        self.retired: dict[int, ShardTableRow] = {}
        self.live_samples = self.live_bytes = self.retired_bytes = 0

    def __contains__(self, number: object) -> bool:
        return number in self.live or number in self.retired

    def get(self, number: int) -> ShardTableRow | None:
        return self.live.get(number) or self.retired.get(number)

    def samples_of(self, number: int) -> int:
        row = self.get(number)
        return 0 if row is None else row.samples

    @property
    def bytes(self) -> int:
        return self.live_bytes + self.retired_bytes

    def add(self, rows: Iterable[ShardTableRow]) -> None:
        """Add shards, each younger than the ones before it."""
        for row in rows:
            if row.state == ShardState.RETIRED:
                self.retired[row.number] = row
                self.retired_bytes += row.allocated
            else:
                self.live[row.number] = row
                self.live_samples += row.samples
                self.live_bytes += row.allocated

    def retire(self, rows: Iterable[ShardTableRow]) -> None:
        for row in rows:
            del self.live[row.number]
            self.live_samples -= row.samples
            self.live_bytes -= row.allocated
            self.add([row._replace(state=ShardState.RETIRED)])

    def order(self) -> None:
        """Sort live shards that were added although they are not the youngest."""
        self.live = dict(sorted(self.live.items(), key=lambda item: item[1].seq))

    def revive(self, rows: Iterable[ShardTableRow]) -> None:
        for row in rows:
            self.remove([row.number])
            self.add([row._replace(state=ShardState.LIVE)])
        self.order()

    def remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.retired_bytes -= self.retired.pop(number).allocated

    def use(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for rows in (self.live, self.retired):
                if row := rows.get(number):
                    rows[number] = row._replace(uses=row.uses + 1)


class KnownHole(NamedTuple):
    shard: int
    key: str
    part: int
    version: str = ""  # of the object, if it differs from the listed one


def known_holes(
    layout: CacheLayout, rows: Iterable[ShardTableRow], others: Iterable[tuple[int, str, int]]
) -> list[KnownHole]:
    """Return holes of rows and of the index (shard, key, part).

    Visits that also yielded samples are left out.
    """
    rows = list(rows)
    here = {row.number for row in rows}
    with_holes = {row.group for row in rows if row.holes}
    found = [KnownHole(*other) for other in others if other[0] not in here]
    brought: set[tuple[int, str, int]] = set()
    groups: dict[int, int] = {}
    for row in rows:
        groups[row.number] = row.group
        if row.group not in with_holes:
            continue
        with suppress(CorruptShardError, OSError):  # `check` reports those
            sidecar = Sidecar.from_bytes(layout.sidecar(row.number).read_bytes())
            found += [KnownHole(row.number, h.key, h.part, h.version) for h in sidecar.holes]
            o = sidecar.origins
            parts = zip(o.object, o.part, strict=True)
            brought.update((row.group, o.keys[at], part) for at, part in parts)
    return [h for h in found if (groups.get(h.shard, -1), h.key, h.part) not in brought]


LEAST_BUDGET_BYTES = 600_000
MOST_BUDGET_BYTES = 20_000_000
BUDGET_SHARE = 8  # the budget is this fraction of max_bytes


@dataclass(frozen=True, slots=True)
class SpaceBudget:
    """The fixed part of the bound, by purpose, in allocated bytes."""

    total: int  # reserved, whether used or not; the rest is for locks and directories
    ballast: int
    wal: int  # limit of the log, which may exceed it by one transaction
    leases: int  # limit of all leases together
    pages: int  # limit of the index itself; no permit is granted beyond it
    kept_deleted: int  # rows of deleted shards that are kept separately
    kept_history: int  # records
    deferred: int  # limit of the visits in the record of deferrals


def fixed_budget(max_bytes: int) -> SpaceBudget:
    total = min(max(max_bytes // BUDGET_SHARE, LEAST_BUDGET_BYTES), MOST_BUDGET_BYTES)
    return SpaceBudget(
        total=total,
        ballast=min(1_000_000, total // 8) // 4096 * 4096,
        wal=total // 8,
        leases=total // 8,
        pages=total // 2,
        kept_deleted=total // 10_000,
        kept_history=total // 8_000,
        deferred=total // 300,
    )


def minimum_bytes(workers: int, group_bytes: int, catalog_bytes: int = 0) -> int:
    """Return the smallest ``max_bytes`` that keeps this many samplers busy.

    >>> fixed_budget(minimum_bytes(2, 100_000)).total + 4 * 100_000 == minimum_bytes(2, 100_000)
    True
    """
    need = (workers + 2) * group_bytes + catalog_bytes
    in_proportion = -(-need * BUDGET_SHARE // (BUDGET_SHARE - 1))
    return need + fixed_budget(in_proportion).total


class Ballast:
    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size

    def drop(self) -> bool:
        there = allocated(self.path) > 0
        self.path.unlink(missing_ok=True)
        return there

    def restore(self) -> bool:
        """Make the file if the disk has room to spare; return whether it exists."""
        if self.path.exists() and self.path.stat().st_size == self.size:
            return True
        self.path.unlink(missing_ok=True)
        if free_user_bytes(self.path.parent) < 2 * self.size:
            return False
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, FILE_MODE)
        try:
            share_if_folder_is(descriptor, self.path.parent)
            os.posix_fallocate(descriptor, 0, self.size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            if not is_full_disk(error):
                raise
            return False
        finally:
            os.close(descriptor)
        return True


def free_user_bytes(path: Path) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


class SpaceAccount:
    """The space account of one cache.

    A lowered bound is in force only after everything fits into it. Until then the old one is
    (G1), and nothing new is reserved.

    Shards are counted when they are added and removed. Everything else is measured before each
    decision that allows bytes to be written, and at each poll of the leases, because readers
    and others write too.
    """

    def __init__(self, layout: CacheLayout, max_bytes: int, shard_table: ShardTable) -> None:
        self._layout = layout
        self._shard_table = shard_table
        self._max_bytes = self._in_force = max_bytes
        self.catalog_bytes = 0
        self.foreign_bytes = 0
        self.older_bytes = 0  # of the generations that this one replaces
        self.listing_ahead = 0
        self._reserved: dict[str, int] = {}
        self._other_bytes = 0

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._max_bytes = value
        self.settle()

    @property
    def in_force(self) -> int:
        """The current bound, which exceeds `max_bytes` while the cache shrinks."""
        return self._in_force

    def settle(self) -> None:
        """Put a lowered bound in force if everything fits into it now."""
        self.measure()
        if self.left() >= 0:
            self._in_force = self._max_bytes
        else:
            self._in_force = max(self._in_force, self._max_bytes)

    def admit(self) -> None:
        """Accept what is on disk at a start, because an earlier bound may have been larger."""
        self.measure()
        self._in_force = max(self._in_force, self.used())

    @property
    def index_overflows(self) -> bool:
        """Whether index, log, leases and other files exceed the fixed part of the bound."""
        self.measure()
        return self._other_bytes > self.budget.total

    def slack(self) -> int:
        """Return the bytes that may be written temporarily within the bound in force."""
        self.measure()
        return self._in_force - self.used() - self.reserved

    @property
    def budget(self) -> SpaceBudget:
        return fixed_budget(self.max_bytes)

    def measure(self) -> None:
        """Measure the allocated bytes of everything except shards and catalog."""
        layout = self._layout
        total = sum(map(allocated, (layout.root, layout.shards, layout.incoming)))
        total += allocated_tree(layout.leases)
        with os.scandir(layout.root) as entries:
            for entry in entries:
                if entry.name != layout.catalog.name and not entry.is_dir():
                    total += allocated(layout.root / entry.name)
        self._other_bytes = total

    def used(self) -> int:
        """Return the bytes that count against the bound, with the whole fixed part."""
        shards = self._shard_table.bytes + self.foreign_bytes + self.older_bytes
        catalog = max(self.catalog_bytes, allocated(self._layout.catalog))
        return shards + max(self.budget.total, self._other_bytes) + catalog

    @property
    def reserved(self) -> int:
        return sum(self._reserved.values())

    def left(self) -> int:
        """Return the bytes that could still be used; negative while the cache shrinks."""
        return self.max_bytes - self.used() - self.reserved

    def left_for_shards(self) -> int:
        return self.left() - self.listing_ahead

    def reserve(self, permit: str, nbytes: int) -> bool:
        self.measure()
        before = self._reserved.pop(permit, 0)
        if nbytes <= self.left_for_shards():
            self._reserved[permit] = nbytes
            return True
        if before:
            self._reserved[permit] = before
        return False

    def release(self, permit: str) -> None:
        """Release a permit's reservation, because its files are gone or count as shards."""
        self._reserved.pop(permit, None)


# Of a lease on thousands of shards, with a byte each, in whole blocks.
LEASE_BYTES = 1 << 16


def free_disk_bytes(layout: CacheLayout) -> tuple[int, int]:
    """Return (bytes free to this user, all bytes) of the cache's file system."""
    found = os.statvfs(layout.root)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def min_free_bytes(min_free: float, total: int) -> int:
    """Return ``min_free`` in bytes. A number below 1 is a share of the disk."""
    return int(min_free * total) if min_free < 1 else int(min_free)
