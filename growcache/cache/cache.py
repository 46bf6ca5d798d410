"""The supervisor's side of a cache directory: one `Cache` per directory, in one thread.

A crash between any two steps leaves litter, but never a row without its files:

    commit:  temporary file → fsync → rename → fsync of the directory → INSERT
    evict:   COMMIT retired → read the leases → unlink what no lease holds → row says deleted
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from growcache.cache.commit import Committer
from growcache.cache.directory import OpenDirectory, adopt, finish_clear, take_over
from growcache.cache.eviction_policy import Candidate
from growcache.cache.files import CacheLayout, directory_of, refuse_network
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.generations import OlderGenerations
from growcache.cache.incoming import discard_incoming
from growcache.cache.index.schema import CacheTotals, ShardTableRow
from growcache.cache.index.writer import IndexWriter
from growcache.cache.lease_views import LeaseView
from growcache.cache.locks import FileLock
from growcache.cache.meta import CacheMeta
from growcache.cache.purge import Purger
from growcache.cache.recovery import reconcile_rows, recover, warn_of_foreign_files
from growcache.cache.shard_refetches import redrawn_differently_reason
from growcache.cache.shard_removal import ShardRemover
from growcache.cache.side_files import Identity
from growcache.cache.sidecar import Sidecar
from growcache.cache.space import (
    LEASE_BYTES,
    KnownHole,
    ShardTable,
    SpaceAccount,
    free_disk_bytes,
    known_holes,
    min_free_bytes,
)
from growcache.config import CacheConfig
from growcache.schema import Schema


class Cache:
    """A cache directory that its only writer has open. Not thread-safe."""

    def __init__(self, layout: CacheLayout, config: CacheConfig, lock: FileLock) -> None:
        self.layout = layout
        self._config = config
        self._lock = lock
        self.older = OlderGenerations(directory_of(layout.root))
        self.shards = ShardTable()
        self.space = SpaceAccount(layout, int(config.max_bytes), self.shards)
        self.index_writer = IndexWriter(layout, self.space)
        try:
            self._load()
            self._directory = OpenDirectory(layout)
        except BaseException:
            self.index_writer.index.close()
            raise

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        config: CacheConfig,
        *,
        takeover_seconds: float = 10.0,
    ) -> Cache:
        """Open or create the cache at ``root``, and recover from a crash.

        May raise CacheError.
        """
        layout = CacheLayout(root)
        if not config.allow_network_filesystem:
            refuse_network(layout.root)
        adopt(layout, any_owner=config.allow_network_filesystem)
        lock = take_over(layout, takeover_seconds)
        try:
            finish_clear(layout)
            return cls(layout, config, lock)
        except BaseException:
            lock.close()
            raise

    def _load(self) -> None:
        layout, index_writer, shard_table = self.layout, self.index_writer, self.shards
        rows, self.space.foreign_bytes = recover(layout, index_writer.index, index_writer.write)
        shard_table.add(rows)
        self.meta = CacheMeta(layout, index_writer)
        self._note_reuse()
        self._committer = Committer(layout, index_writer, self.space)
        self.remover = ShardRemover(
            layout, index_writer, shard_table, self.space, self._config.resume_seconds
        )
        self.lease_table = self.remover.lease_table
        self.refetch_queue = self.remover.refetch_queue
        self.purger = Purger(layout, index_writer, shard_table, self.space, self.remover)
        self.space.admit()
        self.poll_leases(time.monotonic())
        self.maintain()

    def close(self) -> None:
        """Close the index and release the lock.

        If another folder took the place of this one, the index stays as after a crash, because
        closing it would remove the log of the other folder's index.
        """
        try:
            if self._directory.in_place:
                self.index_writer.index.close()
            else:
                self.index_writer.index.abandon()
            self._directory.close()
        finally:
            self._lock.close()

    def abandon(self) -> None:
        """Release a generation whose files are gone."""
        self.index_writer.index.abandon()
        self._directory.close()
        self._lock.close()

    def count_older(self) -> None:
        self.space.older_bytes = self.older.bytes

    def require_in_place(self, error: Exception | None = None) -> None:
        """Raise CacheGoneError if the directory, or a file in it, was moved or replaced."""
        self._directory.require(error)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- contents ---

    def record_bytes(self, schema: Schema, sample_bytes: float | None = None) -> int:
        """Return the bytes of one sample in a shard.

        ``sample_bytes`` is the mean of ragged samples.
        """
        values = schema.nbytes if sample_bytes is None else sample_bytes
        return int(CACHE_FORMATS[self._config.format].record_bytes(schema, values))

    def claim(self, parts: dict[str, Any]) -> None:
        """Claim the cache for these parts of a configuration, before the catalog is opened.

        A cache without samples that belongs to another configuration is emptied, including its
        catalog.

        Raises:
            FingerprintError: It has samples of another configuration.
        """
        if self.meta.claim(parts, self.totals()):
            self._start_afresh()

    def set_identity(self, identity: Identity) -> None:
        """Set the identity before the first permit.

        Raises:
            FingerprintError: The cache has other samples.
        """
        if self.meta.set_identity(identity, self.totals()):
            self._start_afresh()

    def _note_reuse(self) -> None:
        # Readers have no configuration, so they read this from the index.
        self.meta.set_reuse(self._config.max_reuse, self._config.on_max_reuse)
        self.meta.set_lease_bytes(self.space.budget.leases)

    def _start_afresh(self) -> None:
        self._note_reuse()
        self.shards.clear()
        self.shards.add(
            reconcile_rows(self.layout, self.index_writer.index, self.index_writer.write)
        )
        self.space.foreign_bytes = warn_of_foreign_files(self.layout)
        self._committer.start_afresh()
        self.remover.start_afresh()
        self.purger.start_afresh()

    def holes(self) -> list[KnownHole]:
        rows = [*self.shards.live.values(), *self.shards.retired.values()]
        return known_holes(self.layout, rows, self.index_writer.index.holes())

    def unfinished(self, groups: int, group_shards: int) -> list[int]:
        """Return the groups below ``groups`` with a shard that was never committed, ascending."""
        missing = self.index_writer.index.unknown(groups * group_shards)
        found = (
            range(r.start // group_shards, (r.stop - 1) // group_shards + 1) for r in missing
        )
        return list(dict.fromkeys(chain.from_iterable(found)))

    # --- bound ---

    @property
    def max_bytes(self) -> int:
        """The configured bound. A lower one takes effect as shards can be evicted."""
        return self.space.max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self.space.max_bytes = value
        self.meta.set_lease_bytes(self.space.budget.leases)
        self.maintain()

    @property
    def shrinking(self) -> bool:
        return self.space.in_force > self.space.max_bytes or self.space.left() < 0

    def adopt_settings(self, config: CacheConfig) -> None:
        self._config = config
        if int(config.max_bytes) != self.max_bytes:  # first, because it may cure a full disk
            self.max_bytes = int(config.max_bytes)
        self._note_reuse()

    @property
    def bytes_used(self) -> int:
        return self.space.used()

    def bytes_left(self) -> int:
        """Return the bytes that may still be used; negative while the cache shrinks."""
        return self.space.left()

    def bytes_left_for_shards(self) -> int:
        """Return `bytes_left` without `listing_ahead`."""
        return self.space.left_for_shards()

    def free_disk_ok(self) -> bool:
        free, total = free_disk_bytes(self.layout)
        return free >= min_free_bytes(self._config.min_free, total)

    def disk_holds_promises(self) -> bool:
        """Whether the disk has room for all reserved bytes, regardless of the bound."""
        return free_disk_bytes(self.layout)[0] >= self.space.reserved

    def disk_holds_a_lease(self) -> bool:
        """Whether the disk has room for the lease of a reader's next snapshot."""
        return free_disk_bytes(self.layout)[0] >= LEASE_BYTES

    def reserve(self, permit: str, nbytes: int) -> bool:
        return self.space.reserve(permit, nbytes)

    # --- incoming shards ---

    def discard(self, permit: str, numbers: Iterable[int]) -> None:
        """Remove the files of a permit whose sampler has ended."""
        discard_incoming(self.layout, permit, numbers)
        self.space.release(permit)

    def commit(self, permit: str, shards: Sequence[Sidecar]) -> list[ShardTableRow]:
        """Make written shards live, all or none; return the rows of the new ones.

        Shards that were committed before stay unchanged, because a group is filled again if one
        of its shards is missing. An evicted shard returns if a lease names its digest; with
        another digest its refetch is refused. After a CacheFullError the files are gone.
        """
        identity = self.meta.identity
        rows, merits = self._committer.commit(
            permit,
            shards,
            identity.fingerprint if identity else None,
            self.refetch_queue.pending,
        )
        self.shards.add(rows)
        self.remover.admit(rows)
        self.refetch_queue.shards_came()
        if merits.denied:
            holes = {s.number: [hole.reason for hole in s.holes] for s in shards}
            self.refetch_queue.refuse(
                {n: redrawn_differently_reason(n, holes[n]) for n in merits.denied}
            )
        return rows

    # --- outgoing shards ---

    @property
    def leases(self) -> list[LeaseView]:
        return self.lease_table.leases

    @property
    def clearing_bytes(self) -> int:
        """Bytes of retired shards that are deleted when readers finish their snapshots."""
        kept = self.lease_table.kept
        return sum(
            row.allocated for row in self.shards.retired.values() if row.number not in kept
        )

    def poll_leases(self, now: float) -> None:
        """Count uses of finished leases, and delete retired shards that no lease holds."""
        try:
            self.remover.poll(now)
        finally:  # a full disk must not keep a lowered bound from taking effect
            self.space.settle()

    def candidates(self) -> list[Candidate]:
        return self.remover.candidates()

    def retire(self, numbers: Iterable[int]) -> None:
        self.remover.retire(numbers)

    def evict(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return self.remover.evict(numbers)

    # --- refetched shards ---

    def never_committed(self, numbers: Sequence[int]) -> list[int]:
        known = self._committer.known(numbers)
        return [number for number in numbers if number not in known]

    def sizes(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return allocated bytes by shard, including evicted shards that the index knows."""
        remains = self.index_writer.index.remains(numbers)
        return {number: row.allocated for number, row in remains.items()}

    def lengths(self, numbers: Collection[int]) -> dict[int, int]:
        """Return the samples of committed shards, as far as index and leases know them."""
        remains = self.index_writer.index.remains(numbers)
        known = {number: row.samples for number, row in remains.items()}
        return self.refetch_queue.lengths(numbers) | known

    @property
    def returning_samples(self) -> int:
        """Samples of retired shards that return without their purged samples."""
        rows = map(self.shards.retired.get, self.remover.purging.rewrite)
        return sum(row.samples for row in rows if row is not None)

    # --- accounts ---

    def totals(self) -> CacheTotals:
        shard_table = self.shards
        return CacheTotals(
            shards=len(shard_table.live),
            samples=shard_table.live_samples,
            bytes=shard_table.live_bytes,
            retired_shards=len(shard_table.retired),
            retired_bytes=shard_table.retired_bytes,
            **self.index_writer.sums(),
        )

    def maintain(self) -> None:
        self.index_writer.maintain()

    def inherit_history(self) -> None:
        """Continue the history of the generation that this one replaces, which will be removed."""
        index = self.index_writer.index
        if self.older.caches and not index.history():
            rows = self.older.caches[-1].history()
            self.index_writer.write(lambda: index.insert_history(rows))

    def history(self) -> list[tuple[float, dict[str, Any]]]:
        return self.index_writer.index.history()
