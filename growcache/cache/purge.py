"""Purge: remove the samples of the objects in the purge list from all shards.

The list is durable before anything else happens, and the index has how much of it was applied.
So an interrupted purge continues at the next start. A shard with such samples is rewritten
without them, under its number. A refetch gives the same bytes, because it leaves out the same
objects:

    list → COMMIT retired → read the leases → row goes → unlink → rename → new row

A crash while a shard has no row loses the shard, and the next run draws it again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace

from growcache.cache.commit import install_shards, remove_failed_commit
from growcache.cache.files import CacheLayout, is_full_disk
from growcache.cache.folders import remove_shard
from growcache.cache.formats import open_shard
from growcache.cache.formats.encoding import EncodedFile
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.incoming import (
    bytes_to_reserve,
    discard_incoming,
    encode_shard,
    write_incoming,
)
from growcache.cache.index.schema import ShardTableRow
from growcache.cache.index.writer import IndexWriter
from growcache.cache.purge_list import PurgeList, is_purged, names_purged, read_purge_list
from growcache.cache.shard_removal import ShardRemover
from growcache.cache.shard_survey import row_from_sidecar
from growcache.cache.sidecar import EMPTY, Origins, Sidecar
from growcache.cache.space import ShardTable, SpaceAccount
from growcache.errors import CacheError, CacheFullError, CorruptShardError
from growcache.schema import Sample

IsPurged = Callable[[str], bool]  # of the key of a sample or a hole


def without_purged(
    sidecar: Sidecar, samples: Sequence[Sample] | MappedShard, test: IsPurged
) -> tuple[Sidecar, list[EncodedFile]]:
    """Return a shard without the purged objects, with the bytes of a refetch that leaves them out.

    May raise FormatError.
    """
    rows = list(sidecar.origins.rows())
    gone = {key for key in sidecar.origins.keys if test(key)}
    kept = [place for place, row in enumerate(rows) if row.key not in gone]
    packed = encode_shard(sidecar.cache_format, sidecar.schema, [samples[i] for i in kept])
    purged = replace(
        sidecar,
        origins=Origins.pack(rows[place] for place in kept),
        holes=tuple(hole for hole in sidecar.holes if not test(hole.key)),
        **packed.facts,
    )
    return purged, packed.files


class Purger:
    """Applies the purge list to the shards of a cache.

    Draws leave out the objects in ``list``.
    """

    def __init__(
        self,
        layout: CacheLayout,
        index_writer: IndexWriter,
        shard_table: ShardTable,
        space: SpaceAccount,
        remover: ShardRemover,
    ) -> None:
        self._layout = layout
        self._index_writer = index_writer
        self._shard_table = shard_table
        self._space = space
        self._remover = remover
        self.start_afresh()

    def start_afresh(self) -> None:
        self.list = PurgeList()
        self._new = PurgeList()  # added since the list was last applied
        self._file_size = 0
        self._unread: list[int] = []  # shards that may have samples of these
        self._remover.load_purging()
        self.look()

    # --- the list ---

    def look(self) -> bool:
        """Read the additions to the list; return whether there were any.

        May raise CacheError.
        """
        path = self._layout.purged
        size = path.stat().st_size if path.exists() else 0
        if size == self._file_size:
            return False
        found = read_purge_list(self._layout, self.list)
        self._file_size = size
        if found == self.list:
            return False
        self.list = found
        applied = PurgeList(size=self._remover.purging.size)
        self._new = read_purge_list(self._layout, applied)
        self._unread = [*self._shard_table.live, *self._shard_table.retired]
        # At once, so that a command sees the reaction.
        self._remover.write_purging(self._remover.purging)
        self._remover.refetch_queue.forget_reasons()
        return True

    def _forget_holes(self) -> None:
        index = self._index_writer.index
        if index.holes():
            index.forget_holes(is_purged(self._layout, self._new))

    def is_visit_purged(self, keys: Iterable[str]) -> bool:
        """Whether one of the objects of a visit is purged."""
        return self.list.holds(keys)

    # --- shards ---

    @property
    def busy(self) -> bool:
        """Whether `step` has work that need not wait for readers."""
        waits = self._remover.purging.numbers - self._remover.lease_table.living
        return bool(self._unread or waits) or self._remover.purging.size != self.list.size

    def step(self, until: float, *, rewrites: bool = True) -> list[int]:
        """Work for a while; return shards that are gone and must be drawn again.

        ``until`` is in monotonic seconds. At least one shard is read and one rewritten. Without
        ``rewrites``, shards are dropped instead.
        """
        self._retire(self._read_some(until), rewrites=rewrites)
        purging = self._remover.purging
        if not self._unread and purging.size != self.list.size:
            applied = replace(purging, size=self.list.size)
            self._remover.write_purging(applied, self._forget_holes)
            self._index_writer.index.checkpoint()  # the log still has the deleted rows
        return self._rewrite_some(until)

    def _read_some(self, until: float) -> list[int]:
        if not self._unread:
            return []
        among_new, found = is_purged(self._layout, self._new), list[int]()
        while self._unread:
            number = self._unread.pop()
            row = self._shard_table.get(number)
            if row is not None and self._names_purged(row, among_new):
                found.append(number)
            if time.monotonic() >= until:
                break
        return found

    def _names_purged(self, row: ShardTableRow, test: IsPurged) -> bool:
        sidecar = self._sidecar(row)
        return sidecar is None or names_purged(sidecar, test)

    def _sidecar(self, row: ShardTableRow) -> Sidecar | None:
        """Return the sidecar, or None if it is damaged or missing.

        The shard's content is then unknown.
        """
        path = self._layout.sidecar(row.number)
        try:
            return Sidecar.from_bytes(path.read_bytes(), str(path))
        except (CorruptShardError, FileNotFoundError):
            return None

    def _retire(self, numbers: Sequence[int], *, rewrites: bool) -> None:
        purging, live = self._remover.purging, self._shard_table.live
        rows = [live[number] for number in numbers if number in live]
        rewrite = purging.rewrite.union(row.number for row in rows) if rewrites else frozenset()
        drop = purging.numbers.union(numbers) - rewrite
        found = replace(purging, rewrite=rewrite, drop=drop)
        if found != purging:
            self._remover.retire_purged(rows, found)

    def _rewrite_some(self, until: float) -> list[int]:
        purging, retired = self._remover.purging, self._shard_table.retired
        if not purging.numbers:
            return []
        # Leases that were read after the shards were retired.
        self._remover.lease_table.refresh()
        self._remover.delete_unheld()
        done, lost = set(purging.numbers - retired.keys()), list[int]()
        waiting = sorted(purging.rewrite - done - self._remover.lease_table.living)
        try:
            for number in waiting:
                if not self._rewrite(retired[number]):
                    lost.append(number)
                done.add(number)
                if time.monotonic() >= until:
                    break
        finally:
            # The index may be behind for these, because none of their rows is retired.
            self._remover.finish_purging(done)
        if done:
            self._remover.write_purging(self._remover.purging)
            self._remover.came_back()
        if waiting:
            # Once, because with 10^5 shards it takes as long as many rewrites.
            self._shard_table.order()
        return lost

    def _rewrite(self, row: ShardTableRow) -> bool:
        """Replace a shard by one without purged samples; return False if that was impossible."""
        number, index = row.number, self._index_writer.index
        permit = f"{uuid.uuid4().hex[:8]}-{row.group:08d}-0-{uuid.uuid4().hex[:4]}"
        before = self._sidecar(row)
        made = self._made(row, before)
        written = self._write(permit, *made) if made else None
        empty_visits = before.counts.get(EMPTY, 0) if before else 0
        try:
            self._index_writer.write(lambda: index.take_out(row, empty_visits))
        except CacheFullError:  # retried with another permit
            if written:
                discard_incoming(self._layout, permit, [number])
                self._space.release(permit)
            raise
        remove_shard(self._layout, number)
        self._shard_table.remove([number])
        if made and not written:  # a full cache has room now
            written = self._write(permit, *made)
        return written is not None and self._install(permit, written, row)

    def _made(
        self, row: ShardTableRow, sidecar: Sidecar | None
    ) -> tuple[Sidecar, list[EncodedFile]] | None:
        """Return the new shard, or None if the old one is damaged."""
        if sidecar is None:
            return None
        facts = (row.number, sidecar.samples, sidecar.schema, sidecar.cache_format)
        test = is_purged(self._layout, self.list)
        try:
            with closing(open_shard(self._layout, *facts)) as shard:
                if sidecar.samples and shard.digest() != sidecar.digest:
                    return None
                return without_purged(sidecar, shard, test)
        except (CacheError, FileNotFoundError):
            return None

    def _write(
        self, permit: str, sidecar: Sidecar, files: Sequence[EncodedFile]
    ) -> Sidecar | None:
        if not self._space.reserve(permit, bytes_to_reserve(sidecar)):
            return None
        try:
            return write_incoming(self._layout, permit, sidecar, files)
        except OSError as error:
            self._space.release(permit)
            if not is_full_disk(error):
                raise
            return None

    def _install(self, permit: str, sidecar: Sidecar, before: ShardTableRow) -> bool:
        index, layout = self._index_writer.index, self._layout
        try:
            install_shards(layout, permit, [sidecar])
            row = row_from_sidecar(layout, sidecar, seq=before.seq, drawn_at=before.drawn_at)
            row = row._replace(uses=before.uses)
            self._index_writer.write(lambda: index.insert_shards([(row, sidecar)]))
        except CacheFullError:
            remove_failed_commit(layout, permit, [sidecar.number])
            return False
        finally:
            self._space.release(permit)
        self._shard_table.add([row])
        return True
