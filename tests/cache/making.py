"""Shards for tests, made and written as a sampler does it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from growcache.cache.cache import Cache
from growcache.cache.files import CacheLayout
from growcache.cache.formats.encoding import EncodedFile
from growcache.cache.incoming import bytes_to_reserve, encode_shard, write_incoming
from growcache.cache.side_files import Edition, Identity
from growcache.cache.sidecar import Hole, Origins, SampleOrigin, Sidecar
from growcache.config import CacheConfig
from growcache.schema import Field, Sample, Schema

SCHEMA = Schema.from_sample({"x": np.zeros((16, 32), "<f4"), "y": np.zeros((), "<i8")})
RAGGED = Schema(
    (
        Field("data", "bytes", ()),
        Field("note", "str", ()),
        Field("x", "<f4", (None, 32)),
        Field("y", "<i8", ()),
        Field("z", "<u2", (None, 3, None)),
    )
)
IDENTITY = Identity("f" * 32, {"source.url": "a", "sampling.seed": 0}, SCHEMA.to_json())
OTHER = Identity("e" * 32, {"source.url": "a", "sampling.seed": 1}, SCHEMA.to_json())
MAX_BYTES = 1_200_000

KINDS = {
    f"{cache_format}-{name}": Identity(
        "f" * 32, {**IDENTITY.parts, "cache.format": cache_format}, schema.to_json()
    )
    for cache_format in ("tfrecord", "npy")
    for name, schema in (("fixed", SCHEMA), ("ragged", RAGGED))
}


def samples_of(number: int, count: int, schema: Schema = SCHEMA) -> list[Sample]:
    """Samples whose every value tells the shard and the place."""
    return [_sample(schema, number, i) for i in range(count)]


def _sample(schema: Schema, number: int, i: int) -> Sample:
    rows = 16 if schema == SCHEMA else (5 * number + i) % 20
    sample: Sample = {
        "x": np.full((rows, 32), number + i / 100, "<f4"),
        "y": np.array(number * 100 + i),
    }
    if schema == SCHEMA:
        return sample
    return {
        "data": bytes([number % 256, i % 256]) * rows,
        "note": f"№ {number}:{i}" if i else "",
        **sample,
        "z": np.full((i % 3, 3, rows % 4), number, "<u2"),
    }


def equal(found: Sample, expected: Sample) -> bool:
    """Whether two samples are the same, dtypes and shapes included."""
    return found.keys() == expected.keys() and all(
        type(found[name]) is type(value)
        and np.shape(found[name]) == np.shape(value)
        and np.asarray(found[name]).dtype == np.asarray(value).dtype
        and np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()
        for name, value in expected.items()
    )


def make(
    number: int, count: int = 8, *, group: int | None = None, identity: Identity = IDENTITY
) -> tuple[Sidecar, list[EncodedFile]]:
    """A shard and its description; empty with ``count=0``."""
    schema = identity.schema
    packed = encode_shard(identity.cache_format, schema, samples_of(number, count, schema))
    drawn = [
        SampleOrigin(f"k/{number}/{i}", "tag", 9, None, 0, 1, i, i + 1) for i in range(count)
    ]
    sidecar = Sidecar(
        fingerprint=identity.fingerprint,
        edition=0,
        round=0,
        number=number,
        group=number if group is None else group,
        parts=max(count, 1),
        origins=Origins.pack(drawn),
        holes=() if count else (Hole("gone", 0, "404"),),
        **packed.facts,
    )
    return sidecar, packed.files


def config(root: Path, **values: object) -> CacheConfig:
    """A small cache that does not mind a full disk."""
    defaults: dict[str, object] = {"path": root, "max_bytes": MAX_BYTES, "min_free": 0}
    return CacheConfig.model_validate(defaults | values)


def opened(root: Path, identity: Identity = IDENTITY, **values: object) -> Cache:
    """A cache that is ready for permits."""
    cache = Cache.open(root, config(root, **values), takeover_seconds=0.2)
    cache.set_identity(identity)
    if not cache.meta.editions:
        cache.meta.add_edition(Edition(0, 100, "digest", 0))
    return cache


def write(
    layout: CacheLayout, permit: str, number: int, count: int = 8, identity: Identity = IDENTITY
) -> Sidecar:
    """What a sampler does once it was granted room."""
    sidecar, files = make(number, count, identity=identity)
    return write_incoming(layout, permit, sidecar, files)


def need(number: int, count: int = 8, identity: Identity = IDENTITY) -> int:
    """What a sampler would ask for."""
    return bytes_to_reserve(make(number, count, identity=identity)[0])


def permit_of(group: int) -> str:
    """The name of a permit, of the form that the service gives: others' litter stays."""
    return f"0badcafe-{group:08d}-0-beef"


def add(cache: Cache, number: int, count: int = 8) -> None:
    """One group of one shard, from permit to commit."""
    permit, identity = permit_of(number), cache.meta.identity or IDENTITY
    cache.meta.issue(number)
    assert cache.reserve(permit, need(number, count, identity)), "no room"
    cache.commit(permit, [write(cache.layout, permit, number, count, identity)])
