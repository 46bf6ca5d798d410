"""Caches of random samples, written by the cache's own writer: what the loaders are measured on."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from growcache.cache.cache import Cache
from growcache.cache.formats import tfrecord
from growcache.cache.identity import Identity
from growcache.cache.incoming import digest_of, write_incoming
from growcache.cache.sidecar import DrawnFrom, Origins, Sidecar
from growcache.config import CacheConfig
from growcache.schema import Array, Field, Schema

FINGERPRINT = "b" * 32


class SyntheticCache:
    """A cache in the hands of its only writer; a context manager.

    Args:
        root: of the cache.
        dtype: of the one field, ``x``.
        shape: of it.
        config: bound and eviction; roomy by default.
    """

    def __init__(
        self, root: Path, dtype: str, shape: tuple[int, ...], config: CacheConfig | None = None
    ) -> None:
        self.root = root
        self.schema = Schema((Field("x", dtype, shape),))
        self.cache = Cache.open(root, config or CacheConfig(path=root))
        self.cache.set_identity(Identity(FINGERPRINT, {}, self.schema))

    def add(self, number: int, samples: Array) -> None:
        """Commit a shard.

        Args:
            number: of the shard.
            samples: [n, *shape] in the field's dtype.
        """
        buffers = tfrecord.encode(self.schema, [{"x": row} for row in samples])
        digest = digest_of(buffers)
        record_bytes, n = tfrecord.layout(self.schema).record_bytes, len(samples)
        sidecar = Sidecar(
            fingerprint=FINGERPRINT,
            edition=0,
            round=0,
            number=number,
            group=number,
            schema=self.schema,
            samples=n,
            parts=n,
            record_bytes=record_bytes,
            shard_bytes=n * record_bytes,
            digest=digest,
            origins=Origins.pack(
                DrawnFrom(f"{number}/{i}.npy", None, 1, None, 0, 1, i, i + 1) for i in range(n)
            ),
        )
        permit = f"p{number}"
        write_incoming(self.cache.layout, permit, sidecar, buffers)
        self.cache.commit(permit, [sidecar])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cache.close()


def random_samples(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return incompressible bytes as an array; floats are finite, between 1 and 2."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    noise = np.frombuffer(rng.bytes(size), np.uint8)
    if dtype == "<f4":
        return (
            (noise.view("<u4") >> np.uint32(9) | np.uint32(0x3F80_0000))
            .view(dtype)
            .reshape(shape)
        )
    return noise.view(dtype).reshape(shape)
