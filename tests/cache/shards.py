"""Shards to fill caches with: small, and a function of their number alone."""

from __future__ import annotations

import numpy as np

from growcache.cache.cache import Cache
from growcache.cache.files import Layout
from growcache.cache.formats import tfrecord
from growcache.cache.identity import Identity
from growcache.cache.incoming import checksums, needed_bytes, write_incoming
from growcache.cache.index import ShardRow
from growcache.cache.sidecar import DrawnFrom, Hole, Origins, Sidecar
from growcache.schema import Field, Sample, Schema

SCHEMA = Schema((Field("x", "<f4", (300,)), Field("y", "<i8", ())))
IDENTITY = Identity("f" * 32, {"sampling.seed": 0}, SCHEMA, {"group_shards": 1})


def samples_of(number: int, count: int) -> list[Sample]:
    rng = np.random.default_rng(number)
    return [
        {"x": rng.random(300, dtype=np.float32), "y": np.array(number * 1000 + i)}
        for i in range(count)
    ]


def described(
    number: int, samples: list[Sample], *, fingerprint: str = IDENTITY.fingerprint
) -> tuple[Sidecar, list[tfrecord.Buffer]]:
    buffers = tfrecord.encode(SCHEMA, samples)
    digest, crc = checksums(buffers) if samples else ("", 0)
    sidecar = Sidecar(
        fingerprint=fingerprint,
        edition=0,
        round=0,
        number=number,
        group=number,
        schema=SCHEMA,
        samples=len(samples),
        parts=max(1, len(samples)),
        record_bytes=tfrecord.layout(SCHEMA).record_bytes,
        shard_bytes=sum(len(buffer) for buffer in buffers),
        digest=digest,
        crc32c=crc,
        origins=Origins.pack(
            DrawnFrom(f"recordings/{number}-{i}.npy", f'"{i}"', 1200, 1.5, 0, 1, i, i + 1)
            for i in range(len(samples))
        ),
        holes=() if samples else (Hole("recordings/empty.npy", 0, "404"),),
    )
    return sidecar, buffers


def write(
    cache: Cache, number: int, count: int = 4, permit: str | None = None
) -> Sidecar | None:
    """Do a sampler's part; None where there is no room."""
    permit = permit or f"p{number}"
    sidecar, buffers = described(number, samples_of(number, count))
    if not cache.reserve(permit, needed_bytes(sidecar)):
        return None
    cache.issue(number)
    write_incoming(cache.layout, permit, sidecar, buffers)
    return sidecar


def fill(cache: Cache, number: int, count: int = 4) -> list[ShardRow]:
    """Write and commit one shard; nothing where there is no room."""
    sidecar = write(cache, number, count)
    return [] if sidecar is None else cache.commit(f"p{number}", [sidecar])


def assert_holds(layout: Layout, row: ShardRow) -> None:
    """The shard's file holds exactly the samples of its number."""
    shard = tfrecord.open_shard(layout.shard(row.number), SCHEMA, row.samples)
    try:
        assert shard.digest() == row.digest
        assert not tfrecord.bad_records(shard)
        for found, expected in zip(shard, samples_of(row.number, row.samples), strict=True):
            assert all((found[name] == expected[name]).all() for name in SCHEMA.names)
    finally:
        shard.close()
