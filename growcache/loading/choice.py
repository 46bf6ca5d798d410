"""Thread or process: the decision of ``gather="auto"``. Pure.

A thread that gathers costs the training loop nothing while it copies, for that needs no
interpreter lock. But it needs the lock between two copies, and beside a loop that is busy in
Python it gets it only every switch interval (5 ms). Then the thread stands still; the loop
waits for it, or for the lock that the thread took where the loop let go of it for a moment,
which no clock around the wait for batches shows. So what tells that a process may help is that
the thread stands still. What tells that it does help is that the loop loses less of its time:
seconds in which its own thread did not compute. The time of a step does not tell, for the same
step may take half as long again a second later, where others use the machine.

What others do for some seconds may hide a gain, and a loop that goes on for days should not
stay with the thread for that. To try a process costs little. So it has several seconds to show
what it does, in which it also opens what the thread had open, and is tried again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TRIAL_SECONDS = 0.2
TRIALS = 5  # that are judged by their median, for a step may be an unusual one
MOST_TRIALS = 15  # of a process, of which the latest are judged each time, until it goes
TRIES = 3  # of a process
REST_SECONDS = 30.0  # with the thread after the first of them; then four times that
LEAST_BATCHES = 4  # of a trial
LEAST_STALLED_SHARE = 0.3  # of the thread's time for blocks that it does not compute
LEAST_STALLED_TIME = 0.02  # the same, of the loop's time
LEAST_GAIN = 0.015  # of the loop's time; below it a process is not worth its memory


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted so far.

    Attributes:
        seconds: on the clock.
        batches: that it received.
        making_seconds: that the thread took for blocks, without waiting for the loop, for
            samples or for files that are opened.
        computed_seconds: of these, its CPU time.
        loop_seconds: CPU time of the loop's thread.
    """

    seconds: float = 0.0
    batches: int = 0
    making_seconds: float = 0.0
    computed_seconds: float = 0.0
    loop_seconds: float = 0.0

    def since(self, before: Totals) -> Totals:
        """Return what was counted since then."""
        return Totals(
            self.seconds - before.seconds,
            self.batches - before.batches,
            self.making_seconds - before.making_seconds,
            self.computed_seconds - before.computed_seconds,
            self.loop_seconds - before.loop_seconds,
        )

    @property
    def whole(self) -> bool:
        """Whether it is enough for a trial."""
        return self.seconds >= TRIAL_SECONDS and self.batches >= LEAST_BATCHES

    @property
    def batch_seconds(self) -> float:
        """Seconds of the loop per batch."""
        return self.seconds / self.batches

    @property
    def lost_seconds(self) -> float:
        """Seconds per batch in which the loop's thread did not compute."""
        return (self.seconds - self.loop_seconds) / self.batches

    @property
    def stalled_share(self) -> float:
        """The share of the thread's time for blocks that it did not compute."""
        return self.stalled_seconds / self.making_seconds if self.making_seconds > 0 else 0.0

    @property
    def stalled_seconds(self) -> float:
        """Seconds of the thread's time for blocks in which it did not compute."""
        return self.making_seconds - self.computed_seconds


def wants_process(trials: Sequence[Totals], cores: int) -> bool:
    """Return whether a process would help a loop that a thread gathers for.

    Args:
        trials: the latest, beside the thread.
        cores: that this process may use.

    >>> wants_process([Totals(1.0, 100, 0.3, 0.1)] * 5, cores=2)
    True
    >>> wants_process([Totals(1.0, 100, 0.9, 0.85)] * 5, cores=2)  # as fast as memory is
    False
    """
    return (
        cores > 1
        and len(trials) >= TRIALS
        and median(t.stalled_share for t in trials) >= LEAST_STALLED_SHARE
        and median(t.stalled_seconds / t.seconds for t in trials) >= LEAST_STALLED_TIME
    )


def keeps_process(by_thread: Sequence[Totals], by_process: Sequence[Totals]) -> bool:
    """Return whether the process helped: the loop loses less of its time.

    Args:
        by_thread: trials before.
        by_process: trials since.

    >>> thread = Totals(1.0, 100, loop_seconds=0.95)
    >>> keeps_process([thread], [Totals(1.2, 100, loop_seconds=1.19)])  # a slower machine
    True
    >>> keeps_process([thread], [Totals(0.8, 100, loop_seconds=0.75)])  # a faster one
    False
    """
    lost, still = (median(t.lost_seconds for t in of) for of in (by_thread, by_process))
    return lost - still >= LEAST_GAIN * median(t.batch_seconds for t in by_thread)


def rest_seconds(tries: int) -> float | None:
    """Return how long the thread goes on after so many tries of a process; None: for good.

    >>> [rest_seconds(tries) for tries in (1, 2, 3)]
    [30.0, 120.0, None]
    """
    return REST_SECONDS * 4 ** (tries - 1) if tries < TRIES else None
