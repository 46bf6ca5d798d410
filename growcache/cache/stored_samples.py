"""Single samples of a cache, for those who look at them. No lease is taken, so a shard may be evicted meanwhile."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from growcache.cache.files import CacheLayout
from growcache.cache.formats import open_shard, shard_path
from growcache.cache.index.reader import IndexView
from growcache.cache.index.schema import ShardRow
from growcache.cache.purge_list import is_purged
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError, PurgedSampleError
from growcache.schema import Origin, Sample


@dataclass(frozen=True, slots=True)
class StoredSample:
    shard: int
    i: int
    sidecar: Sidecar
    sample: Sample

    @property
    def origin(self) -> Origin:
        return self.sidecar.origin(self.i)


def read_stored_sample(layout: CacheLayout, row: ShardRow, i: int) -> StoredSample:
    """Return a sample. PurgedSampleError: it is being removed. CorruptShardError, FileNotFoundError."""
    path = layout.sidecar(row.number)
    sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    if is_purged(layout)(sidecar.origin(i).key):
        raise PurgedSampleError(
            f"the object of sample {row.number}:{i} is purged, and the sample is being removed; see "
            f"what holds it: growcache purge {shlex.quote(str(layout.root))}"
        )
    mapped = open_shard(
        layout, row.number, sidecar.samples, sidecar.schema, sidecar.cache_format
    )
    try:
        return StoredSample(row.number, i, sidecar, mapped[i])
    finally:
        mapped.close()


def samples_spread_over(
    layout: CacheLayout, view: IndexView, count: int, turn: int = 0
) -> Iterator[StoredSample]:
    """Yield samples of shards that are spread evenly over the cache; each ``turn`` gives others."""
    rows = sorted((r for r in view.shards if r.samples), key=lambda row: row.number)
    count = min(count, len(rows))
    for k in range(count):
        row = rows[(k * len(rows) // count + turn) % len(rows)]
        try:
            yield read_stored_sample(layout, row, turn % row.samples)
        except PurgedSampleError:
            continue
        except (FileNotFoundError, CorruptShardError):
            if shard_path(layout, row.number, view.cache_format).exists():
                raise
            # evicted since the index was read
