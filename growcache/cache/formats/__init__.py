"""Cache formats: samples to shard files and back, one module per format.

A format is a module with ``EXTENSION``, ``LAYOUT_VERSION``, ``suffixes``, ``record_bytes``,
``largest_sample``, ``encode``, ``open_shard`` and ``bad_records``. Another format is a file and a
line here.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from growcache.cache.files import OFFSETS, CacheLayout
from growcache.cache.formats import npy, tfrecord
from growcache.cache.formats.mapped import MappedShard
from growcache.schema import Schema

CACHE_FORMATS: dict[str, ModuleType] = {"tfrecord": tfrecord, "npy": npy}


def shard_path(layout: CacheLayout, number: int, cache_format: str) -> Path:
    """Return where the shard's samples lie: a file, or a directory of files."""
    return layout.shard(number, CACHE_FORMATS[cache_format].EXTENSION)


def shard_files(layout: CacheLayout, number: int, cache_format: str) -> list[Path]:
    """Return the paths of all files that hold the shard's samples, as far as they are there."""
    path = shard_path(layout, number, cache_format)
    if path.is_dir():
        return sorted(path.iterdir())
    offsets = layout.shard(number, OFFSETS)
    return [found for found in (path, offsets) if found.exists()]


def open_shard(
    layout: CacheLayout, number: int, samples: int, schema: Schema, cache_format: str
) -> MappedShard:
    """Return the mapped shard; its checksums are not looked at.

    Args:
        layout: of the cache.
        number: of the shard.
        samples: how many it holds, as its row says.
        schema: of the cache.
        cache_format: of the cache (`Identity.cache_format`).

    Raises:
        CorruptShardError: a file is missing, or is not what so many samples take.
    """
    path = shard_path(layout, number, cache_format)
    shard: MappedShard = CACHE_FORMATS[cache_format].open_shard(path, schema, samples)
    return shard
