"""Thread or process: the decision of ``gather="auto"``. Pure.

A thread that gathers costs the training loop nothing while it copies, for that needs no
interpreter lock. But it needs the lock between two copies, and beside a loop that is busy in
Python it gets it only every switch interval (5 ms). Then the thread stands still; the loop
waits for it, or for the lock that the thread took where the loop let go of it for a moment,
which no clock around the wait for batches shows. So what tells that a process may help is that
the thread stands still, and what tells that it does help is the time of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS = 1.0  # that one measurement lasts
WINDOWS = 2  # in a row that must agree, for a step may be an unusual one
LEAST_BATCHES = 4  # of a measurement
LEAST_STALLED_SHARE = 0.3  # of the thread's time for blocks that it does not compute
LEAST_STALLED_TIME = 0.02  # the same, of the loop's time
LEAST_GAIN = 0.03  # of the loop's time; below it a process is not worth its memory


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted so far.

    Attributes:
        seconds: on the clock.
        batches: that it received.
        making_seconds: that the thread took for blocks, without waiting for the loop, for
            samples or for files that are opened.
        computed_seconds: of these, its CPU time.
    """

    seconds: float = 0.0
    batches: int = 0
    making_seconds: float = 0.0
    computed_seconds: float = 0.0

    def since(self, before: Totals) -> Totals:
        """Return what was counted since then."""
        return Totals(
            self.seconds - before.seconds,
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
    def stalled_share(self) -> float:
        """The share of the thread's time for blocks that it did not compute."""
        return self.stalled_seconds / self.making_seconds if self.making_seconds > 0 else 0.0

    @property
    def stalled_seconds(self) -> float:
        """Seconds of the thread's time for blocks in which it did not compute."""
        return self.making_seconds - self.computed_seconds


def wants_process(measured: Totals, cores: int) -> bool:
    """Return whether a process would help a loop that a thread gathers for.

    Args:
        measured: beside the thread.
        cores: that this process may use.

    >>> wants_process(Totals(1.0, 100, 0.3, 0.1), cores=2)
    True
    >>> wants_process(Totals(1.0, 100, 0.9, 0.85), cores=2)  # as fast as memory is
    False
    """
    return (
        cores > 1
        and measured.stalled_share >= LEAST_STALLED_SHARE
        and measured.stalled_seconds >= LEAST_STALLED_TIME * measured.seconds
    )


def keeps_process(by_thread: Totals, by_process: Totals) -> bool:
    """Return whether the process helped: the loop is faster.

    Args:
        by_thread: measured before.
        by_process: measured since.
    """
    return by_process.batch_seconds <= (1 - LEAST_GAIN) * by_thread.batch_seconds
