"""Which calls of a user's function count as late."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from growcache.loading.transform import (
    SlowCallWatch,
    ThreadExecutor,
    TransformCall,
    TransformRows,
)


def test_a_call_is_told_of_after_its_time_and_each_time_that_has_doubled() -> None:
    told: list[tuple[int, float]] = []
    late: SlowCallWatch = SlowCallWatch(2.0, lambda call, seconds: told.append((call, seconds)))
    for now in range(11):
        late.look({1: (7, 0.0)}, now)
    assert told == [(7, 2.0), (7, 4.0), (7, 8.0)]


def test_short_calls_of_the_same_row_are_not_one_long_call() -> None:
    """Where processes get one row at a time, each call is with row 0."""
    told: list[int] = []
    late: SlowCallWatch = SlowCallWatch(2.0, lambda call, seconds: told.append(call))
    for now in range(100):
        late.look({1: (0, now - 0.5)}, now)
    assert not told


def test_a_thread_that_has_nothing_left_to_do_is_not_late() -> None:
    told: list[int] = []
    goes_on = threading.Event()

    def function(sample: Any) -> Any:
        if sample["id"] == 0:
            goes_on.wait(300)
        return sample

    def tell(row: int, seconds: float) -> None:
        told.append(row)
        if seconds > 0.5:  # it was looked at often
            goes_on.set()

    executor = ThreadExecutor(TransformCall(function, 0))
    try:
        rows = TransformRows({"id": np.arange(3)}, [(0, i) for i in range(3)], None)
        executor.run(rows, SlowCallWatch(0.1, tell))
    finally:
        executor.close()
    assert set(told) == {0}
