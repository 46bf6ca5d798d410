"""Caches for tests and benchmarks, filled by the cache's own writer without a service."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from growcache.cache.cache import Cache
from growcache.cache.formats import shard_files
from growcache.cache.incoming import bytes_to_reserve, encode_shard, write_incoming
from growcache.cache.lease_views import LeaseView, read_leases
from growcache.cache.side_files import Identity
from growcache.cache.sidecar import Origins, SampleOrigin, Sidecar
from growcache.config import CacheConfig
from growcache.schema import Sample, Schema

FINGERPRINT = "f" * 32
PERMIT = "test"


def numbered(name: int) -> Sample:
    """A sample that holds its own number."""
    return {"id": np.array(name), "x": np.full(4, name, "<f4")}


class Filled:
    """A cache with its writer; sample ``row`` of shard ``number`` is ``1000 number + row``.

    Args:
        root: of the cache.
        make: makes a sample of its name.
        schema: of the samples; None for that of the first one.
        cache_format: of the shards.
        max_bytes: of the cache.
        config: everything else of it.
    """

    def __init__(
        self,
        root: Path,
        make: Callable[[int], Sample] = numbered,
        *,
        schema: Schema | None = None,
        cache_format: str = "tfrecord",
        max_bytes: int = 1_000_000_000,
        **config: Any,
    ) -> None:
        self.root = root
        self.make = make
        self.schema = schema or Schema.from_sample(make(0))
        settings = CacheConfig.model_validate(
            {"path": root, "max_bytes": max_bytes, "min_free": 0, **config}
        )
        self.format = cache_format
        self.cache = Cache.open(root, settings)
        self.layout = self.cache.layout
        self.cache.set_identity(
            Identity(FINGERPRINT, {"cache.format": self.format}, self.schema.to_json())
        )
        self._closed = False

    def add(self, *numbers: int, samples: int = 10) -> None:
        """Commit a shard of `samples` samples under each number."""
        for number in numbers:
            self.add_samples(number, self.samples(number, samples))

    def add_samples(self, number: int, samples: Sequence[Sample]) -> None:
        """Commit a shard of these samples, which conform to the schema."""
        packed = encode_shard(self.format, self.schema, samples)
        drawn = (
            SampleOrigin(f"object-{number}-{i}", None, 1, None, 0, 1, i, i + 1)
            for i in range(len(samples))
        )
        sidecar = Sidecar(
            fingerprint=FINGERPRINT,
            edition=0,
            round=0,
            number=number,
            group=number,
            parts=len(samples),
            origins=Origins.pack(drawn),
            **packed.facts,
        )
        self.cache.meta.issue(number)
        assert self.cache.reserve(PERMIT, bytes_to_reserve(sidecar))
        sealed = write_incoming(self.layout, PERMIT, sidecar, packed.files)
        self.cache.commit(PERMIT, [sealed])

    def samples(self, number: int, count: int) -> list[Sample]:
        """Return what is written into a shard."""
        return [self.schema.conform(self.make(1000 * number + row)) for row in range(count)]

    def retire(self, *numbers: int) -> None:
        """Let shards leave new snapshots."""
        self.cache.retire(numbers)

    def complete(self) -> None:
        """Say that there is no more to draw."""
        self.cache.meta.set_complete(True)

    def population(self, samples: float) -> None:
        """Say how much there is to draw."""
        self.cache.meta.set_population(int(samples), samples)

    def damage(self, number: int) -> None:
        """Flip a bit of a shard."""
        path = shard_files(self.layout, number, self.format)[0]
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
        if not self._closed:
            self.cache.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_leases(root: Path) -> list[LeaseView]:
    """Return leases that were open at one and the same moment, between two looks.

    One look takes a while, so it may show a lease that has ended together with one that is newer.
    """
    before = {lease.name for lease in read_leases(root) if lease.open}
    return [lease for lease in read_leases(root) if lease.open and lease.name in before]
