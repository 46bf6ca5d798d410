"""The writer's side of a cache directory: commit, bound, evict.

One `Cache` exists per directory (`supervisor.lock`), in one thread of the supervisor.
A crash between any two of its steps leaves litter, never a lie:

    commit:  temp → fsync → rename → fsync of the directory → INSERT
    evict:   COMMIT retired → read the leases → unlink what none holds → row says deleted
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from growcache.cache import ownership
from growcache.cache.ballast import Ballast, full_disk_named
from growcache.cache.commits import abandon, install, read_incoming, remove
from growcache.cache.eviction import Candidate
from growcache.cache.files import Layout, refuse_network, write_atomic
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.identity import Identity, read_identity
from growcache.cache.incoming import discard_incoming
from growcache.cache.index import Edition, Index, ShardRow, ShardState, Totals
from growcache.cache.leases import LeaseView, lease_path
from growcache.cache.locks import FileLock
from growcache.cache.opening import (
    is_initialised,
    mark_initialised,
    read_issued,
    restore,
    take_over,
)
from growcache.cache.readers import Readers
from growcache.cache.rebuild import row_of, write_editions
from growcache.cache.room import Room, free_disk_bytes, min_free_bytes
from growcache.cache.sidecar import Sidecar
from growcache.config import CacheConfig
from growcache.errors import CacheFullError, FingerprintError
from growcache.schema import Schema

POSTPONED_LEASES = 16
SAMPLE_ROW_BYTES = 40  # what a row per sample takes beside the text of its key


class Cache:
    """A cache directory, opened by its only writer. Not for use by several threads.

    Attributes:
        layout: where everything lies.
        identity: what the cache is of; None before the first sample was measured.
        issued: the highest group that a permit was ever issued for; -1 if none.
        complete: whether the whole population is cached.
    """

    def __init__(self, layout: Layout, config: CacheConfig, lock: FileLock) -> None:
        self.layout = layout
        self._room = Room(layout, int(config.max_bytes))
        self._config = config
        self._lock = lock
        self._ballast = Ballast(layout.ballast, self._room.budget.ballast)
        self._totals: Totals | None = None
        self._candidates: list[Candidate] | None = None
        self._index = self._open_index()
        try:
            self._load()
        except BaseException:
            self._index.close()
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
            CacheError: a network file system, or a path that cannot be written.
            CacheFullError: the disk has no room for an index.
        """
        layout = Layout(root)
        layout.create()
        if not config.allow_network_filesystem:
            refuse_network(layout.root)
        lock = take_over(layout, takeover_seconds)
        try:
            return cls(layout, config, lock)
        except BaseException:
            lock.close()
            raise

    def _open_index(self) -> Index:
        try:
            return Index.open(self.layout)
        except CacheFullError:
            if not self._ballast.drop():
                raise
            return Index.open(self.layout)

    def _load(self) -> None:
        index, layout = self._index, self.layout
        self._checkpointed = True
        rows, self._foreign_bytes = restore(layout, index, self._write)
        self._rows = {row.number: row for row in rows}
        self.identity = read_identity(layout.root)
        self.issued = read_issued(layout)
        self.complete = bool(index.meta("complete", False))
        self._population = (index.meta("population"), index.meta("population_samples"))
        self._editions = index.editions()
        self._next_seq = index.next_seq()
        self._readers = Readers(layout, self._config.resume_seconds, index.uses())
        self._finished = index.finished_leases()
        self._changed()
        self.poll_leases(time.monotonic())
        self.maintain()

    def close(self) -> None:
        """Close the index and let another service in; nothing temporary is left."""
        try:
            self._index.close()
        finally:
            self._lock.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the cache is of

    def record_bytes(self, schema: Schema) -> int:
        """Return the bytes that one sample of the schema takes in a shard."""
        return int(CACHE_FORMATS[self._config.format].layout(schema).record_bytes)

    def claim(self, parts: dict[str, Any]) -> None:
        """Say what is wanted, as far as the configuration tells, before the catalog is opened.

        A cache without samples of something else is emptied, its catalog included.

        Raises:
            FingerprintError: it has samples of something else.
        """
        drawn = self.totals().drawn
        if ownership.claim(self.layout, self._index, self.identity, parts, drawn):
            self._forget()

    def set_identity(self, identity: Identity) -> None:
        """Say what the cache is of, before the first permit.

        Raises:
            FingerprintError: it has samples of something else.
        """
        drawn = self.totals().drawn
        with full_disk_named(str(self.layout.identity)):
            settled = ownership.settle_identity(
                self.layout, self._index, self.identity, identity, drawn
            )
        if not is_initialised(self._index):  # it was emptied for this
            self._forget()
        self.identity = settled

    def _forget(self) -> None:
        """Follow what `ownership` did on disk: the cache is as good as new."""
        self.layout.editions.unlink(missing_ok=True)
        self._write(lambda: mark_initialised(self._index))
        self._rows, self._editions, self._population = {}, [], (None, None)
        self.identity, self.issued, self.complete, self._next_seq = None, -1, False, 0
        self._changed()

    @property
    def editions(self) -> list[Edition]:
        """The recorded editions, in order."""
        return list(self._editions)

    def add_edition(self, edition: Edition) -> None:
        """Record the next edition, durably; the listing it counts must be so already."""
        with full_disk_named(str(self.layout.editions)):
            write_editions(self.layout, [*self._editions, edition])
        self._write(lambda: self._index.insert_edition(edition))
        self._editions.append(edition)

    def issue(self, group: int) -> None:
        """Note, durably, that a permit for the group is about to be given out."""
        if group <= self.issued:
            return
        with full_disk_named(str(self.layout.issued)):
            write_atomic(self.layout.issued, f"{group}\n".encode())
        self.issued = group

    def unfinished(self, groups: int, group_shards: int) -> list[int]:
        """Return the groups below ``groups`` with a shard that was never committed."""
        stop = groups * group_shards
        missing = set(range(stop)) - self._index.known(0, stop)
        return sorted({number // group_shards for number in missing})

    def set_complete(self, complete: bool) -> None:
        """Say whether the whole population is cached."""
        if complete != self.complete:
            self._write(lambda: self._index.set_meta("complete", complete))
            self.complete = complete

    def set_population(self, parts: int | None, samples: float | None) -> None:
        """Say how large the source is, in parts and in samples (estimated)."""
        if (parts, samples) == self._population:
            return

        def note() -> None:
            self._index.set_meta("population", parts)
            self._index.set_meta("population_samples", samples)

        self._write(note)
        self._population = (parts, samples)

    # The bound

    @property
    def max_bytes(self) -> int:
        """The bound; lowering it takes effect as shards can go."""
        return self._room.max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._room.max_bytes = value
        self._ballast.size = self._room.budget.ballast
        self.maintain()

    @property
    def catalog_bytes(self) -> int:
        """What the local copy of the listing allocates; the supervisor keeps it current."""
        return self._room.catalog_bytes

    @catalog_bytes.setter
    def catalog_bytes(self, value: int) -> None:
        self._room.catalog_bytes = value

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
        """Return the bytes that may still be reserved; negative where the bound was lowered."""
        return self._room.left()

    def free_disk_ok(self) -> bool:
        """Whether the disk has its ``min_free``, whatever the bound says."""
        free, total = free_disk_bytes(self.layout)
        return free >= min_free_bytes(self._config.min_free, total)

    def reserve(self, permit: str, nbytes: int) -> bool:
        """Promise room to a permit, if there is that much; a second promise replaces the first."""
        return self._room.reserve(permit, nbytes)

    def unreserve(self, permit: str) -> None:
        """Take a promise back, when nothing of it is on the disk any more."""
        self._room.release(permit)

    def discard(self, permit: str, numbers: Iterable[int]) -> None:
        """Remove what the permit's sampler wrote (it must have ended), and unreserve."""
        discard_incoming(self.layout, permit, numbers)
        self.unreserve(permit)

    # Commit

    def incoming_path(self, permit: str, number: int, suffix: str) -> Path:
        """Return where a sampler writes a shard (suffix with its dot)."""
        return self.layout.incoming_path(permit, number, suffix)

    def commit(self, permit: str, shards: Sequence[Sidecar]) -> list[ShardRow]:
        """Make written shards live, all of them or none, and settle the permit's promise.

        Shards that were committed before are left as they are: a group is filled anew
        when one of its shards is missing.

        Returns:
            The rows of the new shards.

        Raises:
            CorruptShardError: the files are not what the descriptions say.
            FingerprintError: they are of another configuration.
            CacheFullError: no room on the disk to note it; the files are removed.
        """
        numbers = sorted(sidecar.number for sidecar in shards)
        known = self._index.known(numbers[0], numbers[-1] + 1) if numbers else set()
        fresh = [sidecar for sidecar in shards if sidecar.number not in known]
        try:
            self._refuse_others(fresh)
            for sidecar in fresh:
                read_incoming(self.layout, permit, sidecar.number)
            return self._make_live(permit, fresh)
        finally:
            self.discard(permit, numbers)

    def _refuse_others(self, sidecars: Iterable[Sidecar]) -> None:
        for sidecar in sidecars:
            if self.identity is None or sidecar.fingerprint != self.identity.fingerprint:
                raise FingerprintError(
                    f"shard {sidecar.number} was drawn by another configuration "
                    f"({sidecar.fingerprint}); restart the service"
                )

    def _make_live(self, permit: str, sidecars: Sequence[Sidecar]) -> list[ShardRow]:
        if not sidecars:
            return []
        now, layout = time.time(), self.layout
        try:
            with full_disk_named(str(layout.shards)):
                install(layout, permit, sidecars)
            rows = [
                row_of(layout, sidecar, seq=self._next_seq + i, drawn_at=now)
                for i, sidecar in enumerate(sidecars)
            ]
            self._insert(list(zip(rows, sidecars, strict=True)))
        except BaseException:
            abandon(layout, permit, [sidecar.number for sidecar in sidecars])
            raise
        self._next_seq += len(rows)
        self._rows.update((row.number, row) for row in rows)
        self._changed()
        return rows

    def _insert(self, shards: list[tuple[ShardRow, Sidecar]]) -> None:
        budget = self._room.budget
        grows = sum(_sample_rows_bytes(sidecar) for _, sidecar in shards)
        fits = grows <= budget.wal and self._index.pages_bytes() + grows <= budget.samples
        self._write(lambda: self._index.insert_shards(shards, with_samples=fits))

    # Readers and eviction

    @property
    def leases(self) -> list[LeaseView]:
        """The unfinished leases, as of the last poll or eviction."""
        return self._readers.leases

    def poll_leases(self, now: float) -> None:
        """Look at the leases: count the uses of finished ones, delete retired shards let go.

        Args:
            now: monotonic seconds.
        """
        before = self._readers.leases
        finished = self._readers.refresh(now)
        if self._readers.leases != before:
            self._candidates = None
        # A log that cannot be cut must grow slowly: then many leases make one transaction.
        if finished and (self._checkpointed or len(finished) >= POSTPONED_LEASES):
            self._count_uses(finished)
        self._delete_unheld()

    def _count_uses(self, finished: list[LeaseView]) -> None:
        # The names go into the transaction of the uses, so that a crash before the unlink
        # does not count them twice. They are forgotten once the files are gone.
        names = {lease.name for lease in finished}
        new = [lease for lease in finished if lease.name not in self._finished]
        gone = self._finished - names
        if new:

            def note() -> None:
                self._index.forget_leases(gone)
                counted = [(lease.name, lease.job, lease.used()) for lease in new]
                self._index.finish_leases(counted, time.time())

            self._write(note)
            self._finished = (self._finished - gone) | names
            for number in self._readers.count(new):
                if row := self._rows.get(number):
                    self._rows[number] = row._replace(uses=row.uses + 1)
        for name in names:
            lease_path(self.layout, name).unlink(missing_ok=True)
        self._changed()

    def candidates(self) -> list[Candidate]:
        """Return the live shards as the eviction policies see them, oldest first."""
        if self._candidates is None:
            self._candidates = self._readers.candidates(self._in(ShardState.LIVE))
        return self._candidates

    def retire(self, numbers: Iterable[int]) -> None:
        """Take live shards out of all new snapshots; they are deleted when let go."""
        wanted = set(numbers)
        rows = [row for row in self._in(ShardState.LIVE) if row.number in wanted]
        if not rows:
            return

        def note() -> None:
            self._index.set_state([row.number for row in rows], ShardState.RETIRED)
            samples = sum(row.samples for row in rows)
            self._index.add_totals(evicted_shards=len(rows), evicted_samples=samples)

        self._write(note)
        for row in rows:
            self._rows[row.number] = row._replace(state=ShardState.RETIRED)
        self._changed()

    def evict(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Retire live shards and delete, of all retired, what no reader holds.

        Returns:
            The shards that were deleted.
        """
        self.retire(numbers)
        # Leases that are found finished here are counted by the next poll.
        self._readers.refresh()
        self._candidates = None
        return self._delete_unheld()

    def _delete_unheld(self) -> tuple[int, ...]:
        """Delete retired shards, by leases that were read after they were retired."""
        held = self._readers.held()
        retired = [row.number for row in self._in(ShardState.RETIRED)]
        free = tuple(number for number in retired if number not in held)
        if not free:
            return ()
        for number in free:
            remove(self.layout, number)
            del self._rows[number]
        self._readers.forget(free)
        self._changed()
        self._write(lambda: self._index.set_state(free, ShardState.DELETED))
        return free

    # Accounts

    def _in(self, state: ShardState) -> list[ShardRow]:
        return [row for row in self._rows.values() if row.state == state]

    def _changed(self) -> None:
        self._totals = self._candidates = None
        self._room.recount(self._rows.values())
        self._room.shard_bytes += self._foreign_bytes

    def totals(self) -> Totals:
        """Return what the cache holds, and what it ever held."""
        if self._totals is None:
            live, retired = self._in(ShardState.LIVE), self._in(ShardState.RETIRED)
            self._totals = Totals(
                shards=len(live),
                samples=sum(row.samples for row in live),
                bytes=sum(row.allocated for row in live),
                retired_shards=len(retired),
                retired_bytes=sum(row.allocated for row in retired),
                **self._index.totals(),
            )
        return self._totals

    @property
    def index_ok(self) -> bool:
        """Whether the index keeps within its budget; else no permits may be given."""
        return self._checkpointed and self._pages_bytes <= self._room.budget.pages

    def maintain(self) -> None:
        """Keep index and log within their budget, and the ballast in place."""
        budget, index = self._room.budget, self._index
        self._checkpoint()
        if self._checkpointed:
            self._write(lambda: index.prune_deleted(budget.kept_deleted))
            if index.pages_bytes() > budget.pages:
                self._write(index.drop_samples)
        self._pages_bytes = index.pages_bytes()
        self._ballast.restore()

    def _checkpoint(self) -> None:
        if self._index.wal_bytes() > self._room.budget.wal or not self._checkpointed:
            self._checkpointed = self._index.checkpoint()

    def append_history(self, record: dict[str, Any]) -> None:
        """Add a JSON record to the cache's history, which is thinned as it grows."""
        keep = self._room.budget.kept_history
        if self._checkpointed:
            self._write(lambda: self._index.append_history(record, keep))

    def history(self) -> list[tuple[float, dict[str, Any]]]:
        """Return (wall time, record) in order."""
        return self._index.history()

    def _write(self, change: Callable[[], None]) -> None:
        """Change the index in one transaction, if need be in the ballast's room.

        Raises:
            CacheFullError: not even that was enough; nothing was changed.
        """
        self._checkpoint()
        try:
            self._transact(change)
        except CacheFullError:
            if not self._ballast.drop():
                raise
            self._transact(change)

    def _transact(self, change: Callable[[], None]) -> None:
        with self._index.transaction():
            change()


def _sample_rows_bytes(sidecar: Sidecar) -> int:
    longest = max(map(len, sidecar.origins.keys), default=0)
    etag = max((len(etag or "") for etag in sidecar.origins.etags), default=0)
    return sidecar.samples * (longest + etag + SAMPLE_ROW_BYTES)
