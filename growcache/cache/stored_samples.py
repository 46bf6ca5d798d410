"""Single samples of a cache, for inspection.

No lease is taken, so a shard may be evicted meanwhile.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from growcache.cache.files import CacheLayout
from growcache.cache.formats import open_shard, shard_path
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


def read_stored_sample(layout: CacheLayout, shard: int, i: int) -> StoredSample:
    """Return a sample.

    Raises:
        PurgedSampleError: The sample is being removed.
        CorruptShardError: Its shard is damaged.
        FileNotFoundError: Its shard was evicted.
    """
    path = layout.sidecar(shard)
    sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    if is_purged(layout)(sidecar.origin(i).key):
        raise PurgedSampleError(
            f"the object of sample {shard}:{i} is purged, and the sample is being removed; see "
            f"what holds it: growcache purge {shlex.quote(str(layout.root))}"
        )
    mapped = open_shard(layout, shard, sidecar.samples, sidecar.schema, sidecar.cache_format)
    try:
        return StoredSample(shard, i, sidecar, mapped[i])
    finally:
        mapped.close()


def spread_places(
    numbers: Sequence[int], samples: Sequence[int], count: int, turn: int = 0
) -> list[tuple[int, int]]:
    """Return places (shard, sample) that are spread evenly over shards, others in each turn.

    >>> spread_places([3, 5, 8, 9], [9, 9, 9, 9], 2), spread_places([3, 5], [9, 2], 9, turn=1)
    ([(3, 0), (8, 0)], [(5, 1), (3, 1)])
    """
    count = min(count, len(numbers))
    chosen = [(k * len(numbers) // count + turn) % len(numbers) for k in range(count)]
    return [(int(numbers[at]), turn % int(samples[at])) for at in chosen]


def read_samples(
    layout: CacheLayout, places: Iterable[tuple[int, int]], cache_format: str
) -> Iterator[StoredSample]:
    """Yield the samples at places, except those that were purged or evicted since."""
    for number, i in places:
        try:
            yield read_stored_sample(layout, number, i)
        except PurgedSampleError:
            continue
        except (FileNotFoundError, CorruptShardError):
            if shard_path(layout, number, cache_format).exists():
                raise
