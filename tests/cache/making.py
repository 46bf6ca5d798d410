"""Shards for tests, made and written as a sampler does it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from growcache.cache.cache import Cache
from growcache.cache.files import Layout
from growcache.cache.formats import tfrecord
from growcache.cache.formats.mapped import Buffer
from growcache.cache.identity import Identity
from growcache.cache.incoming import digest_of, needed_bytes, write_incoming
from growcache.cache.index import Edition
from growcache.cache.sidecar import DrawnFrom, Hole, Origins, Sidecar
from growcache.config import CacheConfig
from growcache.schema import Schema

SCHEMA = Schema.of({"x": np.zeros((16, 32), "<f4"), "y": np.zeros((), "<i8")})
IDENTITY = Identity("f" * 32, {"source.url": "a", "sampling.seed": 0}, SCHEMA)
OTHER = Identity("e" * 32, {"source.url": "a", "sampling.seed": 1}, SCHEMA)
MAX_BYTES = 1_200_000


def samples_of(number: int, count: int) -> list[dict[str, np.ndarray]]:
    """Samples whose every value tells the shard and the place."""
    return [
        {"x": np.full((16, 32), number + i / 100, "<f4"), "y": np.array(number * 100 + i)}
        for i in range(count)
    ]


def make(
    number: int, count: int = 8, *, group: int | None = None, identity: Identity = IDENTITY
) -> tuple[Sidecar, list[Buffer]]:
    """A shard and its description; empty with ``count=0``."""
    buffers = tfrecord.encode(SCHEMA, samples_of(number, count))
    digest = digest_of(buffers) if count else ""
    record_bytes = tfrecord.layout(SCHEMA).record_bytes
    drawn = [DrawnFrom(f"k/{number}/{i}", "tag", 9, None, 0, 1, i, i + 1) for i in range(count)]
    sidecar = Sidecar(
        fingerprint=identity.fingerprint,
        edition=0,
        round=0,
        number=number,
        group=number if group is None else group,
        schema=SCHEMA,
        samples=count,
        parts=max(count, 1),
        record_bytes=record_bytes,
        shard_bytes=count * record_bytes,
        digest=digest,
        origins=Origins.pack(drawn),
        holes=() if count else (Hole("gone", 0, "404"),),
    )
    return sidecar, buffers


def config(root: Path, **values: object) -> CacheConfig:
    """A small cache that does not mind a full disk."""
    defaults: dict[str, object] = {"path": root, "max_bytes": MAX_BYTES, "min_free": 0}
    return CacheConfig.model_validate(defaults | values)


def opened(root: Path, **values: object) -> Cache:
    """A cache that is ready for permits."""
    cache = Cache.open(root, config(root, **values), takeover_seconds=0.2)
    cache.set_identity(IDENTITY)
    if not cache.editions:
        cache.add_edition(Edition(0, 100, "digest", 0))
    return cache


def write(layout: Layout, permit: str, number: int, count: int = 8) -> Sidecar:
    """What a sampler does once it was granted room."""
    sidecar, buffers = make(number, count)
    write_incoming(layout, permit, sidecar, buffers)
    return sidecar


def need(number: int, count: int = 8) -> int:
    """What a sampler would ask for."""
    return needed_bytes(make(number, count)[0])


def add(cache: Cache, number: int, count: int = 8) -> None:
    """One group of one shard, from permit to commit."""
    permit = f"p{number}"
    cache.issue(number)
    assert cache.reserve(permit, need(number, count)), "no room"
    cache.commit(permit, [write(cache.layout, permit, number, count)])
