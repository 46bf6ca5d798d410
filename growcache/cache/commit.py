"""Commit shards, in an order that a crash may interrupt anywhere.

written and fsynced under the permit's name → renamed → directory fsynced → row
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from growcache.cache.files import SIDECAR, CacheLayout, naming_full_disk
from growcache.cache.folders import open_folder, remove_shard
from growcache.cache.incoming import discard_incoming
from growcache.cache.index.schema import ShardTableRow
from growcache.cache.index.writer import IndexWriter
from growcache.cache.shard_refetches import WrittenShards, judge_written
from growcache.cache.shard_survey import row_from_sidecar
from growcache.cache.sidecar import Sidecar
from growcache.cache.space import SpaceAccount
from growcache.errors import CorruptShardError, FingerprintError, IndexInDoubtError


class Committer:
    def __init__(
        self, layout: CacheLayout, index_writer: IndexWriter, space: SpaceAccount
    ) -> None:
        self._layout = layout
        self._index_writer = index_writer
        self._space = space
        self._next_seq = index_writer.index.next_seq()

    def start_afresh(self) -> None:
        """Continue the numbers of commits from the index after the cache was emptied."""
        self._next_seq = self._index_writer.index.next_seq()

    def commit(
        self,
        permit: str,
        shards: Sequence[Sidecar],
        fingerprint: str | None,
        wishes: Mapping[int, str],
    ) -> tuple[list[ShardTableRow], WrittenShards]:
        """Make written shards live, all or none.

        ``wishes`` has digests of evicted shards to refetch.
        """
        numbers = sorted(sidecar.number for sidecar in shards)
        known = self.known(numbers)
        merits = judge_written({s.number: s.digest for s in shards}, known, wishes)
        taken = [s for s in shards if s.number in merits.fresh or s.number in merits.returned]
        try:
            _refuse_other_fingerprints(taken, fingerprint)
            for sidecar in taken:
                _require_written(self._layout, permit, sidecar)
            return self._make_live(permit, taken, merits.returned), merits
        finally:
            discard_incoming(self._layout, permit, numbers)
            self._space.release(permit)

    def known(self, numbers: Sequence[int]) -> set[int]:
        index = self._index_writer.index
        return index.known(numbers) if numbers else set()

    def _make_live(
        self, permit: str, sidecars: Sequence[Sidecar], returned: Collection[int]
    ) -> list[ShardTableRow]:
        if not sidecars:
            return []
        now, layout = time.time(), self._layout
        try:
            with naming_full_disk(str(layout.shards)):
                install_shards(layout, permit, sidecars)
            rows = [
                row_from_sidecar(layout, sidecar, seq=self._next_seq + i, drawn_at=now)
                for i, sidecar in enumerate(sidecars)
            ]
            self._insert(list(zip(rows, sidecars, strict=True)), returned)
        except IndexInDoubtError:
            raise  # a row that may exist needs its files; the next start finds out
        except BaseException:
            remove_failed_commit(layout, permit, [sidecar.number for sidecar in sidecars])
            raise
        self._next_seq += len(rows)
        return rows

    def _insert(
        self, shards: list[tuple[ShardTableRow, Sidecar]], returned: Collection[int]
    ) -> None:
        index = self._index_writer.index
        back = [row for row, _ in shards if row.number in returned]
        new = [pair for pair in shards if pair[0].number not in returned]

        def insert() -> None:
            index.return_shards(back)
            index.insert_shards(new)

        self._index_writer.write(insert)


def _refuse_other_fingerprints(sidecars: Iterable[Sidecar], fingerprint: str | None) -> None:
    for sidecar in sidecars:
        if sidecar.fingerprint != fingerprint:
            raise FingerprintError(
                f"shard {sidecar.number} was drawn with another configuration "
                f"({sidecar.fingerprint}); restart the service"
            )


def _require_written(layout: CacheLayout, permit: str, sidecar: Sidecar) -> None:
    number, suffixes = sidecar.number, [file.suffix for file in sidecar.files]
    paths = [layout.incoming_path(permit, number, suffix) for suffix in (SIDECAR, *suffixes)]
    try:
        _, *sizes = [path.stat().st_size for path in paths]
    except FileNotFoundError as error:
        raise CorruptShardError(
            f"{error.filename}: the sampler did not write it, or it was removed while the "
            "service ran"
        ) from None
    found = sum(sizes)
    if sizes != [file.nbytes for file in sidecar.files] or found != sidecar.shard_bytes:
        raise CorruptShardError(
            f"{paths[0]}: expected shard {number} of {sidecar.shard_bytes} bytes, found {found}"
        )


def install_shards(layout: CacheLayout, permit: str, sidecars: Sequence[Sidecar]) -> None:
    """Rename the permit's files to their final names, durably.

    The sidecar is renamed first, so that samples never lack it. A directory of arrays is
    renamed as a whole, because its files were written and synced inside it.
    """
    with open_folder(layout.incoming) as incoming, open_folder(layout.shards) as shards:
        for sidecar in sidecars:
            number = sidecar.number
            remove_shard(layout, number)  # left by a crash between rename and row
            parts = dict.fromkeys(file.suffix.partition("/")[0] for file in sidecar.files)
            for part in (SIDECAR, *reversed(parts)):
                before = layout.incoming_path(permit, number, part).name
                after = layout.shard(number, part).name
                os.rename(before, after, src_dir_fd=incoming, dst_dir_fd=shards)
        os.fsync(shards)


def remove_failed_commit(layout: CacheLayout, permit: str, numbers: Sequence[int]) -> None:
    discard_incoming(layout, permit, numbers)
    for number in numbers:
        remove_shard(layout, number)
