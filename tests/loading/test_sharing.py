"""Copies of which another thread makes half."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.loading.channel import Demand
from growcache.loading.framework import (
    LONG_ROW_BYTES,
    MIN_PARALLEL_BYTES,
    NUMPY,
    Bytes,
    Framework,
    Integers,
    ParallelCopies,
    take_rows,
)
from growcache.torch import EpochLoader
from tests.filled import Filled

ROW_BYTES = 64 * 1024
ROWS = MIN_PARALLEL_BYTES // ROW_BYTES + 1
MEMORY = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)
NAME = "growcache-copies"

TWO_CORES = len(os.sched_getaffinity(0)) > 1
two_cores = pytest.mark.skipif(not TWO_CORES, reason="needs two cores")


class Recorded:
    """Copies as NumPy does, and knows which threads did."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.prepared: list[str] = []
        self.bytes = 0

    def framework(self) -> Framework:
        return Framework(self.take, prepare=self.prepare, frees_lock=True)

    def prepare(self) -> None:
        self.prepared.append(threading.current_thread().name)

    def take(self, memory: Bytes, starts: Integers, out: Bytes) -> None:
        take_rows(memory, starts, out)
        self.threads.append(threading.current_thread().name)
        self.bytes += out.nbytes


@contextmanager
def shared(framework: Framework, *, waits: bool = True) -> Iterator[Framework]:
    with closing(ParallelCopies(framework, lambda: waits)) as copies:
        yield copies.lent()
    assert NAME not in {thread.name for thread in threading.enumerate()}


def rows(count: int = ROWS) -> tuple[Integers, Bytes]:
    starts = np.random.default_rng(1).integers(0, len(MEMORY) - ROW_BYTES, count)
    return starts, np.zeros((count, ROW_BYTES), np.uint8)


@pytest.mark.parametrize("framework", [NUMPY, EpochLoader.framework], ids=["numpy", "torch"])
@settings(deadline=None, max_examples=20)
@given(count=st.integers(1, 3 * ROWS), waits=st.booleans(), seed=st.integers(0, 99))
def test_what_two_copy_is_what_one_copies(
    framework: Framework, count: int, waits: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 2 * ROW_BYTES, count)
    starts = rng.integers(0, len(MEMORY) - lengths)
    memory = MEMORY.copy()  # torch warns about memory that may only be read
    with shared(framework, waits=waits) as lent:
        equal = np.zeros((count, ROW_BYTES), np.uint8)
        begins = rng.integers(0, len(memory) - ROW_BYTES, count)
        lent.take(memory, begins, equal)
        varied = np.zeros(lengths.sum(), np.uint8)
        if len(varied):
            lent.take_slices(memory, starts, lengths, varied)
    assert np.array_equal(equal, np.stack([memory[b : b + ROW_BYTES] for b in begins]))
    each = [memory[b : b + n] for b, n in zip(starts, lengths, strict=True)]
    assert np.array_equal(varied, np.concatenate(each))


def test_values_of_any_size_are_cut_between_two() -> None:
    huge = np.array([0, 0, MIN_PARALLEL_BYTES, 0, 1, ROW_BYTES])
    memory = np.random.default_rng(2).integers(0, 256, MIN_PARALLEL_BYTES, np.uint8)
    for lengths in (huge, huge[::-1].copy(), huge[2:4], huge[1:3]):
        out = np.zeros(lengths.sum(), np.uint8)
        with shared(NUMPY) as lent:
            lent.take_slices(memory, np.zeros_like(lengths), lengths, out)
        assert np.array_equal(out, np.concatenate([memory[:n] for n in lengths]))


@two_cores
def test_two_threads_copy_where_the_loop_waits() -> None:
    recorded, both = Recorded(), threading.Barrier(2)

    def take(memory: Bytes, starts: Integers, out: Bytes) -> None:
        both.wait(300)  # else a busy machine leaves both halves to the first thread
        recorded.take(memory, starts, out)

    with shared(replace(recorded.framework(), take=take)) as lent:
        for _ in range(20):
            starts, out = rows(4 * ROWS)
            lent.take(MEMORY, starts, out)
    assert recorded.threads.count(NAME) == 20
    assert recorded.bytes == 20 * out.nbytes
    assert recorded.prepared == [NAME]


@two_cores
def test_two_threads_copy_a_single_row() -> None:
    memory = np.random.default_rng(3).integers(0, 256, 3 * MIN_PARALLEL_BYTES + 7, np.uint8)
    recorded = Recorded()
    with shared(recorded.framework()) as lent:
        for start in (0, 4, 7):
            out = np.zeros((1, len(memory) - 7), np.uint8)
            lent.take(memory, np.array([start]), out)
            assert np.array_equal(out[0], memory[start : start + out.size])
    assert len(recorded.threads) == 6
    assert recorded.bytes == 3 * out.nbytes


def test_a_value_that_is_copied_in_one_call_is_not_cut_into_halves_of_many() -> None:
    """One of short values would let go of the lock for each."""
    calls: list[list[int]] = []

    def take_slices(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> None:
        calls.append(lengths.tolist())

    short, long = [LONG_ROW_BYTES // 2] * 200, [2 * MIN_PARALLEL_BYTES]
    framework = Framework(take_slices=take_slices, frees_lock=True)
    with shared(framework) as lent:
        for lengths in (short + long, long + short, [0, *long], [*long, 0]):
            starts, out = np.zeros(len(lengths), np.int64), np.zeros(sum(lengths), np.uint8)
            lent.take_slices(MEMORY, starts, np.array(lengths), out)
            assert calls.pop() == lengths
            assert not calls


def test_where_no_thread_can_be_started_one_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded()
    framework = recorded.framework()
    with shared(framework) as lent:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no more")))
            starts, out = rows()
            lent.take(MEMORY, starts, out)
        assert recorded.threads == [threading.current_thread().name] * (2 if TWO_CORES else 1)
        assert np.array_equal(out[-1], MEMORY[starts[-1] : starts[-1] + ROW_BYTES])
        lent.take(MEMORY, starts, out)  # and the thread that comes later is a prepared one
    assert recorded.prepared == [NAME] * TWO_CORES


@two_cores
def test_a_loop_that_waits_has_two_threads_that_copy_and_none_once_closed(
    make_cache: Callable[..., Filled],
) -> None:
    cache = make_cache(shape=(200, 200))
    cache.add(*range(64))
    with EpochLoader(cache.root, batch_size=32, min_samples=1, gather="thread") as loader:
        for _ in range(50):
            for batch in loader:
                x = batch["x"].reshape(32, -1)
                assert (x == batch["id"][:, None]).all()
            if NAME in {thread.name for thread in threading.enumerate()}:
                break
        else:
            pytest.fail("one thread alone copied for a loop that waits")
    assert NAME not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("waits", "waited", "step_seconds", "hurries"),
    [
        (True, False, 1.0, True),
        (False, True, 0.0005, True),
        (False, True, 0.005, False),  # it computes now: a second thread would be in its way
        (False, False, 0.0005, False),
    ],
)
def test_a_loop_that_computes_is_not_disturbed_because_it_waited_once(
    waits: bool, waited: bool, step_seconds: float, hurries: bool
) -> None:
    link = Demand(0)
    link.waits, link.waited, link.step_seconds = waits, waited, step_seconds
    assert link.is_urgent() == hurries


@two_cores
def test_the_wait_for_the_other_half_is_known() -> None:
    """Or it would be taken for one for the interpreter's lock."""

    both = threading.Barrier(2)

    def slow(memory: Bytes, starts: Integers, out: Bytes) -> None:
        both.wait(300)
        if threading.current_thread().name == NAME:
            time.sleep(0.3)  # a busy machine lets the loop begin to wait within a part of it

    with closing(ParallelCopies(Framework(slow, frees_lock=True), lambda: True)) as copies:
        copies.lent().take(MEMORY, *rows())
        assert 0.03 < copies.waited_seconds < 30


@pytest.mark.parametrize(("waits", "count"), [(False, 4 * ROWS), (True, 1), (True, ROWS // 2)])
def test_one_thread_copies_where_it_does_not_or_it_is_little(waits: bool, count: int) -> None:
    recorded = Recorded()
    with shared(recorded.framework(), waits=waits) as lent:
        lent.take(MEMORY, *rows(count))
        assert NAME not in {thread.name for thread in threading.enumerate()}
    assert recorded.threads == [threading.current_thread().name]


def test_copies_that_hold_the_lock_are_not_shared() -> None:
    plain = Framework()
    with shared(plain) as lent:
        assert lent is plain


@two_cores
def test_nobody_waits_for_a_thread_that_does_not_come() -> None:
    recorded, free = Recorded(), threading.Event()

    def late() -> None:
        assert free.wait(300)

    framework = Framework(recorded.take, prepare=late, frees_lock=True)
    with closing(ParallelCopies(framework, lambda: True)) as copies:
        starts, out = rows()
        copies.lent().take(MEMORY, starts, out)
        assert recorded.threads == [threading.current_thread().name] * 2
        assert np.array_equal(out[-1], MEMORY[starts[-1] : starts[-1] + ROW_BYTES])
        free.set()


@two_cores
@pytest.mark.parametrize("bad", [0, -1])
def test_an_error_comes_when_nothing_is_copied_any_more(bad: int) -> None:
    recorded = Recorded()
    with shared(recorded.framework()) as lent:
        starts, out = rows()
        starts[bad] = len(MEMORY)
        with pytest.raises(IndexError):
            lent.take(MEMORY, starts, out)
        assert len(recorded.threads) == 1  # the other half is there
        starts[bad] = 0
        lent.take(MEMORY, starts, out)  # and goes on
        assert np.array_equal(out[bad], MEMORY[:ROW_BYTES])
