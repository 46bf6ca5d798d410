"""Writing past the page cache: the same bytes, and none of them left in memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.cache import incoming
from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout
from growcache.cache.incoming import (
    ALIGNED,
    CHUNK_BYTES,
    LEAST_DIRECT_BYTES,
    exceeds_page_cache,
    write_incoming,
)
from growcache.cache.system import memory_bytes
from tests.cache.making import make

EDGES = (0, 1, ALIGNED - 1, ALIGNED, ALIGNED + 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1)
GROWN = LEAST_DIRECT_BYTES // 2000  # samples of 2 KiB that make a shard worth a direct write


def _resident(path: Path) -> int:
    """Pages of the file that are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(memory)
        libc = ctypes.CDLL(None, use_errno=True)
        length = ctypes.c_size_t(len(memory))
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), length, found) == 0
        del anchor
        return sum(page & 1 for page in found)


def _shard(tmp_path: Path, *, past: bool) -> Path:
    layout = CacheLayout(tmp_path)
    adopt(layout)
    sidecar, files = make(3, GROWN)
    write_incoming(layout, "p", sidecar, files, direct=past)
    return layout.incoming_path("p", 3, files[0].suffix)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 70_000)), max_size=5))
def test_the_file_is_the_views_one_after_the_other(tmp_path: Path, sizes: list[int]) -> None:
    parts = [np.random.default_rng(n).bytes(n) for n in sizes]
    whole = b"".join(parts)
    descriptor = incoming.open_direct(tmp_path / "f", 0o600)
    assert descriptor is not None, f"{tmp_path} has no direct writes: choose another TMPDIR"
    try:
        incoming.write_direct(descriptor, parts, len(whole))
    finally:
        os.close(descriptor)
    assert (tmp_path / "f").read_bytes() == whole


def test_a_shard_written_past_the_page_cache_is_the_same_and_not_in_memory(
    tmp_path: Path,
) -> None:
    past = _shard(tmp_path / "past", past=True)
    assert _resident(past) == 0
    through = _shard(tmp_path / "through", past=False)
    assert _resident(through) > 0
    assert past.read_bytes() == through.read_bytes()


def test_a_file_system_without_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777, **others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here")
        return ordinary(path, flags, mode, **others)

    monkeypatch.setattr(os, "open", refusing)
    assert _resident(_shard(tmp_path, past=True)) > 0


def test_only_a_bound_that_memory_cannot_hold_is_beyond_it() -> None:
    memory = memory_bytes()
    assert exceeds_page_cache(memory, memory)
    assert not exceeds_page_cache(memory // 3, memory)
