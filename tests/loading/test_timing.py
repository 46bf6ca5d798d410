"""When the next snapshot is taken: late, but in time for the slowest preparation known."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.loading.blocks import Block
from growcache.loading.channel import (
    HEAD_START_SECONDS,
    Demand,
    EpochEnd,
    Item,
    QueuedStage,
    head_start_seconds,
)
from growcache.loading.options import LoaderOptions
from growcache.loading.passes import (
    LOOK_SECONDS,
    MARGIN,
    MOST_SLACK_SECONDS,
    SLACK_SECONDS,
    SLACK_SHARE,
    SnapshotTiming,
    is_due,
)
from growcache.loading.plan import PassPosition
from growcache.loading.resume import MissingShards, Position
from growcache.loading.transform import TransformSchema

seconds = st.floats(0.0001, 10)
paces = st.floats(1, 1e7)


@given(st.integers(0, 10**9), paces, seconds, st.integers(0, 10**9))
def test_it_is_due_while_the_rest_lasts_longer_than_the_preparation(
    left: int, pace: float, prepare: float, more: int
) -> None:
    lasts, whole = left / pace, left + more
    if not is_due(left, pace, prepare, whole):
        assert lasts > MARGIN * prepare + SLACK_SECONDS * 0.999
        assert lasts > MARGIN * prepare + min(0.0199 * whole / pace, 0.999)
    elif left:
        assert is_due(left - 1, pace, prepare, whole)
        assert is_due(left, 2 * pace, prepare, whole)
        assert is_due(left, pace, 2 * prepare, whole)
        assert is_due(left, pace, prepare, 2 * whole)
        # It is not early by more than that.
        slack = max(SLACK_SECONDS, min(MOST_SLACK_SECONDS, SLACK_SHARE * whole / pace))
        assert lasts <= (MARGIN * prepare + slack) * 1.001
    assert is_due(0, pace, prepare, whole)


@given(st.integers(0, 10**9), paces)
def test_nothing_is_known_of_the_first_preparation_so_it_is_due_at_once(
    left: int, pace: float
) -> None:
    assert is_due(left, pace, None, left)


class Consumer:
    """Takes batches at a pace of its own, on a clock of its own.

    Args:
        rows: of an epoch.
        batch: rows of a batch.
        step_seconds: from batch to batch.
    """

    def __init__(self, rows: int, batch: int, step_seconds: float) -> None:
        self.rows, self._batch, self._step = rows, batch, step_seconds
        self.now = 0.0

    def begin(self) -> None:
        self._began = self.now

    def left(self) -> int:
        batches = 1 + int((self.now - self._began) / self._step)
        return max(0, self.rows - batches * self._batch)

    def left_seconds(self) -> float:
        return self.rows // self._batch * self._step - (self.now - self._began)

    def pause(self, duration: float) -> bool:
        self.now += duration
        return False

    def clock(self) -> float:
        return self.now


# Epochs of at most 20 s: each look at the consumer is a step of the test.
@given(
    st.integers(1, 200),
    st.integers(1, 100),
    st.floats(1e-4, 0.1),
    st.floats(1e-3, 0.5),
    seconds,
)
def test_a_steady_consumer_waits_for_no_snapshot_that_could_have_come_in_time(
    batches: int, batch: int, step: float, prepare: float, first_prepare: float
) -> None:
    timing, consumer = SnapshotTiming(), Consumer(batches * batch, batch, step)
    timing.learn(first_prepare, 0, first_prepare)
    for epoch in range(4):
        consumer.begin()
        timing.wait(consumer.rows, consumer.left, consumer.pause, consumer.clock)
        slack = consumer.left_seconds()
        before = consumer.left()
        consumer.pause(prepare)
        timing.learn(prepare, before - consumer.left(), prepare)
        if epoch and batches * step > 5 * LOOK_SECONDS:
            # As long before the end as is wanted, but for one look and one batch.
            wanted = prepare + SLACK_SECONDS - LOOK_SECONDS - step
            assert slack >= min(wanted, batches * step - 2 * LOOK_SECONDS - step)


def test_a_long_epoch_takes_its_snapshot_near_the_end() -> None:
    timing, consumer = SnapshotTiming(), Consumer(64_000, 64, 0.01)  # ten seconds
    timing.learn(1.0, 0, 0.05)
    for _ in range(3):
        consumer.begin()
        timing.wait(consumer.rows, consumer.left, consumer.pause, consumer.clock)
        assert 0.2 < consumer.left_seconds() < 0.6
        before = consumer.left()
        consumer.pause(0.05)
        timing.learn(0.05, before - consumer.left(), 0.05)


def test_of_a_pass_of_a_minute_it_is_taken_a_second_before_the_end() -> None:
    timing, consumer = SnapshotTiming(), Consumer(600_000, 100, 0.01)
    timing.learn(1.0, 0, 0.005)
    for _ in range(3):
        consumer.begin()
        timing.wait(consumer.rows, consumer.left, consumer.pause, consumer.clock)
        assert 1 < consumer.left_seconds() < 1.5  # the pace is the fastest that was seen
        before = consumer.left()
        consumer.pause(0.005)
        timing.learn(0.005, before - consumer.left(), 0.005)


@pytest.mark.parametrize("looks", [0, 1, 20])
def test_an_epoch_that_is_left_early_tells_nothing_of_the_pace(looks: int) -> None:
    timing, consumer = SnapshotTiming(), Consumer(64_000, 64, 0.01)  # ten seconds
    timing.learn(1.0, 0, 0.05)
    left_early = False
    for epoch in range(5):
        consumer.begin()
        until = consumer.now + looks * LOOK_SECONDS if epoch == 3 else math.inf

        def left(until: float = until) -> int:
            return consumer.left() if consumer.now < until else 0

        timing.wait(consumer.rows, left, consumer.pause, consumer.clock)
        left_early = consumer.left_seconds() > 9
        assert left_early == (epoch == 3)
        if not left_early:
            assert 0.2 < consumer.left_seconds() < 0.6
            before = consumer.left()
            consumer.pause(0.05)
            timing.learn(0.05, before - consumer.left(), 0.05)
            consumer.pause(consumer.left_seconds())


def test_who_stands_still_is_waited_for_and_a_stop_ends_it() -> None:
    timing, looks = SnapshotTiming(), []
    timing.learn(0.1, 0, 0.1)

    def pause(duration: float) -> bool:
        looks.append(duration)
        return len(looks) == 1000

    timing.wait(100, lambda: 100, pause, lambda: LOOK_SECONDS * len(looks))
    assert len(looks) == 1000


@given(st.integers(1, 2000), st.floats(1e-6, SLACK_SECONDS / 4), st.floats(1e-4, 0.01))
def test_of_epochs_that_are_over_between_two_looks_only_the_first_ones_are_looked_at(
    batches: int, lasts: float, prepare: float
) -> None:
    """Nothing is consumed while they are prepared, so no pace is known but that of whole ones."""
    timing, consumer = SnapshotTiming(), Consumer(batches * 8, 8, lasts / batches)
    timing.learn(prepare, 0, prepare)
    for epoch in range(5):
        consumer.begin()
        began = consumer.now
        timing.wait(consumer.rows, consumer.left, consumer.pause, consumer.clock)
        if epoch > 1:
            assert consumer.now == began
        timing.learn(prepare, 0, prepare)
        consumer.pause(lasts)


def test_a_pause_ends_where_the_consumer_wants_the_next_epoch() -> None:
    link = Demand(3)
    assert not link.pause(3, 0.001)
    woken(link, lambda: link.pause(3, 60), lambda: link.begin(4))
    assert not link.pause(3, 60)
    woken(link, lambda: link.pause(4, 60), link.close)
    assert link.pause(4, 60)


@given(st.floats(0, allow_nan=False))
def test_whoever_is_woken_works_neither_before_nor_after_the_step(step: float) -> None:
    assert 0 <= head_start_seconds(step) <= min(step, HEAD_START_SECONDS)
    assert head_start_seconds(math.inf) == HEAD_START_SECONDS


class Waits(threading.Event):
    """Waits for nothing, and notes for how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


def woken(link: Demand, wait: Callable[[], object], wake: Callable[[], object]) -> None:
    """Have a thread wait for the consumer, which wakes it."""
    thread = threading.Thread(target=wait)
    thread.start()
    wake()
    thread.join()


def test_a_thread_that_the_consumer_wakes_lets_it_go_first() -> None:
    link = Demand(0)
    link.stop, link.step_seconds = waits, _ = Waits(), 0.004
    woken(link, lambda: link.wait_begun(1), lambda: link.begin(1))
    assert waits.seconds == [0.002]


def test_a_consumer_in_another_process_needs_no_head_start() -> None:
    link = Demand(0)
    link.stop, link.acknowledged_per_block = waits, _ = Waits(), True
    woken(link, lambda: link.wait_begun(1), lambda: link.begin(1))
    assert waits.seconds == [0.0]
    assert math.isinf(link.step_seconds)  # no consumer reports it


def test_a_thread_that_waited_for_a_slot_yields_once() -> None:
    link = Demand(0)
    link.stop, link.step_seconds = waits, _ = Waits(), 0.004
    tokens = [link.wait_for_slot(), link.wait_for_slot()]
    link.yield_to_consumer()
    assert (tokens, waits.seconds) == ([True, True], [])
    asked = threading.Event()
    get = link.tokens.get

    class Telling:
        get_nowait = link.tokens.get_nowait
        put = link.tokens.put

        @staticmethod
        def get() -> bool:
            asked.set()
            return get()

    link.tokens = Telling()  # type: ignore[assignment]

    def wake() -> None:
        asked.wait()
        link.end_pass(0)

    woken(link, lambda: tokens.append(link.wait_for_slot()), wake)
    link.yield_to_consumer()
    link.yield_to_consumer()
    assert (tokens[-1], waits.seconds) == (False, [0.002])


def test_the_step_is_from_one_delivery_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    demand = Demand(0)
    assert demand.step_seconds == math.inf
    demand.deliver(PassPosition(0, 1))
    assert demand.step_seconds == math.inf
    for seconds in (0.5, 0.25):
        now[0] += seconds
        demand.deliver(PassPosition(0, 2))
        assert demand.step_seconds == seconds


def test_who_waits_for_a_block_is_in_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    demand = Demand(0)
    demand.deliver(PassPosition(0, 1))
    now[0] += 7.5
    demand.waiting(7.0)
    demand.deliver(PassPosition(0, 2))
    assert demand.step_seconds == 0.5


class Items(QueuedStage):
    """A stage whose thread ends at once: the test puts its items."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(LoaderOptions(tmp_path, batch_size=1))
        self.demand = Demand(0)

    def reset(self, position: Position, missing: MissingShards) -> None:
        raise NotImplementedError

    def put(self, item: Item) -> None:
        self.items.put(item)


def a_block() -> Block:
    marks = [PassPosition(0, 1)]
    return Block(0, 1, [], [], {}, 0, marks, [0], TransformSchema())


def test_whether_a_block_was_waited_for_is_told_with_it(tmp_path: Path) -> None:
    stage, told = Items(tmp_path), []
    for there in (True, False, True):
        if not there:
            assert stage.next(0) is None  # the loop goes on to ask
        stage.put(a_block())
        stage.next()
        told.append(stage.demand.waited)
    assert told == [False, True, False]


def test_an_item_that_was_taken_and_not_returned_is_noticed(tmp_path: Path) -> None:
    stage = Items(tmp_path)
    for n in range(3):
        assert stage.taken == n
        stage.put(EpochEnd(n))
        assert stage.taken == n
        assert stage.next() == EpochEnd(n)
    stage.put(EpochEnd(3))
    stage.items.get()  # an interrupt came here
    assert stage.taken == 4
