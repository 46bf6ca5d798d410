"""The bound as the disk sees it, all the time and not only between two steps."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from growcache.cache.cache import Cache
from growcache.cache.check import check
from growcache.cache.eviction_policy import choose_evictions
from growcache.cache.files import allocated_tree
from growcache.cache.index.reader import read_index
from growcache.cache.index.writer import IndexDatabase
from growcache.cache.reader_lease import Lease
from growcache.errors import CacheFullError
from tests.cache.making import KINDS, MAX_BYTES, add, need, opened


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_at_every_instant(tmp_path: Path, kind: str) -> None:
    root, most, ended = tmp_path / "cache", 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, allocated_tree(root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with opened(root, KINDS[kind]) as cache:
            deadline = time.monotonic() + 1.5
            number = 0
            while time.monotonic() < deadline or number < 100:
                count = 1 + number % 40
                short = need(number, count, KINDS[kind]) - cache.bytes_left()
                cache.evict(choose_evictions("fifo", cache.candidates(), short, 0).evict)
                add(cache, number, count)
                cache.index_writer.append_history({"number": number})
                cache.maintain()
                number += 1
            assert cache.totals().evicted_shards > 50
    finally:
        ended.set()
        watcher.join()
    assert MAX_BYTES / 2 < most <= MAX_BYTES


@pytest.mark.mutant(12, "growcache.cache.space:SpaceAccount.settle", "self.left() >= 0", "True")
def test_a_lowered_bound_is_in_force_once_everything_fits(tmp_path: Path) -> None:
    least = 900_000
    with opened(tmp_path / "cache") as cache:
        for number in range(8):
            add(cache, number, 30)
        assert cache.bytes_used > least
        assert cache.reserve("writing", 4096)
        cache.max_bytes = least
        assert (cache.max_bytes, cache.space.in_force) == (least, MAX_BYTES)
        assert cache.shrinking
        assert not cache.reserve("more", 4096)
        while cache.bytes_left() < 0:
            assert cache.space.in_force == MAX_BYTES
            cache.evict([cache.candidates()[0].number])
            cache.poll_leases(time.monotonic())
        assert cache.space.reserved == 4096, "what was promised is kept"
        assert (cache.space.in_force, cache.shrinking) == (least, False)
        cache.max_bytes = 2 * MAX_BYTES
        assert cache.space.in_force == 2 * MAX_BYTES


def test_a_bound_that_was_lowered_meanwhile_is_reached_after_the_start(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as cache:
        for number in range(8):
            add(cache, number, 30)
        used = cache.bytes_used
    with opened(tmp_path / "cache", max_bytes=900_000) as cache:
        assert cache.shrinking
        assert 900_000 < cache.space.in_force <= used
        cache.evict([c.number for c in cache.candidates()[:-1]])
        cache.poll_leases(time.monotonic())
        assert cache.space.in_force == 900_000


def test_a_lowered_bound_takes_effect_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache") as cache:
        for number in range(8):
            add(cache, number, 30)
        cache.max_bytes = 900_000
        cache.evict([c.number for c in cache.candidates()[:-1]])

        def no_room(now: float) -> None:
            raise CacheFullError("no room for the uses")

        monkeypatch.setattr(cache.remover, "poll", no_room)
        with pytest.raises(CacheFullError):
            cache.poll_leases(time.monotonic())
        assert cache.space.in_force == 900_000


def _grow_index(index: Path) -> None:
    """Have the index as large as an earlier version made it, with a table that is gone."""
    with closing(sqlite3.connect(index)) as connection, connection:
        connection.execute("CREATE TABLE gone (key TEXT)")
        connection.executemany("INSERT INTO gone VALUES (?)", [("key" * 700,)] * 600)
        connection.execute("DROP TABLE gone")


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.mutant(
    12,
    "growcache.cache.index.writer:IndexWriter._compact",
    "self.log_is_short = index.compact()",
    "",
)
def test_a_lowered_bound_is_reached_with_an_index_that_was_large(
    tmp_path: Path, live: bool
) -> None:
    """Its file keeps the pages of what it has forgotten: the cache would shrink for ever."""
    least = 900_000
    with opened(tmp_path / "cache", max_bytes=60_000_000) as cache:
        for number in range(14):
            add(cache, number, 30)
        if live:
            _grow_index(cache.layout.index)
            cache.max_bytes = least
        cache.evict([candidate.number for candidate in cache.candidates()])
        if live:
            _reached(cache, least)
    if not live:
        _grow_index(cache.layout.index)
        assert cache.layout.index.stat().st_size > least
        with opened(tmp_path / "cache", max_bytes=least) as cache:
            _reached(cache, least)
    assert check(tmp_path / "cache") == []


def _reached(cache: Cache, least: int) -> None:
    cache.maintain()
    cache.poll_leases(time.monotonic())
    assert (cache.space.in_force, cache.shrinking) == (least, False)
    assert cache.bytes_left() > 0
    assert allocated_tree(cache.layout.root) <= least


def test_what_others_write_counts_at_once_where_bytes_are_reserved(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as cache:
        room = cache.bytes_left()
        (tmp_path / "cache" / "foreign").write_bytes(bytes(cache.space.budget.total + 100_000))
        assert cache.bytes_left() == room, "nothing was scanned since"
        assert not cache.reserve("p", room)
        assert cache.bytes_left() <= room - 100_000
        (tmp_path / "cache" / "foreign").unlink()
        cache.poll_leases(time.monotonic())
        assert cache.bytes_left() == room
        assert cache.reserve("p", room)


def test_what_was_deleted_on_a_full_disk_is_noted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlinking makes room, but somebody else may take it before the row can say so."""
    with opened(tmp_path / "cache") as cache:
        add(cache, 0)
        cache.retire([0])
        with monkeypatch.context() as patched:
            patched.setattr(IndexDatabase, "set_state", _refuse)
            with pytest.raises(CacheFullError):
                cache.poll_leases(time.monotonic())
        assert not list(cache.layout.shards.iterdir())
        assert cache.totals().retired_shards == 0
        cache.poll_leases(time.monotonic())
        assert read_index(tmp_path / "cache").totals.retired_shards == 0
    assert check(tmp_path / "cache") == []


@pytest.mark.mutant(
    13,
    "growcache.cache.shard_removal:ShardRemover.poll",
    "self.delete_unheld()\nraise",
    "raise",
)
def test_what_is_let_go_makes_room_where_uses_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    with opened(root) as cache:
        add(cache, 0)
        with Lease.create(root, "train", [0]) as lease:
            assert cache.evict([0]) == ()
            lease.mark_read(0, mapped=False)
        with monkeypatch.context() as patched:
            patched.setattr(IndexDatabase, "finish_leases", _refuse)
            with pytest.raises(CacheFullError):
                cache.poll_leases(time.monotonic())
            assert not list(cache.layout.shards.iterdir())
        cache.poll_leases(time.monotonic())
        assert cache.totals().delivered == 8


def _refuse(*_: object) -> None:
    raise CacheFullError("no room on the disk")
