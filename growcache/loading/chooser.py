"""``gather="auto"``: begins with a thread, measures, and crosses over to a process and back.

While it crosses nobody waits: the process starts beside the thread, and what the thread has
made is delivered while the process opens what comes behind it. What is delivered is what the
thread alone would have delivered.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum, auto
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
        self._before: Totals | None = None  # at the beginning of this measurement
        self._agreed = 0
        self._judged = 0
        self._first = self._by_thread = Totals()
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
        match self._phase:
            case Phase.MEASURING:
                self._measure(now)
            case Phase.STARTING if self._child is not None and self._child.speaks():
                source.halt()
                self._phase = Phase.HALTING
            case Phase.HALTING if source.halted is not None and self._child is not None:
                self.next = cross(self._child, source.halted)
                self._phase, self._before, self._judged = Phase.CROSSED, None, 0
            case Phase.CROSSED if source.kind == "process":
                self._judge(source, now)

    def _measured(self, now: Totals) -> Totals | None:
        """Return a measurement that ends now; None where it goes on."""
        if self._before is None:
            self._before = now
        measured = now.since(self._before)
        if not measured.whole:
            return None
        self._before = now
        return measured

    def _measure(self, now: Totals) -> None:
        began, measured = self._before, self._measured(now)
        if measured is None or began is None:
            return
        cores = len(os.sched_getaffinity(0))
        if not choice.wants_process(measured, cores):
            self._agreed = 0
            return
        self._first = began if not self._agreed else self._first
        self._agreed += 1
        if self._agreed >= choice.WINDOWS:
            _log.info(
                "the thread that makes batches stands still %.0f %% of its time, for want of the "
                "interpreter's lock: starting a gather process",
                100 * measured.stalled_share,
            )
            self._by_thread = now.since(self._first)
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
        measured = self._measured(now)
        if measured is None:
            return
        self._judged += 1
        if self._judged == 1:  # what was made ahead flatters
            self._first = now
        if self._judged <= choice.WINDOWS:
            return
        self._phase, measured = Phase.SETTLED, now.since(self._first)
        before, after = (1e3 * m.batch_seconds for m in (self._by_thread, measured))
        if choice.keeps_process(self._by_thread, measured):
            self.kind = "process"
            _log.info("the gather process stays: %.3g ms per step, not %.3g", after, before)
            return
        _log.info(
            "back to the thread: %.3g ms per step with the gather process, %.3g without",
            *(after, before),
        )
        source.halt()

    def crossed(self) -> Source | None:
        """Return the source that goes on where the thread has halted."""
        source, self.next, self._child = self.next, None, None
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
            self._phase, self._before, self._agreed = Phase.MEASURING, None, 0
