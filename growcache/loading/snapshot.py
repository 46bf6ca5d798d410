"""An immutable list of a cache's live shards, protected from eviction by a lease."""

from __future__ import annotations

import operator
import os
import weakref
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from growcache.cache.files import CacheLayout
from growcache.cache.formats import shard_files, shard_path
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.index.reader import IndexView, live_digests, max_lease_bytes, read_index
from growcache.cache.index.schema import ShardRow
from growcache.cache.lease_views import LeaseCounters, LeaseView, RankNote
from growcache.cache.reader_lease import Lease
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CacheMissingError, CorruptShardError
from growcache.loading.maps import MapPool, ShardKey, Verify, resident_share, shard_key
from growcache.schema import Origin, Sample, Schema


def mean_sample_bytes(schema: Schema, shards: Sequence[ShardRow]) -> int:
    if not schema.is_ragged:
        return schema.nbytes
    samples = sum(row.samples for row in shards)
    return sum(row.shard_bytes for row in shards) // max(1, samples)


class Snapshot:
    """The samples that a cache holds at one moment, protected from eviction until `close`.

    A sequence and a context manager. ``len(snapshot)`` counts the samples, and ``snapshot[i]``
    is sample i as a dict of field name to array; its arrays are copies. Samples are ordered by
    shard, oldest first.

    Attributes:
        schema: Schema of every sample.
        shards: Rows of the index for the shards with samples, oldest first.
        view: The index as it was when the snapshot was taken.
        shard_bytes: Size of all shards together, in bytes.
        lease: The lease that protects the shards. A reader that opens the files itself records
            its use there.

    Example::

        import growcache

        with growcache.Snapshot.take("/data/cache") as snapshot:
            sample, origin = snapshot[0], snapshot.origin(0)
    """

    def __init__(
        self,
        layout: CacheLayout,
        view: IndexView,
        shards: Iterable[ShardRow],
        lease: Lease,
        *,
        job: str = "default",
        verify: Verify = "first",
    ) -> None:
        if view.schema is None:
            raise _no_schema_error(layout, view)
        self.schema: Schema = view.schema
        self.shards = tuple(shards)
        self.shard_bytes = sum(row.shard_bytes for row in self.shards)
        self.view = view
        self._layout = layout
        self.lease = lease
        self._job = job
        self._verify = verify
        self._ends = list(accumulate(row.samples for row in self.shards))
        self._rows = {row.number: row for row in self.shards}
        self._sidecars: dict[int, Sidecar] = {}
        self._read: set[int] = set()
        self._begun: set[int] = set()
        self._maps = MapPool.of(layout.root)
        keys = [shard_key(row) for row in self.shards]
        self._maps.hold(keys)
        self._finalizer = weakref.finalize(self, _release_snapshot, self._maps, keys, lease)

    @classmethod
    def take(
        cls,
        path: str | os.PathLike[str],
        *,
        job: str = "default",
        verify: Verify = "first",
        only: Mapping[int, str] | None = None,
        ranks: RankNote | None = None,
        without: Container[int] = (),
        view: IndexView | None = None,
    ) -> Snapshot:
        """Lease the shards that are cached now.

        Args:
            path: Path of the cache directory.
            job: Name under which uses are counted.
            verify: ``"first"`` checks a shard when this process first maps it, ``"always"``
                before each use.
            only: Digests, by number, of the shards to take. None takes all. ``{row.number:
                row.digest for row in snapshot.shards}`` takes the shards of another snapshot.
            ranks: Note in the lease for the other ranks of the job. The lease is then not
                settled.
            without: Numbers of shards to leave out.
            view: The index, if the caller has just read it. None reads it.

        Returns:
            The snapshot; close it after use.

        Raises:
            CacheMissingError: No cache is at the path, or it has no samples yet.
            CacheError: A shard of ``only`` is not in the cache, or has another digest.
        """
        layout = CacheLayout(path)
        if view and view.root and not _is_same_folder(view.root, layout.root):
            # The path led to one generation when the index was read, and now leads to the next.
            raise CacheMissingError(f"the cache at {layout.directory} was replaced meanwhile")
        view = view or read_index(layout.root)
        if view.schema is None:
            raise _no_schema_error(layout, view)
        wanted = [
            row
            for row in view.shards
            if row.samples and row.number not in without and _is_wanted(only, row)
        ]
        lease = Lease.create(
            layout.root,
            job,
            [row.number for row in wanted],
            ranks=ranks,
            max_bytes=max_lease_bytes(view),
            counters=LeaseCounters(counts=True),
        )
        try:
            # Only shards that are still live after the lease is visible are safe, because the
            # supervisor first retires shards and then reads the leases. A number may belong to
            # another shard meanwhile, because a purge rewrites shards.
            live = live_digests(layout.root)
            found = [row for row in wanted if live.get(row.number) == row.digest]
            if len(found) < len(wanted):
                kept = {row.number for row in found}
                lease.drop([row.number for row in wanted if row.number not in kept])
            if only is not None and len(found) < len(only):
                raise CacheError(
                    f"{len(only) - len(found)} of {len(only)} requested shards are no longer "
                    f"in the cache {layout.directory}; take the shards that it has",
                    code="GC605",
                )
            if ranks is None:  # else `settle` announces the final list to the other ranks
                lease.settle()
            return cls(layout, view, found, lease, job=job, verify=verify)
        except BaseException:
            lease.close()
            raise

    @classmethod
    def copy(
        cls,
        path: str | os.PathLike[str],
        lease: LeaseView,
        *,
        job: str,
        verify: Verify,
        ranks: RankNote | None = None,
    ) -> Snapshot:
        """Take the shards of another reader's settled lease, including retired ones.

        The snapshot is valid only if that lease is still open afterwards, which the caller must
        check.

        Raises:
            CacheError: The index no longer knows one of the shards.
        """
        layout = CacheLayout(path)
        view = read_index(layout.root, retired=True)
        numbers = set(lease.kept())
        rows = [row for row in (*view.shards, *view.retired) if row.number in numbers]
        if len(rows) < len(numbers):
            gone = min(numbers - {row.number for row in rows})
            raise CacheError(
                f"shard {gone} of the snapshot of pid {lease.pid} is no longer in the index of "
                f"{layout.directory}; iterate again on all ranks",
                code="GC613",
            )
        rows.sort(key=operator.attrgetter("seq"))
        own = Lease.create(
            layout.root,
            job,
            numbers,
            ranks=ranks,
            max_bytes=max_lease_bytes(view),
            counters=LeaseCounters(counts=True),
        )
        try:
            return cls(layout, view, rows, own, job=job, verify=verify)
        except BaseException:
            own.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # A lease belongs to its process, so the pickle holds the arguments of `take`.
        if self.closed:
            raise TypeError("a closed snapshot cannot be pickled: its shards may be gone")
        shards = {row.number: row.digest for row in self.shards}
        return _unpickle_snapshot, (
            self._layout.root.absolute(),
            self._job,
            self._verify,
            shards,
        )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def has(self, number: int) -> bool:
        return number in self._rows

    def __getitem__(self, i: int) -> Sample:
        """Return sample ``i``; CorruptShardError if its shard is damaged."""
        row, place = self._locate(i)
        sample: Sample = self.mapped(row.number)[place]
        self.mark_read([row.number])
        self.lease.count(1)
        return sample

    @property
    def sample_bytes(self) -> int:
        """Mean size of a sample in bytes; with ragged fields including the format's overhead."""
        return mean_sample_bytes(self.schema, self.shards)

    def origin(self, i: int) -> Origin:
        """Return the object, version and rows of sample ``i``.

        Raises:
            CorruptShardError: The sidecar of its shard is missing or damaged.
        """
        row, place = self._locate(i)
        return self.sidecar(row.number).origin(place)

    def sidecar(self, number: int) -> Sidecar:
        """Return the shard's sidecar, which is kept in memory until a window leaves the shard."""
        found = self._sidecars.get(number)  # a window may drop it meanwhile
        if found is None:
            path = self._layout.sidecar(number)
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                raise CorruptShardError(f"{path} is missing; run growcache check") from None
            found = self._sidecars[number] = Sidecar.from_bytes(data, str(path))
        return found

    def mapped(self, number: int) -> MappedShard:
        """Return a checked, mapped shard; closing the snapshot unmaps it."""
        self._refuse_closed()
        row = self._rows[number]
        return self._maps.open(row, self.schema, self.view.cache_format, self._verify)

    def mark_corrupt(self, number: int) -> None:
        self._maps.mark_corrupt(self._rows[number], self.view.cache_format)

    def enter(self, numbers: Iterable[int]) -> None:
        self._maps.enter(self._keys(numbers))

    def leave(self, numbers: Iterable[int]) -> None:
        """Undo one `enter`.

        If the cache is larger than memory, most shards then leave memory.
        """
        left = [number for number in numbers if number in self._rows]
        for number in left:  # the sidecars of millions of samples would take gigabytes
            self._sidecars.pop(number, None)
        window_bytes = sum(self._rows[number].shard_bytes for number in left)
        share = resident_share(self.shard_bytes, self._maps.available_bytes(), window_bytes)
        self._maps.leave(self._keys(left), self.view.cache_format, share)

    def _keys(self, numbers: Iterable[int]) -> list[ShardKey]:
        return [shard_key(self._rows[number]) for number in numbers if number in self._rows]

    def is_whole(self, number: int) -> bool:
        """Whether a shard's files are as they were written, checked without mapping them."""
        self._refuse_closed()
        view = self.view
        try:
            self._maps.verify(self._rows[number], self.schema, view.cache_format, self._verify)
        except CorruptShardError:
            return False
        return True

    def _refuse_closed(self) -> None:
        if self.closed:
            raise CacheError(
                "this snapshot is closed, and its shards may be gone; read samples before its "
                "`with` block ends, or take another snapshot",
                code="GC613",
            )

    def file(self, number: int) -> Path:
        """Return the path of a shard, which is a file or a directory of files."""
        return shard_path(self._layout, number, self.view.cache_format)

    def files(self, number: int) -> list[Path]:
        return shard_files(self._layout, number, self.view.cache_format)

    def counted(self, numbers: Iterable[int]) -> None:
        """Do not count uses of these shards, because an earlier snapshot counted them."""
        self._read.update(numbers)

    def mark_begun(self, numbers: Iterable[int]) -> None:
        """Count a use of these shards (once per snapshot) before all of their samples are read."""
        if new := set(numbers) - self._read:
            self._read |= new
            self._begun |= new
            self.lease.mark_begun(*new)

    def finish(self, numbers: Iterable[int]) -> None:
        if done := self._begun.intersection(numbers):
            self._begun -= done
            self.lease.mark_read(*done, mapped=True)

    def mark_read(self, numbers: Iterable[int]) -> None:
        """Count a use of these shards (once per snapshot)."""
        if new := set(numbers) - self._read:
            self._read |= new
            self.lease.mark_read(*new, mapped=True)

    def close(self) -> None:
        """Release the shards, which may then be evicted. A second call does nothing."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return (
            f"<Snapshot of {self._layout.root}: {len(self)} samples in "
            f"{len(self.shards)} shards, {state}>"
        )

    def _locate(self, i: int) -> tuple[ShardRow, int]:
        index = i + len(self) if i < 0 else i
        if not 0 <= index < len(self):
            raise IndexError(f"sample {i} of a snapshot of {len(self)} samples")
        place = bisect_right(self._ends, index)
        row = self.shards[place]
        return row, index - self._ends[place] + row.samples


def _unpickle_snapshot(
    root: Path, job: str, verify: Verify, shards: Mapping[int, str]
) -> Snapshot:  # called by pickle
    return Snapshot.take(root, job=job, verify=verify, only=shards)


def _is_wanted(only: Mapping[int, str] | None, row: ShardRow) -> bool:
    return only is None or only.get(row.number) == row.digest


def _release_snapshot(maps: MapPool, keys: list[ShardKey], lease: Lease) -> None:
    # In this order: a file that is unlinked while it is mapped frees no space.
    maps.release(keys)
    lease.close()


def _no_schema_error(layout: CacheLayout, view: IndexView) -> CacheMissingError:
    if view.totals.samples:
        return CacheMissingError(
            f"{layout.identity} is missing; repair it with: growcache check {layout.root} --repair"
        )
    return CacheMissingError(
        f"the cache at {layout.directory} has no samples yet; wait for them with "
        "growcache.loading.waiting.wait_for_samples, or use a loader, which waits",
        code="GC402",
    )


def _is_same_folder(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False
