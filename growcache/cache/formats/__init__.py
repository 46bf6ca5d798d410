"""Cache formats: samples to shard files and back. A new format is a module and a line here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from growcache.cache.files import OFFSETS, CacheLayout
from growcache.cache.formats import npy, tfrecord
from growcache.cache.formats.mapped import MappedShard
from growcache.schema import Schema

CACHE_FORMATS: dict[str, ModuleType] = {"tfrecord": tfrecord, "npy": npy}


def shard_path(layout: CacheLayout, number: int, cache_format: str) -> Path:
    return layout.shard(number, CACHE_FORMATS[cache_format].EXTENSION)


def shard_files(layout: CacheLayout, number: int, cache_format: str) -> list[Path]:
    path = shard_path(layout, number, cache_format)
    if path.is_dir():
        return sorted(path.iterdir())
    offsets = layout.shard(number, OFFSETS)
    return [found for found in (path, offsets) if found.exists()]


def open_shard(
    layout: CacheLayout, number: int, samples: int, schema: Schema, cache_format: str
) -> MappedShard:
    """Return the mapped shard without verifying checksums. May raise CorruptShardError."""
    path = shard_path(layout, number, cache_format)
    shard: MappedShard = CACHE_FORMATS[cache_format].open_shard(path, schema, samples)
    return shard
