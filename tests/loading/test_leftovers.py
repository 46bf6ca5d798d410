"""What a loader leaves is what the next one fills, and nothing that anybody still sees."""

from __future__ import annotations

import threading

import pytest

from growcache.loading.buffers import CACHED_BYTES, RECYCLE_BYTES, BufferCache, BufferPool
from growcache.loading.framework import Framework
from tests.sampling.services import wait_until

LONG = 60.0


def address(buffer: object) -> int:
    return int(buffer.ctypes.data)  # type: ignore[attr-defined]


def test_a_pool_begins_with_what_another_one_left() -> None:
    buffer_cache = BufferCache(LONG)
    framework = Framework(buffer_cache=buffer_cache)
    first = framework.pool("x", RECYCLE_BYTES)
    where = address(first.take())
    framework.leave("x", first)
    assert address(framework.pool("y", RECYCLE_BYTES).take()) != where
    assert address(framework.pool("x", RECYCLE_BYTES).take()) == where
    assert buffer_cache.take("x") == []
    buffer_cache.close()


def test_what_is_still_seen_is_left_but_not_taken() -> None:
    buffer_cache = BufferCache(LONG)
    framework = Framework(buffer_cache=buffer_cache)
    first = framework.pool("x", RECYCLE_BYTES)
    held = first.take()
    held[:] = 7
    where = address(held)
    framework.leave("x", first)
    assert address(first.take()) != where  # it is not the first one's any more
    second = framework.pool("x", RECYCLE_BYTES)
    others = [second.take() for _ in range(20)]
    assert where not in map(address, others)
    for other in others:
        other[:] = 0
    assert (held == 7).all()
    del held
    assert address(second.take()) == where
    buffer_cache.close()


def test_of_other_sizes_what_fits_is_taken() -> None:
    pool = BufferPool()
    held = [pool.take(n * RECYCLE_BYTES) for n in (4, 1, 2)]
    del held
    places = {len(base): address(base) for base in pool._bases}
    assert len(places) == 3
    then = BufferPool(bases=reversed(pool.leave()))
    found = then.take(2 * RECYCLE_BYTES)
    base = min(size for size in places if size >= 2 * RECYCLE_BYTES)
    assert places[base] <= address(found) < places[base] + base


def test_so_much_is_kept_and_so_long() -> None:
    buffer_cache = BufferCache(0.05)
    left = [BufferPool().take(CACHED_BYTES // 3) for _ in range(5)]
    buffer_cache.leave("x", left[:2])
    buffer_cache.leave("x", left[2:])
    assert len(buffer_cache.take("x")) == 3
    buffer_cache.leave("x", left)
    wait_until(lambda: not buffer_cache._bases, 5)
    buffer_cache.close()
    buffer_cache.leave("x", left)
    assert buffer_cache.take("x") == []


def test_where_no_thread_can_start_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", fail)
    buffer_cache = BufferCache(60)
    buffer_cache.leave("x", [BufferPool().take(1000)])
    assert buffer_cache.take("x") == []
    buffer_cache.close()
