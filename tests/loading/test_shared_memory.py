"""Shared buffers are filled again, but never while the delivering process can see them."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import CacheError
from growcache.loading import shared_memory
from growcache.loading.buffers import PAGE, RECYCLE_BYTES, BufferBytes, BufferPool
from growcache.loading.child_process import Message, MessageSocket, StopCommand, socket_pair
from growcache.loading.shared_memory import SharedReceiver, SharedSender
from tests.forked import fork
from tests.loading.leftovers import descriptors, held, memory_files, more_than

SIZE = RECYCLE_BYTES


class Ends:
    """Both sides in one process; what is filled is full of its number."""

    def __init__(self, keep: int = 12) -> None:
        ours, theirs = socket_pair()
        self.out, self.into = MessageSocket(ours), MessageSocket(theirs)
        self.shared_sender, self.receiver = SharedSender(self.out), SharedReceiver()
        self.pool = BufferPool(SIZE, keep, self.shared_sender.allocate)
        self.sent = 0

    def pass_on(self) -> BufferBytes:
        """Fill a buffer, and return it as it arrives."""
        self.shared_sender.returned(*self.receiver.take_back())
        self.sent += 1
        memory = self.pool.take()
        memory[:] = self.sent % 251
        self.shared_sender.send(self.out, {"x": memory.view(np.float32)})
        del memory
        arrived: BufferBytes = self.receiver.receive(self.into)["x"].view(np.uint8)
        assert (arrived == self.sent % 251).all()
        return arrived

    def close(self) -> None:
        self.out.close()
        self.into.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_who_delivers_is_told_that_nothing_comes(ends: Ends) -> None:
    arrived = ends.pass_on()
    ends.out.send(Message(StopCommand()))
    with pytest.raises(EOFError):
        ends.receiver.receive(ends.into)
    assert arrived[0] == 1


def place(array: Any) -> tuple[int, int]:
    """Address and inode: a map of another file may have the same address."""
    address = int(np.asarray(array).view(np.uint8).ctypes.data)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        bounds, _, _, _, inode, *_ = line.split()
        low, high = (int(end, 16) for end in bounds.split("-"))
        if low <= address < high:
            return address, int(inode)
    raise AssertionError("not mapped")


def test_a_dropped_buffer_is_filled_again(ends: Ends) -> None:
    first = ends.pass_on()
    where = place(first)
    assert where[0] % PAGE == 0
    del first
    assert place(ends.pass_on()) == where


def test_who_takes_anothers_place_is_reached_by_what_goes_round() -> None:
    shared_sender = SharedSender()
    pool = BufferPool(SIZE, 12, shared_sender.allocate)
    for _ in range(3):
        ours, theirs = map(MessageSocket, socket_pair())
        shared_sender.receivers = [ours]
        memory = pool.take()
        assert shared_sender.reaches(ours, memory)
        shared_sender.send(ours, memory, lend=False)
        assert len(SharedReceiver().receive(theirs)) == SIZE
        del memory
        shared_sender.forget(ours)
        ours.close()
        theirs.close()


VIEWS: dict[str, Callable[[BufferBytes], Any]] = {
    "itself": lambda b: b,
    "slice": lambda b: b[5:6],
    "view of a view": lambda b: b.view(np.float32).reshape(-1, 4)[3],
    "memoryview": lambda b: memoryview(b.data)[2:],
    "dlpack": lambda b: np.from_dlpack(b),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_view_keeps_a_buffer(ends: Ends, view: Callable[[BufferBytes], Any]) -> None:
    held = view(ends.pass_on())
    before = np.asarray(held).copy()
    for _ in range(20):
        ends.pass_on()
    np.testing.assert_array_equal(np.asarray(held), before)


@pytest.mark.torch
@pytest.mark.parametrize("how", ["tensor", "row", "storage", "numpy of a tensor", "detached"])
def test_whatever_torch_makes_of_it_keeps_a_buffer(ends: Ends, how: str) -> None:
    torch = pytest.importorskip("torch")
    made: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda tensor: tensor,
        "row": lambda tensor: tensor.view(-1, 64)[7],
        "storage": lambda tensor: tensor.untyped_storage(),
        "numpy of a tensor": lambda tensor: tensor.view(-1, 64).numpy()[1:3],
        "detached": lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)).detach(),
    }
    held = made[how](torch.from_numpy(ends.pass_on()))
    for _ in range(20):
        ends.pass_on()
    seen = torch.tensor(held, dtype=torch.uint8) if how == "storage" else held
    assert {1} == set(np.unique(np.asarray(seen).view(np.uint8)).tolist())


def test_what_the_user_writes_into_a_batch_is_seen_in_no_other(ends: Ends) -> None:
    kept = [ends.pass_on() for _ in range(3)]
    for number, one in enumerate(kept):
        one[:] = 200 + number
    later = [ends.pass_on() for _ in range(5)]
    assert [int(one[0]) for one in kept] == [200, 201, 202]
    assert all((one == 200 + number).all() for number, one in enumerate(kept))
    del one, later
    kept.clear()
    ends.pass_on()  # it looks whether all of it is what was filled in


@given(
    keep=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40),
)
def test_what_is_kept_never_changes(keep: int, steps: list[tuple[int, bool]]) -> None:
    ends, held = Ends(keep), list[tuple[int, BufferBytes]]()
    for drop, hold in steps:
        arrived = ends.pass_on()
        if hold:
            held.append((ends.sent % 251, arrived[100:200]))
        elif held:
            del held[drop % len(held)]
        del arrived
        for number, view in held:
            assert (view == number).all()
    ends.close()


def test_a_hoarder_costs_neither_side_a_note(ends: Ends) -> None:
    ends.close()
    ends = Ends(keep=2)
    before = descriptors()
    hoard = [ends.pass_on() for _ in range(30)]
    assert [int(one[0]) for one in hoard] == list(range(1, 31))
    assert not descriptors() - before
    hoard.clear()
    assert len({place(ends.pass_on()) for _ in range(10)}) == 1
    ends.close()


def test_many_arrays_of_a_buffer_arrive_whether_it_is_used_once_or_again(ends: Ends) -> None:
    ends.close()
    ends, hoard = Ends(keep=1), []
    for number in range(4):
        taken = ends.pool.take()
        taken[:] = number
        ends.shared_sender.send(ends.out, [taken[i : i + 7] for i in range(0, 70, 7)])
        del taken
        hoard.append(ends.receiver.receive(ends.into))
    for number, parts in enumerate(hoard):
        assert all((part == number).all() for part in parts)
    ends.close()


def test_larger_buffers_replace_smaller_ones_on_both_sides(ends: Ends) -> None:
    before = memory_files()
    for size in range(1, 40):
        taken = ends.pool.take(SIZE * size)
        taken[:] = size
        ends.shared_sender.send(ends.out, taken)
        del taken
        arrived = ends.receiver.receive(ends.into)
        assert arrived[-1] == size
        del arrived
        ends.shared_sender.returned(*ends.receiver.take_back())
    assert memory_files() <= before + 4  # two maps of each


def resident() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("RssShmem:")[2].split()[0])


def test_a_small_batch_after_a_large_one_takes_little_memory() -> None:
    pool = BufferPool(allocate=SharedSender().allocate)
    large = pool.take(64 * SIZE)
    before = resident()
    small = pool.take(4 * SIZE)
    assert 4 * SIZE <= resident() - before < 8 * SIZE
    del large, small


def test_maps_and_descriptors_go_with_both_sides() -> None:
    gc.collect()
    before, maps = held(), memory_files()
    ends = Ends()
    kept = [ends.pass_on() for _ in range(5)]
    ends.pool.take()[:] = 1  # never sent
    ends.close()
    del ends
    gc.collect()
    assert memory_files() == maps + 5
    assert (kept[4] == 5).all()
    kept.clear()
    assert more_than(before) == {}


def test_a_buffer_that_cannot_be_made_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int, nbytes: int) -> BufferBytes:
        raise CacheError("no room for another map")

    monkeypatch.setattr(shared_memory, "map_shared", refuse)
    before = descriptors()
    with pytest.raises(CacheError):
        SharedSender().allocate(SIZE, None)
    assert not descriptors() - before


def test_what_a_forked_child_sees_is_not_filled_again(ends: Ends) -> None:
    held = ends.pass_on()
    ready, go = os.pipe(), os.pipe()
    child = fork()
    if child == 0:
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(0 if (held == 1).all() else 1)
    os.read(ready[0], 1)
    spoiled = place(held)
    del held
    others = {place(ends.pass_on()) for _ in range(20)}
    os.write(go[1], b"1")
    assert os.waitpid(child, 0)[1] == 0
    assert spoiled[1] not in {inode for _, inode in others}
    for descriptor in (*ready, *go):
        os.close(descriptor)


def test_what_a_receiver_has_not_mapped_comes_in_the_message() -> None:
    before = descriptors()
    ends = [tuple(map(MessageSocket, socket_pair())) for _ in range(2)]
    (first, _), (late, into) = ends
    shared_sender = SharedSender(first)
    memory = shared_sender.allocate(SIZE, [])
    memory[:] = 7
    assert not shared_sender.reaches(late, memory)
    shared_sender.send(late, memory, lend=False)
    assert (SharedReceiver().receive(into) == 7).all()
    for connection in (connection for pair in ends for connection in pair):
        connection.close()
    assert not descriptors() - before


def test_a_forked_child_lets_go_of_memory_whatever_another_thread_did() -> None:
    shared_sender = SharedSender()
    held = [shared_sender.allocate(SIZE, None)]
    taken, end = threading.Event(), threading.Event()

    def take_turn() -> None:
        with shared_sender.buffers.lock:
            taken.set()
            end.wait(300)

    thread = threading.Thread(target=take_turn)
    thread.start()
    assert taken.wait(300)
    child = fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        held.clear()
        os._exit(0)
    end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_small_arrays_and_other_values_travel_in_the_message(ends: Ends) -> None:
    value = {
        "a": np.arange(5),
        "b": [b"x", "y", np.zeros((0, 3))],
        "c": np.asfortranarray(np.eye(3)),
    }
    ends.shared_sender.send(ends.out, value)
    found = ends.receiver.receive(ends.into)
    assert found["a"].tolist() == list(range(5))
    assert found["b"][:2] == [b"x", "y"]
    assert found["b"][2].shape == (0, 3)
    np.testing.assert_array_equal(found["c"], np.eye(3))
