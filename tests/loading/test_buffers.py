"""Buffers are reused, but never while anyone can still see them."""

import numpy as np
import pytest

from growcache.loading.buffers import PAGE, RECYCLE_BYTES, BufferPool


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_a_dropped_buffer_is_taken_again() -> None:
    pool = BufferPool(RECYCLE_BYTES)
    first = pool.take()
    where = address(first)
    assert where % PAGE == 0
    assert len(first) == RECYCLE_BYTES
    del first
    assert address(pool.take()) == where


@pytest.mark.parametrize(
    "view",
    [
        lambda b: b,
        lambda b: b[5:6],
        lambda b: b.view(np.float32).reshape(-1, 4)[3],
        lambda b: memoryview(b)[2:],
        lambda b: np.from_dlpack(b),
    ],
    ids=["itself", "slice", "view of a view", "memoryview", "dlpack"],
)
def test_any_view_keeps_a_buffer(view) -> None:  # type: ignore[no-untyped-def]
    pool = BufferPool(RECYCLE_BYTES)
    held = view(pool.take())
    seen = [pool.take() for _ in range(3)]
    addresses = {address(b) for b in seen}
    assert len(addresses) == 3
    kept = np.asarray(held)
    low, high = address(kept), address(kept) + kept.nbytes
    assert all(high <= a or low >= a + RECYCLE_BYTES for a in addresses)


@pytest.mark.torch
def test_a_tensor_keeps_its_buffer() -> None:
    torch = pytest.importorskip("torch")
    pool = BufferPool(RECYCLE_BYTES)
    row = torch.from_numpy(pool.take()).view(-1, 64)[7]
    where = row.data_ptr() - 7 * 64
    assert address(pool.take()) != where
    del row
    assert where in {address(b) for b in [pool.take(), pool.take()]}


def test_a_hoarder_gets_memory_of_their_own() -> None:
    pool = BufferPool(RECYCLE_BYTES, keep=2)
    hoard = [pool.take() for _ in range(6)]
    assert len({address(b) for b in hoard}) == 6
    hoard.clear()
    assert len({address(b) for b in [pool.take(), pool.take()]}) == 2


def test_small_buffers_are_never_shared() -> None:
    pool = BufferPool(100)
    a = pool.take()
    a[:] = 1
    b = pool.take()
    b[:] = 2
    assert a.sum() == 100
