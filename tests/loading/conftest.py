"""Caches with samples that say who they are, written by the cache's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from growcache.cache.cache import Cache
from growcache.cache.formats import tfrecord
from growcache.cache.identity import Identity
from growcache.cache.incoming import digest_of, write_incoming
from growcache.cache.sidecar import DrawnFrom, Origins, Sidecar
from growcache.config import CacheConfig
from growcache.schema import Field, Sample, Schema


class Filler:
    """Plays the supervisor: commits and retires shards of a cache.

    Sample ``row`` of shard ``number`` has ``id`` = 1000 number + row, and an ``x`` that is
    full of it.
    """

    def __init__(self, root: Path, shape: tuple[int, ...] = (4,)) -> None:
        self.root = root
        self.shape = shape
        self.schema = Schema((Field("id", "<i8", ()), Field("x", "<f4", shape)))
        self.cache = Cache.open(root, CacheConfig(path=root))
        self.cache.set_identity(Identity("f" * 32, {}, self.schema))
        self.layout = self.cache.layout
        self.closed = False

    def sample(self, number: int, row: int) -> Sample:
        name = 1000 * number + row
        return {"id": np.array(name), "x": np.full(self.shape, name, "<f4")}

    def add(self, *numbers: int, samples: int = 10) -> None:
        for number in numbers:
            self._add(number, samples)

    def _add(self, number: int, samples: int) -> None:
        buffers = tfrecord.encode(self.schema, [self.sample(number, i) for i in range(samples)])
        digest = digest_of(buffers) if samples else ""
        record_bytes = tfrecord.layout(self.schema).record_bytes
        sidecar = Sidecar(
            fingerprint="f" * 32,
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
        write_incoming(self.layout, "p", sidecar, buffers)
        self.cache.commit("p", [sidecar])

    def retire(self, *numbers: int) -> None:
        self.cache.retire(numbers)

    def complete(self) -> None:
        self.cache.set_complete(True)

    def population(self, samples: float) -> None:
        self.cache.set_population(int(samples), samples)

    def damage(self, number: int) -> None:
        path = self.layout.shard(number)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def close(self) -> None:
        if not self.closed:
            self.cache.close()
        self.closed = True


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., Filler]]:
    made: list[Filler] = []

    def make(name: str = "cache", shape: tuple[int, ...] = (4,)) -> Filler:
        made.append(Filler(tmp_path / name, shape))
        return made[-1]

    yield make
    for filler in made:
        filler.close()


@pytest.fixture
def cache(make_cache: Callable[..., Filler]) -> Filler:
    return make_cache()
