"""The supervisor's side of a cache directory: open, commit, evict.

One `Cache` exists per directory (`supervisor.lock`), in one thread of the supervisor. Each part
owns its state:

    ShardTable     the shards on disk, with their sums
    Space          the bound: bytes used, reserved and free
    IndexWriter    the index, kept within its budget, written on a full disk too
    CacheMeta      identity, editions, the highest group issued, completeness
    Committer      incoming files become live shards
    ShardRemover   reads the leases, retires live shards, deletes those that no lease holds

A crash between any two steps leaves litter, never a row without its files:

    commit:  temporary file → fsync → rename → fsync of the directory → INSERT
    evict:   COMMIT retired → read the leases → unlink what no lease holds → row says deleted
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from growcache.cache.commit import Committer
from growcache.cache.deferrals import Deferrals
from growcache.cache.directory import OpenDirectory, adopt, finish_clear, take_over
from growcache.cache.evict import ShardRemover
from growcache.cache.eviction import Candidate
from growcache.cache.files import CacheLayout, refuse_network
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.incoming import discard_incoming
from growcache.cache.index.schema import CacheTotals, ShardTableRow
from growcache.cache.index.writer import IndexWriter
from growcache.cache.lease_views import DeadReader, ForeignLease, LeaseView
from growcache.cache.locks import FileLock
from growcache.cache.meta import CacheMeta
from growcache.cache.reader_status import JobSums
from growcache.cache.recovery import reconcile_rows, recover, warn_of_foreign_files
from growcache.cache.refetch import redrawn_differently_reason
from growcache.cache.shard_table import KnownHole, ShardTable, known_holes
from growcache.cache.side_files import Edition, Identity
from growcache.cache.sidecar import Sidecar
from growcache.cache.space import LEASE_BYTES, Space, free_disk_bytes, min_free_bytes
from growcache.config import CacheConfig
from growcache.schema import Schema


class Cache:
    """A cache directory, opened by its only writer. Not for use by several threads.

    Attributes:
        layout: where everything lies.
    """

    def __init__(self, layout: CacheLayout, config: CacheConfig, lock: FileLock) -> None:
        self.layout = layout
        self._config = config
        self._lock = lock
        self._stock = ShardTable()
        self._room = Space(layout, int(config.max_bytes), self._stock)
        self._ledger = IndexWriter(layout, self._room)
        try:
            self._load()
            self._anchors = OpenDirectory(layout)
        except BaseException:
            self._ledger.close()
            raise

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        config: CacheConfig,
        *,
        takeover_seconds: float = 10.0,
    ) -> Cache:
        """Open or create the cache at ``root``, and put right what a crash left behind.

        Args:
            root: the directory.
            config: its bound and rules.
            takeover_seconds: how long to wait for the samplers of a service that died.

        Raises:
            CacheBusyError: another service, or what is left of one, owns it.
            CachePathError: a network file system, or a path that cannot be written.
            CacheFullError: the disk has no room for an index.
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
        layout, ledger, stock = self.layout, self._ledger, self._stock
        rows, self._room.foreign_bytes = recover(layout, ledger.index, ledger.write)
        stock.add(rows)
        self._facts = CacheMeta(layout, ledger)
        self._note_reuse()
        self._commits = Committer(layout, ledger, self._room)
        self._evictor = ShardRemover(
            layout, ledger, stock, self._room, self._config.resume_seconds
        )
        self._room.admit()
        self.poll_leases(time.monotonic())
        self.maintain()

    def close(self) -> None:
        """Close the index and let another service in; nothing temporary is left.

        Where another folder took the place of this one, the index is left as after a crash:
        to close it would remove the log of whatever index is there now.
        """
        try:
            if self._anchors.in_place:
                self._ledger.close()
            else:
                self._ledger.abandon()
            self._anchors.close()
        finally:
            self._lock.close()

    def require_in_place(self) -> None:
        """Check that the directory and what is held open in it are where they were.

        Raises:
            CacheGoneError: nobody else would see what is written from here on.
        """
        self._anchors.require()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the cache is of

    def record_bytes(self, schema: Schema, sample_bytes: float | None = None) -> int:
        """Return the bytes that one sample of the schema takes in a shard.

        Args:
            schema: of the samples.
            sample_bytes: of the values of a sample on average, where they differ.

        Raises:
            FormatError: the format cannot hold such samples.
        """
        values = schema.nbytes if sample_bytes is None else sample_bytes
        return int(CACHE_FORMATS[self._config.format].record_bytes(schema, values))

    def claim(self, parts: dict[str, Any]) -> None:
        """Say what is wanted, as far as the configuration tells, before the catalog is opened.

        A cache without samples of something else is emptied, its catalog included.

        Raises:
            FingerprintError: it has samples of something else.
        """
        if self._facts.claim(parts, self.totals().drawn):
            self._start_afresh()

    def set_identity(self, identity: Identity) -> None:
        """Say what the cache is of, before the first permit.

        Raises:
            FingerprintError: it has samples of something else.
        """
        if self._facts.set_identity(identity, self.totals().drawn):
            self._start_afresh()

    def _note_reuse(self) -> None:
        # Readers have no configuration; they go by the index.
        self._facts.set_reuse(self._config.max_reuse, self._config.on_max_reuse)
        self._facts.set_lease_bytes(self._room.budget.leases)

    def _start_afresh(self) -> None:
        self._note_reuse()
        self._stock.clear()
        self._stock.add(reconcile_rows(self.layout, self._ledger.index, self._ledger.write))
        self._room.foreign_bytes = warn_of_foreign_files(self.layout)
        self._commits.start_afresh()
        self._evictor.start_afresh()

    @property
    def identity(self) -> Identity | None:
        """What the cache is of; None before the first sample was measured."""
        return self._facts.identity

    @property
    def editions(self) -> list[Edition]:
        """The recorded editions, in order."""
        return list(self._facts.editions)

    def add_edition(self, edition: Edition) -> None:
        """Record the next edition, durably; the listing it counts must be so already."""
        self._facts.add_edition(edition)

    @property
    def deferrals(self) -> Deferrals:
        """Which visits were set aside, and which groups make up for them."""
        return self._facts.deferrals

    @property
    def most_deferred(self) -> int:
        """How many places `deferrals` may speak of."""
        return self._room.budget.deferred

    def set_deferrals(self, deferrals: Deferrals, *, retried: int = 0) -> None:
        """Record this durably, before the commit or the issue that relies on it.

        Args:
            deferrals: the record.
            retried: how many holes are none for now.

        Raises:
            CacheFullError: no room on the disk; the record is as it was.
        """
        self._facts.set_deferrals(deferrals, retried=retried)

    def holes(self) -> list[KnownHole]:
        """Return the visits without a sample that are known one by one."""
        rows = [*self._stock.live.values(), *self._stock.retired.values()]
        return known_holes(self.layout, rows, self._ledger.index.holes())

    @property
    def issued(self) -> int:
        """The highest group that a permit was ever issued for; -1 if none."""
        return self._facts.issued

    def issue(self, group: int) -> None:
        """Note, durably, that a permit for the group is about to be given out."""
        self._facts.issue(group)

    def unfinished(self, groups: int, group_shards: int) -> list[int]:
        """Return the groups below ``groups`` with a shard that was never committed."""
        stop = groups * group_shards
        missing = set(range(stop)) - self._ledger.index.known(0, stop)
        return sorted({number // group_shards for number in missing})

    @property
    def complete(self) -> bool:
        """Whether the whole population is cached."""
        return self._facts.complete

    def set_complete(self, complete: bool) -> None:
        """Say whether the whole population is cached."""
        self._facts.set_complete(complete)

    def set_population(self, parts: int | None, samples: float | None) -> None:
        """Say how large the source is, in parts and in samples (estimated)."""
        self._facts.set_population(parts, samples)

    # The bound

    @property
    def max_bytes(self) -> int:
        """The bound that is wanted; lowering it takes effect as shards can go."""
        return self._room.max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._room.max_bytes = value
        self._facts.set_lease_bytes(self._room.budget.leases)
        self.maintain()

    @property
    def bound_in_force(self) -> int:
        """The bound that holds now; an earlier, larger one while the cache shrinks."""
        return self._room.in_force

    @property
    def shrinking(self) -> bool:
        """Whether more is used or promised than `max_bytes` allows."""
        return self._room.in_force > self._room.max_bytes or self._room.left() < 0

    def follow(self, config: CacheConfig) -> None:
        """Go by these settings from now on: ``max_bytes``, ``min_free`` and ``max_reuse``."""
        self._config = config
        if int(config.max_bytes) != self.max_bytes:  # first: it may be the cure of a full disk
            self.max_bytes = int(config.max_bytes)
        self._note_reuse()

    @property
    def catalog_bytes(self) -> int:
        """What the local copy of the listing allocates; the supervisor keeps it current."""
        return self._room.catalog_bytes

    @catalog_bytes.setter
    def catalog_bytes(self, value: int) -> None:
        self._room.catalog_bytes = value

    @property
    def listing_ahead(self) -> int:
        """What shards leave free for the rest of the listing; the supervisor sets it."""
        return self._room.listing_ahead

    @listing_ahead.setter
    def listing_ahead(self, value: int) -> None:
        self._room.listing_ahead = value

    @property
    def budget_bytes(self) -> int:
        """The part of the bound that is not for shards."""
        return self._room.budget.total

    @property
    def bytes_used(self) -> int:
        """What counts against the bound: shards, catalog and the fixed budget."""
        return self._room.used()

    @property
    def bytes_reserved(self) -> int:
        """What is promised to samplers that are writing."""
        return self._room.reserved

    def room(self) -> int:
        """Return the bytes that may still be used; negative where the bound was lowered."""
        return self._room.left()

    def room_for_shards(self) -> int:
        """Return the bytes that may still be reserved: all but what the listing is to have."""
        return self._room.left_for_shards()

    def free_disk_ok(self) -> bool:
        """Whether the disk has its ``min_free``, whatever the bound says."""
        free, total = free_disk_bytes(self.layout)
        return free >= min_free_bytes(self._config.min_free, total)

    def disk_holds_promises(self) -> bool:
        """Whether the disk has room for all that is promised, whatever the bound says."""
        return free_disk_bytes(self.layout)[0] >= self.bytes_reserved

    def disk_holds_a_lease(self) -> bool:
        """Whether the disk has the little room that a reader's next snapshot takes."""
        return free_disk_bytes(self.layout)[0] >= LEASE_BYTES

    def reserve(self, permit: str, nbytes: int) -> bool:
        """Promise room to a permit, if there is that much; a second promise replaces the first."""
        return self._room.reserve(permit, nbytes)

    def unreserve(self, permit: str) -> None:
        """Take a promise back, when nothing of it is on the disk any more."""
        self._room.release(permit)

    # Shards come

    def incoming_path(self, permit: str, number: int, suffix: str) -> Path:
        """Return where a sampler writes a shard (suffix with its dot)."""
        return self.layout.incoming_path(permit, number, suffix)

    def discard(self, permit: str, numbers: Iterable[int]) -> None:
        """Remove what the permit's sampler wrote (it must have ended), and unreserve."""
        discard_incoming(self.layout, permit, numbers)
        self._room.release(permit)

    def commit(self, permit: str, shards: Sequence[Sidecar]) -> list[ShardTableRow]:
        """Make written shards live, all of them or none, and settle the permit's promise.

        Shards that were committed before are left as they are: a group is filled anew when
        one of its shards is missing. But those that had left the cache come back, where
        they are what a lease wishes for; where they are not, the wish is refused.

        Returns:
            The rows of the new shards.

        Raises:
            CorruptShardError: the files are not what the descriptions say.
            FingerprintError: they are of another configuration.
            CacheFullError: no room on the disk to note it; the files are removed.
        """
        identity = self._facts.identity
        rows, merits = self._commits.commit(
            permit, shards, identity.fingerprint if identity else None, self.wishes
        )
        self._stock.add(rows)
        self._evictor.admit(rows)
        self._evictor.wishlist.shards_came()
        if merits.denied:
            holes = {s.number: [hole.reason for hole in s.holes] for s in shards}
            self.refuse_wishes(
                {n: redrawn_differently_reason(n, holes[n]) for n in merits.denied}
            )
        return rows

    # Shards go

    @property
    def leases(self) -> list[LeaseView]:
        """The unfinished leases, as of the last poll or eviction."""
        return self._evictor.leases

    @property
    def kept(self) -> frozenset[int]:
        """Shards that readers who died hold; none goes before ``resume_seconds`` are over."""
        return self._evictor.kept

    @property
    def kept_for(self) -> list[DeadReader]:
        """What is kept for which reader that died, and for how long."""
        return self._evictor.kept_for

    @property
    def foreign_leases(self) -> list[ForeignLease]:
        """What lies among the leases and cannot be read; it may protect everything."""
        return self._evictor.foreign

    @property
    def job_sums(self) -> dict[str, JobSums]:
        """What each job received under leases that are finished."""
        return self._evictor.jobs

    @property
    def clearing_bytes(self) -> int:
        """Bytes of retired shards that go as readers end what they are at."""
        kept = self._evictor.kept
        return sum(
            row.allocated for row in self._stock.retired.values() if row.number not in kept
        )

    def poll_leases(self, now: float) -> None:
        """Look at the leases: count the uses of finished ones, delete retired shards let go.

        Args:
            now: monotonic seconds.
        """
        self._evictor.poll(now)
        self._room.settle()

    def candidates(self) -> list[Candidate]:
        """Return the live shards as the eviction policies see them, oldest first."""
        return self._evictor.candidates()

    def retire(self, numbers: Iterable[int]) -> None:
        """Take live shards out of all new snapshots; they are deleted when let go."""
        self._evictor.retire(numbers)

    def evict(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Retire live shards and delete, of all retired, what no reader holds.

        Returns:
            The shards that were deleted.
        """
        return self._evictor.evict(numbers)

    # Shards that are wished for

    @property
    def wishes(self) -> Mapping[int, str]:
        """Digests of the shards to be drawn again, by number, in the order to do so."""
        return self._evictor.wishlist.pending

    @property
    def wanted(self) -> frozenset[int]:
        """The shards that readers wish for and have not read yet; they are not retired."""
        return self._evictor.wishlist.wanted

    def refuse_wishes(self, reasons: Mapping[int, str]) -> None:
        """Say, by shard number, why a wish is never granted."""
        self._evictor.wishlist.refuse(reasons)

    def never_committed(self, numbers: Sequence[int]) -> list[int]:
        """Return those of a group's ascending shard numbers that were never committed."""
        known = self._commits.known(numbers)
        return [number for number in numbers if number not in known]

    def sizes(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the allocated bytes of shards, also of those that left, as far as known."""
        remains = self._ledger.index.remains(numbers)
        return {number: row.allocated for number, row in remains.items()}

    # Accounts

    def totals(self) -> CacheTotals:
        """Return what the cache holds, and what it ever held."""
        stock = self._stock
        return CacheTotals(
            shards=len(stock.live),
            samples=stock.live_samples,
            bytes=stock.live_bytes,
            retired_shards=len(stock.retired),
            retired_bytes=stock.retired_bytes,
            **self._ledger.sums(),
        )

    @property
    def index_ok(self) -> bool:
        """Whether the index keeps within its budget; else no permits may be given."""
        return self._ledger.ok

    def maintain(self) -> None:
        """Keep index and log within their budget, and the ballast in place."""
        self._ledger.maintain()

    def append_history(self, record: dict[str, Any]) -> None:
        """Add a JSON record to the cache's history, which is thinned as it grows."""
        self._ledger.append_history(record)

    def history(self) -> list[tuple[float, dict[str, Any]]]:
        """Return (wall time, record) in order."""
        return self._ledger.index.history()
