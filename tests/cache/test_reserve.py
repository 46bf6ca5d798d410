"""What a sampler asks for is never less than what its files take, whatever the file system does."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout, allocated, allocated_tree
from growcache.cache.folders import remove_shard
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.incoming import (
    bytes_to_reserve,
    discard_incoming,
    encode_shard,
    write_incoming,
)
from growcache.cache.sidecar import Hole, Origins, SampleOrigin, Sidecar
from growcache.schema import Field, Sample, Schema
from tests.disks import small_disk

DISK_BYTES = 24_000_000
PUNCH_HOLE_KEEP_SIZE = 3

names = st.text("abcdefghij_.", min_size=1, max_size=80).filter(lambda name: name.strip("."))
schemas = st.lists(
    st.tuples(names, st.sampled_from([(), (7,), (None,), (None, 3)])),
    min_size=1,
    max_size=9,
    unique_by=lambda pair: pair[0],
)


def fragment(disk: Path) -> None:
    """Leave free blocks only between those of a file, so that every block is alone."""
    block = os.statvfs(disk).f_bsize
    punch = ctypes.CDLL(None, use_errno=True).fallocate
    with (disk / "sieve").open("wb") as file:
        free = os.statvfs(disk).f_bavail * block - DISK_BYTES // 10
        os.posix_fallocate(file.fileno(), 0, free)
        for offset in range(0, free, 2 * block):
            mode, place = PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(offset)
            assert punch(file.fileno(), mode, place, ctypes.c_long(block)) == 0
    with (disk / "rest").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DISK_BYTES // 10 - 500_000)


@pytest.fixture(scope="module", params=["tmpfs", "ext4", "ext4 in fragments"])
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    kind, _, fragments = request.param.partition(" ")
    with small_disk(tmp_path_factory.mktemp("disk") / "disk", DISK_BYTES, kind) as mounted:
        if fragments:
            fragment(mounted)
        yield mounted


def sample_of(schema: Schema, rng: np.random.Generator, most: int) -> Sample:
    sizes = [int(rng.integers(0, most)) if None in f.shape else 0 for f in schema.fields]
    return {
        f.name: np.zeros([size if dim is None else dim for dim in f.shape], f.dtype)
        for f, size in zip(schema.fields, sizes, strict=True)
    }


def sidecar_of(
    cache_format: str, schema: Schema, samples: list[Sample]
) -> tuple[Sidecar, list]:  # type: ignore[type-arg]
    packed = encode_shard(cache_format, schema, samples)
    drawn = [
        SampleOrigin(f"a/key/{i}", "tag", 9, None, 0, 1, i, i + 1) for i in range(len(samples))
    ]
    sidecar = Sidecar(
        fingerprint="f" * 32,
        edition=0,
        round=0,
        number=0,
        group=0,
        parts=len(samples) or 1,
        origins=Origins.pack(drawn),
        holes=() if samples else (Hole("gone", 0, "404"),),
        **packed.facts,
    )
    return sidecar, packed.files


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cache_format=st.sampled_from(sorted(CACHE_FORMATS)),
    fields=schemas,
    count=st.integers(0, 40),
    most=st.sampled_from([1, 50, 4_000]),
    seed=st.integers(0, 9),
    direct=st.booleans(),
)
@example(  # one file of 3 MB, which takes thousands of fragments
    cache_format="npy", fields=[("x", (None, 3))], count=120, most=4_000, seed=0, direct=True
)
def test_what_is_reserved_is_enough(
    disk: Path,
    cache_format: str,
    fields: list[tuple[str, tuple[int | None, ...]]],
    count: int,
    most: int,
    seed: int,
    direct: bool,
) -> None:
    schema = Schema(tuple(Field(name, "<f4", shape) for name, shape in sorted(fields)))
    rng = np.random.default_rng(seed)
    samples = [sample_of(schema, rng, most) for _ in range(count)]
    layout = CacheLayout(disk / "cache")
    adopt(layout)
    sidecar, files = sidecar_of(cache_format, schema, samples)
    before = allocated_tree(layout.root) - allocated(layout.incoming)
    try:
        write_incoming(layout, "p", sidecar, files, direct=direct)
        taken = allocated_tree(layout.root) - allocated(layout.incoming) - before
        assert 0 < taken <= bytes_to_reserve(sidecar)
    finally:
        discard_incoming(layout, "p", [0])
        remove_shard(layout, 0)
