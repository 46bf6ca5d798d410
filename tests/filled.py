"""Caches for tests of the front doors, filled by the cache's own writer without a service."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from growcache.cache.cache import Cache
from growcache.cache.formats import tfrecord
from growcache.cache.identity import Identity
from growcache.cache.incoming import digest_of, needed_bytes, write_incoming
from growcache.cache.sidecar import DrawnFrom, Origins, Sidecar
from growcache.config import CacheConfig
from growcache.schema import Sample, Schema

FINGERPRINT = "f" * 32
PERMIT = "test"


def numbered(name: int) -> Sample:
    """A sample that says who it is."""
    return {"id": np.array(name), "x": np.full(4, name, "<f4")}


class Filled:
    """A cache with its writer; sample ``row`` of shard ``number`` is ``1000 number + row``.

    Args:
        root: of the cache.
        make: makes a sample of its name.
        max_bytes: of the cache.
        min_uses: before a shard may be evicted.
    """

    def __init__(
        self,
        root: Path,
        make: Callable[[int], Sample] = numbered,
        *,
        max_bytes: int = 1_000_000_000,
        **config: Any,
    ) -> None:
        self.root = root
        self.make = make
        self.schema = Schema.of(make(0))
        settings = CacheConfig(path=root, max_bytes=max_bytes, min_free=0, **config)  # type: ignore[arg-type]
        self.cache = Cache.open(root, settings)
        self.cache.set_identity(Identity(FINGERPRINT, {}, self.schema))

    def add(self, *numbers: int, samples: int = 10) -> None:
        """Commit shards."""
        for number in numbers:
            buffers = tfrecord.encode(self.schema, self.samples(number, samples))
            sidecar = self._describe(number, samples, digest_of(buffers))
            self.cache.issue(number)
            assert self.cache.reserve(PERMIT, needed_bytes(sidecar))
            write_incoming(self.cache.layout, PERMIT, sidecar, buffers)
            self.cache.commit(PERMIT, [sidecar])

    def samples(self, number: int, count: int) -> list[Sample]:
        """Return what is written into a shard."""
        return [self.schema.conform(self.make(1000 * number + row)) for row in range(count)]

    def complete(self) -> None:
        """Say that there is no more to draw."""
        self.cache.set_complete(True)

    def damage(self, number: int) -> None:
        """Flip a bit of a shard."""
        path = self.cache.layout.shard(number)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def poll(self) -> None:
        """Look at the leases, as the service does all the time."""
        self.cache.poll_leases(time.monotonic())

    def uses(self) -> dict[int, int]:
        """How often finished leases used each live shard."""
        self.poll()
        return {candidate.number: candidate.uses for candidate in self.cache.candidates()}

    def close(self) -> None:
        """Let another writer in."""
        self.cache.close()

    def __enter__(self) -> Filled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(self, number: int, samples: int, digest: str) -> Sidecar:
        record_bytes = tfrecord.layout(self.schema).record_bytes
        return Sidecar(
            fingerprint=FINGERPRINT,
            edition=0,
            round=0,
            number=number,
            group=number,
            schema=self.schema,
            samples=samples,
            parts=samples,
            record_bytes=record_bytes,
            shard_bytes=samples * record_bytes,
            digest=digest,
            origins=Origins.pack(
                DrawnFrom(f"object-{number}-{i}", None, 1, None, 0, 1, i, i + 1)
                for i in range(samples)
            ),
        )
