"""Caches beyond memory: what stays of them, and that the rest leaves the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.formats import mapped
from growcache.cache.formats.mapped import (
    MappedShard,
    drop_from_page_cache,
    is_in_page_cache,
    map_file,
    read_ahead_bytes,
    read_pieces,
)
from growcache.errors import CorruptShardError
from growcache.loading import blocks, maps, plan, snapshot
from growcache.loading.consumer import Consumer
from growcache.loading.framework import Framework, take_rows
from growcache.loading.maps import (
    RESIDENT_WINDOWS,
    SHARE_OF_AVAILABLE,
    is_resident,
    resident_share,
)
from growcache.loading.options import LoaderOptions
from tests.filled import Filled
from tests.loading.loaders import LOADERS

SIZES = st.integers(0, 10**15)


@given(SIZES, SIZES, SIZES)
def test_what_stays_fits_into_its_share_of_memory(
    cache: int, available: int, window: int
) -> None:
    share = resident_share(cache, available, window)
    assert 0 <= share <= 1
    room = SHARE_OF_AVAILABLE * available
    assert share * cache <= room * (1 + 1e-9)
    assert share == 1 or cache > room
    if 0 < share < 1:  # together with the windows that are read
        assert share * cache + RESIDENT_WINDOWS * window <= room * (1 + 1e-9)


@given(st.integers(0, 10**9), st.floats(0, 1), st.floats(0, 1))
def test_who_stays_at_a_share_stays_at_a_larger_one(number: int, a: float, b: float) -> None:
    assert is_resident(number, max(a, b)) or not is_resident(number, min(a, b))
    assert is_resident(number, 1.0)
    assert not is_resident(number, 0.0)


@given(st.integers(0, 10**9), st.floats(0, 1))
def test_so_many_of_the_shards_stay(first: int, share: float) -> None:
    kept = sum(is_resident(number, share) for number in range(first, first + 1000))
    assert abs(kept - 1000 * share) < 10


@pytest.fixture(params=["tfrecord", "npy"])
def cache(request: Any, tmp_path: Path) -> Iterator[Filled]:
    """Eight shards of 1 MB, each a window of its own but for the least that is mixed."""

    def sample(name: int) -> dict[str, Any]:
        return {"id": np.array(name), "x": np.full(25_000, name, "<f4")}

    with Filled(tmp_path / "cache", sample, cache_format=request.param) as filled:
        filled.add(*range(8))
        yield filled


def resident(filled: Filled) -> int:
    """How many shards are in the page cache, by their largest file."""
    files = [path for path in (filled.root / "shards").rglob("*") if path.is_file()]
    return sum(
        is_in_page_cache(map_file(path)) for path in files if path.stat().st_size > 500_000
    )


def read_all(loader: Any) -> list[int]:
    return sorted(int(one) for batch in loader for one in batch["id"])


@pytest.mark.parametrize("kind", list(LOADERS))
@pytest.mark.parametrize(("available", "stay"), [(1 << 40, 8), (13_000_000, 4), (0, 0)])
def test_shards_leave_memory_where_it_cannot_hold_the_cache(
    cache: Filled, monkeypatch: pytest.MonkeyPatch, kind: str, available: int, stay: int
) -> None:
    monkeypatch.setattr(plan, "WINDOW_BYTES", 1)
    monkeypatch.setattr(plan, "MIN_WINDOW_SHARDS", 1)
    monkeypatch.setattr(maps, "available_memory_bytes", lambda: available)
    options: Any = {"batch_size": 5, "min_samples": 1, "samples_per_epoch": 80}
    with LOADERS[kind](cache.root, gather="thread", **options) as loader:
        first, second = read_all(loader), read_all(loader)
    assert first == second == sorted(1000 * n + row for n in range(8) for row in range(10))
    assert abs(resident(cache) - stay) <= 1


def is_here(memory: Any, start: int, nbytes: int) -> bool:
    """Whether a row is in the page cache, so that copying it waits for no disk.

    To count page faults would say the same of a machine that has memory enough for its programs:
    else code that is not in memory any more is met by the same thread, and counts.
    """
    first = memory.ctypes.data + start
    page = first // mmap.PAGESIZE * mmap.PAGESIZE
    pages = np.zeros(-(-(first + nbytes - page) // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(page, first + nbytes - page, pages.ctypes.data) == 0
    return bool((pages & 1).all())


def test_the_thread_that_copies_never_waits_for_the_disk(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "WINDOW_BYTES", 1)
    monkeypatch.setattr(blocks, "BLOCK_BATCHES", 1)
    monkeypatch.setattr(maps, "available_memory_bytes", lambda: 0)
    for path in (cache.root / "shards").rglob("*"):
        if path.is_file():
            drop_from_page_cache(path)
    assert resident(cache) == 0
    cold: list[bool] = []  # of each row

    def take(memory: Any, starts: Any, out: Any) -> None:
        cold.extend(not is_here(memory, start, out.shape[1]) for start in starts.tolist())
        take_rows(memory, starts, out)

    options = LoaderOptions(path=cache.root, batch_size=5, min_samples=1, gather="thread")
    make_consumer = Consumer(options, Framework(take=take))
    for _ in range(2):  # first they are checked, then known
        assert len(list(make_consumer.epoch())) == 16
    make_consumer.close()
    assert len(cold) >= 2 * 80
    assert not any(cold)  # those made ahead too, while the last shards are let go of


def test_of_a_shard_that_was_in_memory_a_moment_ago_nobody_asks_again(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [100.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    in_memory = vars(MappedShard)["in_memory"].fget

    def ask(shard: MappedShard) -> Any:
        asked.append(now[0])
        return in_memory(shard)

    monkeypatch.setattr(MappedShard, "in_memory", property(ask))
    with snapshot.Snapshot.take(cache.root) as taken:
        taken.mapped(3)  # which reads it through
        assert asked == []
        for now[0] in (100.0, 100.5, 101.25, 101.5, 103.5):
            taken.mapped(3)
        assert asked == [100.0, 101.25, 103.5]
        monkeypatch.setattr(maps, "available_memory_bytes", lambda: 0)
        taken.enter([3])
        taken.leave([3])
        assert in_memory(taken.mapped(3))  # for what was let go of is looked at
        assert asked[-2:] == [103.5, 103.5]


def test_of_a_shard_that_goes_meanwhile_nothing_need_be_let_go(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of a pass may be closed before its last windows are."""
    monkeypatch.setattr(maps, "available_memory_bytes", lambda: 0)
    with snapshot.Snapshot.take(cache.root) as taken:
        taken.enter([3])
        taken.mapped(3)

        def gone(*_: Any) -> list[Path]:
            raise FileNotFoundError

        monkeypatch.setattr(maps, "shard_files", gone)
        taken.leave([3])


def test_what_another_window_reads_stays(cache: Filled, monkeypatch: Any) -> None:
    monkeypatch.setattr(maps, "available_memory_bytes", lambda: 0)
    with (
        snapshot.Snapshot.take(cache.root) as one,
        snapshot.Snapshot.take(cache.root) as other,
    ):
        for taken in (one, other):
            taken.enter([3])
            shard = taken.mapped(3)
        one.leave([3])
        assert shard.in_memory
        other.leave([3])
        assert not shard.in_memory
        assert np.asarray(shard[7]["x"])[-1] == 3007  # it comes again


def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    """Reading it in the map would kill the process."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(1 << 20))
    memory = map_file(path)
    os.truncate(path, 4096)
    with pytest.raises(CorruptShardError, match="cannot be read"):
        list(read_pieces(memory))


@pytest.mark.parametrize("asking", [True, False])
@pytest.mark.parametrize("advice", [22, 12345])
def test_a_cold_file_is_in_memory_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asking: bool, advice: int
) -> None:
    """Also by a kernel that does not know how to map pages before they are touched."""
    monkeypatch.setattr(mapped, "_POPULATE_READ", advice)
    monkeypatch.setattr(mapped, "READ_PIECE_BYTES", 1 << 20)
    path = tmp_path / "shard"
    content = np.random.default_rng(0).integers(0, 256, (5 << 20) + 77, np.uint8)
    with path.open("wb") as file:
        file.write(content.tobytes())
        os.fsync(file.fileno())
    drop_from_page_cache(path)
    memory, found = map_file(path), []
    assert not is_in_page_cache(memory)
    for piece in read_pieces(memory, asking=asking):
        # Pieces begin on a page, so each can be asked for by itself.
        assert is_in_page_cache(piece)
        found.append(piece)
    np.testing.assert_array_equal(np.concatenate(found), content)
    assert len(found) == 6
    assert read_ahead_bytes(path) >= 0


def test_a_file_that_cannot_be_opened_stays_in_memory(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"")
    drop_from_page_cache(tmp_path / "gone")
    drop_from_page_cache(tmp_path / "shard" / "in no folder")
