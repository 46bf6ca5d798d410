"""``gather="auto"``: begins with a thread, measures, and crosses over to a process and back.

While it crosses nobody waits: the process starts beside the thread, and what the thread has
made is delivered while the process opens what comes behind it. What is delivered is what the
thread alone would have delivered.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from statistics import median
from typing import TypeAlias

from growcache.loading import choice
from growcache.loading.child import Child
from growcache.loading.choice import Totals
from growcache.loading.options import Gather
from growcache.loading.sources import Kind, Source
from growcache.loading.state import LoaderState

# cross(child, state): the source that goes on behind a state, in the process that was started.
Cross: TypeAlias = Callable[[Child, LoaderState], Source]

_log = logging.getLogger(__name__)
_FIGURES = "%.3g ms per step, of which %.3g are lost; with the thread %.3g, and %.3g"


class Phase(Enum):
    """How far a crossing has come."""

    MEASURING = auto()  # beside the thread
    STARTING = auto()  # the process; the thread goes on
    HALTING = auto()  # the thread makes its last block
    CROSSED = auto()  # the process is ordered: measured beside it, once it delivers
    SETTLED = auto()


class Chooser:
    """Follows one loader; used by its consumer's thread.

    Args:
        gather: as the options say.
        possible: whether there is a choice.

    Attributes:
        kind: of source to start with.
        next: the source that goes on where the thread will have halted.
    """

    def __init__(self, gather: Gather, *, possible: bool) -> None:
        self.kind: Kind = "process" if gather == "process" else "thread"
        self._phase = Phase.MEASURING if possible else Phase.SETTLED
        self._consumer = 0  # the thread, for the time that it computes is looked at
        self._before: Totals | None = None  # at the beginning of this trial
        self._by_thread: deque[Totals] = deque(maxlen=choice.TRIALS)
        self._by_process: list[Totals] = []
        self._tries = 0  # of a process that did not stay
        self._rest_until = -math.inf  # before another one
        self._child: Child | None = None
        self.next: Source | None = None

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to look at."""
        return self._phase is Phase.SETTLED

    def look(self, source: Source, now: Totals, cross: Cross) -> None:
        """Take the next step of a crossing, if it is time for it.

        Args:
            source: that a block was just received from.
            now: what was counted so far.
            cross: makes the source that goes on.
        """
        if (consumer := threading.get_ident()) != self._consumer:
            self._consumer, self._before = consumer, None
        match self._phase:
            case Phase.MEASURING if source.kind == "thread" and now.seconds >= self._rest_until:
                self._measure(now)
            case Phase.STARTING if self._child is not None and self._child.speaks():
                source.halt()
                self._phase = Phase.HALTING
            case Phase.HALTING if source.halted is not None and self._child is not None:
                self.next = cross(self._child, source.halted)
                self._phase, self._before, self._by_process = Phase.CROSSED, None, []
            case Phase.CROSSED if source.kind == "process":
                self._judge(source, now)

    def _tried(self, now: Totals) -> Totals | None:
        """Return a trial that ends now; None where it goes on."""
        if self._before is None:
            self._before = now
        tried = now.since(self._before)
        if not tried.whole:
            return None
        self._before = now
        return tried

    def _measure(self, now: Totals) -> None:
        tried = self._tried(now)
        if tried is None:
            return
        self._by_thread.append(tried)
        if choice.wants_process(self._by_thread, len(os.sched_getaffinity(0))):
            _log.info(
                "the thread that makes batches stands still %.0f %% of its time, for want of the "
                "interpreter's lock: starting a gather process",
                100 * median(trial.stalled_share for trial in self._by_thread),
            )
            self._start()

    def _start(self) -> None:
        try:
            self._child = Child()
        except OSError as error:  # too many processes, or the working directory is gone
            _log.warning("no gather process can be started, the thread goes on: %s", error)
            self.give_up()
        else:
            self._phase = Phase.STARTING

    def _judge(self, source: Source, now: Totals) -> None:
        tried = self._tried(now)
        if tried is None:
            return
        self._by_process.append(tried)
        trials = self._by_process[1:]  # what was made ahead flatters the first
        latest = trials[-choice.TRIALS :]
        if len(latest) < choice.TRIALS:
            return
        if choice.keeps_process(self._by_thread, latest):
            self.kind, self._phase = "process", Phase.SETTLED
            _log.info("the gather process stays: %s", self._figures(latest))
        elif len(trials) >= choice.MOST_TRIALS:
            _log.info("back to the thread: %s", self._figures(latest))
            self._rest(now)
            source.halt()

    def _figures(self, by_process: Sequence[Totals]) -> str:
        process, thread = (
            (
                1e3 * median(t.batch_seconds for t in of),
                1e3 * median(t.lost_seconds for t in of),
            )
            for of in (by_process, self._by_thread)
        )
        return _FIGURES % (*process, *thread)

    def _rest(self, now: Totals) -> None:
        """Stay with the thread, until it is time for another try."""
        self._tries += 1
        seconds = choice.rest_seconds(self._tries)
        if seconds is None:
            self._phase = Phase.SETTLED
        else:
            self._begin_anew()
            self._rest_until = now.seconds + seconds

    def _begin_anew(self) -> None:
        self._phase, self._before = Phase.MEASURING, None
        self._by_thread.clear()

    def crossed(self) -> Source | None:
        """Return the source that goes on where the thread has halted.

        None where it halts in a process, or had not said so when its last block came.
        """
        source, self.next = self.next, None
        if source is None:
            self.close()
        self._child = None
        return source

    def give_up(self) -> None:
        """Stay with the thread from now on: the process died, or could not be started."""
        self.kind, self._phase = "thread", Phase.SETTLED

    def close(self) -> None:
        """End a process that nobody uses yet; what was not settled begins with the thread."""
        if self._child is not None:
            self._child.close()
            self._child = self.next = None
        if not self.settled:
            self._begin_anew()
