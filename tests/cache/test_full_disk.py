"""A file system of its own that is full, and the bound as the disk sees it all the time."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from growcache.cache.check import check
from growcache.cache.eviction import choose
from growcache.cache.files import allocated_tree
from growcache.cache.index import read_index
from growcache.errors import CacheFullError
from tests.cache.making import MAX_BYTES, add, need, opened, write

DISK_BYTES = 1_000_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small tmpfs."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Somebody else takes what is left, to the last block."""
    path = disk / "somebody-elses"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        free = os.statvfs(disk)
        os.posix_fallocate(descriptor, 0, free.f_bavail * free.f_frsize)
    finally:
        os.close(descriptor)
    return path


def test_a_sampler_that_finds_no_room_leaves_nothing(disk: Path) -> None:
    with opened(disk / "cache") as cache:
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            write(cache.layout, "p", 0)
        assert not list(cache.layout.incoming.iterdir())


def test_shards_can_be_evicted_from_a_full_disk(disk: Path) -> None:
    root = disk / "cache"
    with opened(root) as cache:
        for number in range(10):
            add(cache, number)
        cache._index.checkpoint()  # the log must grow again for the next commit
        fill(disk)
        assert cache.layout.ballast.exists()
        assert cache.evict(range(5)) == tuple(range(5))
        assert [row.number for row in read_index(root).shards] == [5, 6, 7, 8, 9]
        assert not check(root)
        (disk / "somebody-elses").unlink()
        cache.maintain()
        assert cache.layout.ballast.exists(), "it is made again"
        add(cache, 10)


def test_a_commit_on_a_full_disk_is_undone(disk: Path) -> None:
    root = disk / "cache"
    with opened(root) as cache:
        add(cache, 0)
        cache._index.checkpoint()
        sidecar = write(cache.layout, "p", 1)
        cache.layout.ballast.unlink()
        fill(disk)
        with pytest.raises(CacheFullError, match="no room"):
            cache.commit("p", [sidecar])
        assert not cache.layout.shard(1).exists()
        assert not list(cache.layout.incoming.iterdir())
        (disk / "somebody-elses").unlink()
        add(cache, 1)
        assert [row.number for row in read_index(root).shards] == [0, 1]


def test_a_cache_opens_on_a_full_disk(disk: Path) -> None:
    root = disk / "cache"
    with opened(root) as cache:
        for number in range(4):
            add(cache, number)
    fill(disk)
    with opened(root) as cache:
        assert cache.evict([0]) == (0,)


def test_the_bound_holds_at_every_instant(tmp_path: Path) -> None:
    root, most, ended = tmp_path / "cache", 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, allocated_tree(root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with opened(root) as cache:
            deadline = time.monotonic() + 3
            number = 0
            while time.monotonic() < deadline or number < 100:
                count = 1 + number % 40
                short = need(number, count) - cache.room()
                cache.evict(choose("fifo", cache.candidates(), short, 0).evict)
                add(cache, number, count)
                cache.append_history({"number": number})
                cache.maintain()
                number += 1
            assert cache.totals().evicted_shards > 50
    finally:
        ended.set()
        watcher.join()
    assert MAX_BYTES / 2 < most <= MAX_BYTES
