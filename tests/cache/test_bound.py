"""The bound as the disk sees it, all the time and not only between two steps."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from growcache.cache.eviction import choose
from growcache.cache.files import allocated_tree
from tests.cache.making import KINDS, MAX_BYTES, add, need, opened


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_at_every_instant(tmp_path: Path, kind: str) -> None:
    root, most, ended = tmp_path / "cache", 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, allocated_tree(root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with opened(root, KINDS[kind]) as cache:
            deadline = time.monotonic() + 1.5
            number = 0
            while time.monotonic() < deadline or number < 100:
                count = 1 + number % 40
                short = need(number, count, KINDS[kind]) - cache.room()
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
