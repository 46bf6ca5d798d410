"""Buffers are reused, but never while anyone can still see them."""

from __future__ import annotations

import ctypes
import gc
import pickle
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_small_memory_begins_where_tensorflow_need_not_copy_it() -> None:
    held = [BufferPool(nbytes).take() for nbytes in range(1, 400, 7)]
    assert [len(buffer) for buffer in held] == list(range(1, 400, 7))
    assert not any(address(buffer) % 64 for buffer in held)


# What users hold of a batch, by name; every one of them must keep the memory.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda b: b,
    "slice": lambda b: b[5:6],
    "view of a view": lambda b: b.view(np.float32).reshape(-1, 4)[3],
    "transposed": lambda b: b.reshape(64, -1).T[7:, ::2],
    "iterator": lambda b: iter(b.reshape(64, -1)),
    "closure": lambda b: lambda: b[0],
    "memoryview": lambda b: memoryview(b)[2:],
    "memoryview of a cast": lambda b: memoryview(memoryview(b).cast("d"))[1:3],
    "dlpack": lambda b: np.from_dlpack(b),
    "dlpack capsule": lambda b: b.__dlpack__(),
    "array interface": lambda b: np.asarray(Interface(b)),
    "ctypes attribute": lambda b: b.ctypes,
    "ctypes pointer": lambda b: b.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte)),
    "ctypes array": lambda b: (ctypes.c_ubyte * 16).from_buffer(b, 32),
    "pickled out of band": lambda b: buffers_of(b),
    "record": lambda b: b.view([("a", "<i4"), ("b", "<i4")])["b"],
    "object array": lambda b: np.array([b[1:], None], object),
}
TENSOR_HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda t: t,
    "row": lambda t: t.view(-1, 64)[7],
    "another dtype": lambda t: t.view(-1, 8).select(1, 0),
    "detached": lambda t: t.detach()[3:],
    "storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy()[9:],
    "memoryview of its numpy": lambda t: memoryview(t.numpy()),
    "dlpack to numpy": lambda t: np.from_dlpack(t),
    "dlpack capsule": lambda t: t.__dlpack__(),
    "saved for a backward pass": lambda t: t.view(torch_float32()).mul(weight()).sum(),
}


def torch_float32() -> Any:
    import torch

    return torch.float32


def weight() -> Any:
    """A parameter: a product with it saves its other factor for the backward pass."""
    import torch

    return torch.ones(1, requires_grad=True)


class Interface:
    """Another library's array, which shows NumPy's protocol."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


def buffers_of(array: Any) -> Any:
    """What a process that pickles out of band holds until it has sent it."""
    kept: list[pickle.PickleBuffer] = []
    pickle.dumps(array, protocol=5, buffer_callback=kept.append)
    return kept


def assert_kept_while_held(hold: Callable[[Any], Any], made: Callable[[Any], Any]) -> None:
    """See that a pool gives away other memory while a view is held, and the same after."""
    pool = BufferPool(RECYCLE_BYTES)
    taken = pool.take()
    where = address(taken)
    held = hold(made(taken))
    del taken
    others = [pool.take() for _ in range(3)]
    assert where not in {address(b) for b in others}
    del held, others
    if where not in addresses(pool):
        gc.collect()  # for what a holder's cycle may keep
        assert where in addresses(pool)


def addresses(pool: BufferPool) -> set[int]:
    return {address(buffer) for buffer in [pool.take() for _ in range(4)]}


@pytest.mark.parametrize("name", list(HOLDERS))
def test_whatever_holds_a_view_keeps_the_buffer(name: str) -> None:
    assert_kept_while_held(HOLDERS[name], lambda b: b)


@pytest.mark.torch
@pytest.mark.parametrize("name", list(TENSOR_HOLDERS))
@pytest.mark.parametrize("door", ["from_numpy", "from_dlpack"])
def test_whatever_holds_a_tensor_keeps_the_buffer(name: str, door: str) -> None:
    torch = pytest.importorskip("torch")
    assert_kept_while_held(TENSOR_HOLDERS[name], getattr(torch, door))


def test_a_weak_reference_holds_nothing() -> None:
    pool = BufferPool(RECYCLE_BYTES)
    taken = pool.take()
    where, seen = address(taken), weakref.ref(taken)
    del taken
    assert seen() is None
    assert address(pool.take()) == where


def test_a_thread_that_holds_a_batch_keeps_it() -> None:
    pool = BufferPool(RECYCLE_BYTES)
    given: queue.SimpleQueue[Any] = queue.SimpleQueue()
    has, may_end = threading.Event(), threading.Event()
    seen: list[int] = []

    def hold() -> None:
        batch = given.get()[100:]
        has.set()
        may_end.wait(300)
        seen.append(int(batch.sum()))

    thread = threading.Thread(target=hold)
    thread.start()
    taken = pool.take()
    taken[:] = 1
    where = address(taken)
    given.put(taken)
    del taken
    assert has.wait(300)
    for _ in range(5):
        pool.take()[:] = 7
    may_end.set()
    thread.join()
    assert seen == [RECYCLE_BYTES - 100]
    assert address(pool.take()) == where


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_no_two_holders_ever_share(steps: list[tuple[bool, int]]) -> None:
    """Whatever is taken and dropped in whatever order: each still sees what it wrote."""
    pool = BufferPool(RECYCLE_BYTES, keep=4)
    held: dict[int, Any] = {}
    for number, (drop, which) in enumerate(steps):
        if drop and held:
            del held[sorted(held)[which % len(held)]]
        else:
            held[number] = pool.take()[which:]
            held[number][:] = number
    for number, array in held.items():
        assert (array == number).all()


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


def test_of_other_sizes_what_fits_is_taken() -> None:
    pool = BufferPool()
    held = [pool.take(n * RECYCLE_BYTES) for n in (4, 1, 2)]
    fitting = address(held[2])
    del held
    assert address(pool.take(2 * RECYCLE_BYTES)) == fitting
