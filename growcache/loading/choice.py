"""Thread or process: the decision of ``gather="auto"``. Pure.

A thread that gathers costs the training loop nothing while it copies, for that needs no
interpreter lock. But it needs the lock between two copies, and beside a loop that is busy in
Python it gets it only every switch interval (5 ms). Then the loop waits for batches while the
thread waits for the lock; a process has a lock of its own. Where the loop does not wait, or
where the thread computes all the time, a process would only cost memory.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS = 1.0  # that one measurement lasts
WINDOWS = 2  # in a row that must agree, for a step may be an unusual one
LEAST_BATCHES = 4  # of a measurement
LEAST_WAIT_SHARE = 0.02  # of the loop's time that it waits for batches
LEAST_STALLED_SHARE = 0.3  # of the thread's time for blocks that it does not compute


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted so far.

    Attributes:
        seconds: on the clock.
        waited_seconds: that the loop waited for batches.
        batches: that it received.
        making_seconds: that the thread took for blocks, without waiting for the loop, for
            samples or for files that are opened.
        computed_seconds: of these, its CPU time.
    """

    seconds: float = 0.0
    waited_seconds: float = 0.0
    batches: int = 0
    making_seconds: float = 0.0
    computed_seconds: float = 0.0

    def since(self, before: Totals) -> Totals:
        """Return what was counted since then."""
        return Totals(
            self.seconds - before.seconds,
            self.waited_seconds - before.waited_seconds,
            self.batches - before.batches,
            self.making_seconds - before.making_seconds,
            self.computed_seconds - before.computed_seconds,
        )

    @property
    def whole(self) -> bool:
        """Whether it is enough to judge by."""
        return self.seconds >= WINDOW_SECONDS and self.batches >= LEAST_BATCHES

    @property
    def batch_seconds(self) -> float:
        """Seconds of the loop per batch."""
        return self.seconds / self.batches

    @property
    def wait_share(self) -> float:
        """The share of the loop's time that it waited."""
        return self.waited_seconds / self.seconds

    @property
    def stalled_share(self) -> float:
        """The share of the thread's time that it did not compute."""
        stalled = self.making_seconds - self.computed_seconds
        return stalled / self.making_seconds if self.making_seconds > 0 else 0.0


def wants_process(measured: Totals, cores: int) -> bool:
    """Return whether a process would help a loop that a thread gathers for.

    Args:
        measured: beside the thread.
        cores: that this process may use.

    >>> wants_process(Totals(1.0, 0.2, 100, 0.9, 0.3), cores=2)
    True
    >>> wants_process(Totals(1.0, 0.9, 100, 0.9, 0.85), cores=2)  # as fast as memory is
    False
    """
    return (
        cores > 1
        and measured.wait_share >= LEAST_WAIT_SHARE
        and measured.stalled_share >= LEAST_STALLED_SHARE
    )


def keeps_process(by_thread: Totals, by_process: Totals) -> bool:
    """Return whether the process helped: the loop is not slower, and waits for less.

    Args:
        by_thread: measured before.
        by_process: measured since.
    """
    waited = by_process.waited_seconds / by_process.batches
    return (
        by_process.batch_seconds <= by_thread.batch_seconds
        or waited < 0.5 * by_thread.waited_seconds / by_thread.batches
    )
