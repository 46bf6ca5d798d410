"""Start the stage that makes batches, and choose between a thread and a process by measurement.

A thread that copies needs no interpreter lock, but it needs the lock between two copies. Beside a
loop that is busy in Python it gets the lock only every switch interval (5 ms). So a process may help
where the thread stalls, and it does help where the loop's own thread then computes for more of its time.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median
from typing import TypeAlias

from growcache.cache import system
from growcache.cache.lease_views import RankNote
from growcache.loading.blocks import BatchCutter
from growcache.loading.channel import Channel, QueuedStage, Stage, StageKind
from growcache.loading.child_process import ChildProcess
from growcache.loading.framework import Framework
from growcache.loading.gather_process import (
    GatherSetup,
    ProcessStage,
    RelayedStage,
    portable_options,
)
from growcache.loading.options import Gather, LoaderOptions
from growcache.loading.position import Position
from growcache.loading.producer import Producer
from growcache.loading.rank_sync import next_rank_note, rank_group
from growcache.loading.resume import MissingShards


class ThreadStage(QueuedStage):
    kind: StageKind = "thread"

    def __init__(self, wanted: int, make: Callable[[Channel], Producer]) -> None:
        super().__init__(wanted)
        self._begin_thread(make(self._link).run)

    @property
    def halted(self) -> Position | None:
        return self._items.halted

    @property
    def making(self) -> tuple[float, float]:
        return self._link.making

    def begin(self, epoch: int) -> None:
        self._link.begin(epoch)

    def end_pass(self, pass_number: int) -> None:
        self._link.end_pass(pass_number)

    def halt(self) -> None:
        self._link.halt.set()
        self._link.tokens.put(True)  # a block that waits for one is made already


TRIAL_SECONDS = 0.2
TRIALS = 5  # that are judged by their median, for a step may be an unusual one
MAX_TRIALS = 15  # of a process, of which the latest are judged each time, until it goes
TRIES = 3  # of a process
REST_SECONDS = 30.0  # with the thread after the first of them; then four times that
MIN_BATCHES = 4  # of a trial
MIN_STALLED_SHARE = 0.3  # of the thread's time for blocks that it does not compute
MIN_STALLED_TIME = 0.02  # the same, of the loop's time
MIN_GAIN = 0.015  # of the loop's time; below it a process is not worth its memory


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """Clocks and counters of a loop and of the thread that makes its blocks."""

    seconds: float = 0.0
    batches: int = 0
    making_seconds: float = 0.0
    computed_seconds: float = 0.0
    loop_seconds: float = 0.0

    def since(self, before: LoopTimes) -> LoopTimes:
        return LoopTimes(
            self.seconds - before.seconds,
            self.batches - before.batches,
            self.making_seconds - before.making_seconds,
            self.computed_seconds - before.computed_seconds,
            self.loop_seconds - before.loop_seconds,
        )

    @property
    def whole(self) -> bool:
        return self.seconds >= TRIAL_SECONDS and self.batches >= MIN_BATCHES

    @property
    def batch_seconds(self) -> float:
        return self.seconds / self.batches

    @property
    def lost_seconds(self) -> float:
        """Seconds per batch in which the loop's thread did not compute."""
        return (self.seconds - self.loop_seconds) / self.batches

    @property
    def stalled_share(self) -> float:
        """The share of the thread's time for blocks in which it did not compute."""
        return self.stalled_seconds / self.making_seconds if self.making_seconds > 0 else 0.0

    @property
    def stalled_seconds(self) -> float:
        return self.making_seconds - self.computed_seconds


def wants_process(trials: Sequence[LoopTimes], cores: int) -> bool:
    """Return whether a process would help a loop that a thread gathers for.

    Args:
        trials: the latest, beside the thread.
        cores: that this process may use.

    >>> wants_process([LoopTimes(1.0, 100, 0.3, 0.1)] * 5, cores=2)
    True
    >>> wants_process([LoopTimes(1.0, 100, 0.9, 0.85)] * 5, cores=2)  # as fast as memory is
    False
    """
    return (
        cores > 1
        and len(trials) >= TRIALS
        and median(t.stalled_share for t in trials) >= MIN_STALLED_SHARE
        and median(t.stalled_seconds / t.seconds for t in trials) >= MIN_STALLED_TIME
    )


def keeps_process(by_thread: Sequence[LoopTimes], by_process: Sequence[LoopTimes]) -> bool:
    """Return whether the process helped: the loop loses less of its time.

    Args:
        by_thread: trials before.
        by_process: trials since.

    >>> thread = LoopTimes(1.0, 100, loop_seconds=0.95)
    >>> keeps_process([thread], [LoopTimes(1.2, 100, loop_seconds=1.19)])  # a slower machine
    True
    >>> keeps_process([thread], [LoopTimes(0.8, 100, loop_seconds=0.75)])  # a faster one
    False
    """
    lost, still = (median(t.lost_seconds for t in of) for of in (by_thread, by_process))
    return lost - still >= MIN_GAIN * median(t.batch_seconds for t in by_thread)


def rest_seconds(tries: int) -> float | None:
    """Return how long the thread goes on after so many tries of a process; None: for good.

    >>> [rest_seconds(tries) for tries in (1, 2, 3)]
    [30.0, 120.0, None]
    """
    return REST_SECONDS * 4 ** (tries - 1) if tries < TRIES else None


class StageFactory:
    """Starts stages for one consumer."""

    def __init__(self, options: LoaderOptions, framework: Framework) -> None:
        self._options = options
        self._framework = framework
        self._cutter = BatchCutter(options, framework)

    @property
    def may_choose(self) -> bool:
        """Whether a process may replace the thread.

        Other ranks follow the process that they know, a fixed set is pinned by the pass that
        found it, and a transform runs in threads of the trainer.
        """
        options = self._options
        fixed = options.ranks.share or options.fixed or options.transform is not None
        return options.gather == "auto" and not fixed

    def start(
        self, kind: StageKind, start: Position, missing: MissingShards, wanted: int
    ) -> Stage:
        note = next_rank_note(self._options)
        if kind == "process":
            return self.process(ChildProcess(), start, missing, wanted, note)
        return self.thread(start, missing, wanted, note)

    def thread(
        self, start: Position, missing: MissingShards, wanted: int, note: RankNote | None = None
    ) -> Stage:
        options = self._options

        def make(link: Channel) -> Producer:
            ranks = rank_group(options, note)
            return Producer(
                *(options, link, self._framework, start, missing, ranks), self._cutter.cut_now
            )

        return ThreadStage(wanted, make)

    def process(
        self,
        child: ChildProcess,
        start: Position,
        missing: MissingShards,
        wanted: int,
        note: RankNote | None = None,
    ) -> Stage:
        order = GatherSetup(
            options=portable_options(self._options),
            start=start,
            missing=missing,
            note=note,
            wanted=wanted,
            argv=sys.argv,
            level=logging.getLogger("growcache").getEffectiveLevel(),
            failed=system.service_end_reason(self._options.root),
        )
        carrier = self._framework.carrier
        if self._options.batch_transform is None and carrier is None:
            return ProcessStage(child, order, self._cutter.cut)
        lock = None if carrier is None else carrier.lock
        source = ProcessStage(child, order, lock=lock)
        return RelayedStage(source, wanted, self._cutter)


# cross(child, state): the source that goes on behind a state, in the process that was started.
StartProcess: TypeAlias = Callable[[ChildProcess, Position], Stage]

_log = logging.getLogger(__name__)
_FIGURES = "%.3g ms per step, of which %.3g are lost; with the thread %.3g, and %.3g"


class ChoicePhase(Enum):
    MEASURING = auto()  # beside the thread
    STARTING = auto()  # the process; the thread goes on
    HALTING = auto()  # the thread makes its last block
    CROSSED = auto()  # the process is ordered: measured beside it, once it delivers
    SETTLED = auto()


class GatherChooser:
    """Chooses between thread and process by measurement; used by the consumer's thread."""

    def __init__(self, gather: Gather, *, possible: bool) -> None:
        self.kind: StageKind = "process" if gather == "process" else "thread"
        self._phase = ChoicePhase.MEASURING if possible else ChoicePhase.SETTLED
        self._consumer = 0  # the thread, for the time that it computes is looked at
        self._before: LoopTimes | None = None  # at the beginning of this trial
        self._by_thread: deque[LoopTimes] = deque(maxlen=TRIALS)
        self._by_process: list[LoopTimes] = []
        self._tries = 0  # of a process that did not stay
        self._rest_until = -math.inf  # before another one
        self._child: ChildProcess | None = None
        self.next: Stage | None = None

    @property
    def settled(self) -> bool:
        return self._phase is ChoicePhase.SETTLED

    def look(self, source: Stage, now: LoopTimes, cross: StartProcess) -> None:
        if (consumer := threading.get_ident()) != self._consumer:
            self._consumer, self._before = consumer, None
        match self._phase:
            case ChoicePhase.MEASURING if (
                source.kind == "thread" and now.seconds >= self._rest_until
            ):
                self._measure(now)
            case ChoicePhase.STARTING if self._child is not None and self._child.speaks():
                source.halt()
                self._phase = ChoicePhase.HALTING
            case ChoicePhase.HALTING if source.halted is not None and self._child is not None:
                self.next = cross(self._child, source.halted)
                self._phase, self._before, self._by_process = ChoicePhase.CROSSED, None, []
            case ChoicePhase.CROSSED if source.kind == "process":
                self._judge(source, now)

    def _tried(self, now: LoopTimes) -> LoopTimes | None:
        if self._before is None:
            self._before = now
        tried = now.since(self._before)
        if not tried.whole:
            return None
        self._before = now
        return tried

    def _measure(self, now: LoopTimes) -> None:
        tried = self._tried(now)
        if tried is None:
            return
        self._by_thread.append(tried)
        if wants_process(self._by_thread, len(os.sched_getaffinity(0))):
            _log.info(
                "the thread that makes batches stands still %.0f %% of its time, for want of the "
                "interpreter's lock: starting a gather process",
                100 * median(trial.stalled_share for trial in self._by_thread),
            )
            self._start()

    def _start(self) -> None:
        try:
            self._child = ChildProcess()
        except OSError as error:  # too many processes, or the working directory is gone
            _log.warning("no gather process can be started, the thread goes on: %s", error)
            self.give_up()
        else:
            self._phase = ChoicePhase.STARTING

    def _judge(self, source: Stage, now: LoopTimes) -> None:
        tried = self._tried(now)
        if tried is None:
            return
        self._by_process.append(tried)
        trials = self._by_process[1:]  # what was made ahead flatters the first
        latest = trials[-TRIALS:]
        if len(latest) < TRIALS:
            return
        if keeps_process(self._by_thread, latest):
            self.kind, self._phase = "process", ChoicePhase.SETTLED
            _log.info("the gather process stays: %s", self._figures(latest))
        elif len(trials) >= MAX_TRIALS:
            _log.info("back to the thread: %s", self._figures(latest))
            self._rest(now)
            source.halt()

    def _figures(self, by_process: Sequence[LoopTimes]) -> str:
        process, thread = (
            (
                1e3 * median(t.batch_seconds for t in of),
                1e3 * median(t.lost_seconds for t in of),
            )
            for of in (by_process, self._by_thread)
        )
        return _FIGURES % (*process, *thread)

    def _rest(self, now: LoopTimes) -> None:
        self._tries += 1
        seconds = rest_seconds(self._tries)
        if seconds is None:
            self._phase = ChoicePhase.SETTLED
        else:
            self._begin_anew()
            self._rest_until = now.seconds + seconds

    def _begin_anew(self) -> None:
        self._phase, self._before = ChoicePhase.MEASURING, None
        self._by_thread.clear()

    def crossed(self) -> Stage | None:
        source, self.next = self.next, None
        if source is None:
            self.close()
        self._child = None
        return source

    def give_up(self) -> None:
        self.kind, self._phase = "thread", ChoicePhase.SETTLED

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = self.next = None
        if not self.settled:
            self._begin_anew()
