"""Start the stage that makes batches, and choose between a thread and a process by measurement.

A thread that copies needs no interpreter lock, but it needs the lock between two copies. Beside a
loop that is busy in Python it gets the lock only every switch interval (5 ms). A process helps where
the thread stalls for much of the time that it makes blocks.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from growcache.cache import system
from growcache.cache.lease_views import RankNote
from growcache.loading.blocks import BatchCutter, Block
from growcache.loading.channel import Channel, QueuedStage, Stage, StageKind
from growcache.loading.child_process import ChildProcess
from growcache.loading.framework import Framework
from growcache.loading.gather_process import (
    GatherSetup,
    ProcessStage,
    RelayedStage,
    portable_options,
)
from growcache.loading.options import LoaderOptions
from growcache.loading.position import Position
from growcache.loading.producer import Producer
from growcache.loading.rank_sync import next_rank_note, rank_group
from growcache.loading.resume import MissingShards

WINDOW_SECONDS = 0.5
MIN_BATCHES = 4  # in a window
VOTES = 3  # windows in a row, because one may be unusual
MIN_STALLED_SHARE = 0.3  # of the time that the thread makes blocks
MIN_STALLED_TIME = 0.02  # of the loop's time; below it a process is not worth its memory

_log = logging.getLogger(__name__)


class GatherChoice:
    """Measures how long the thread that makes blocks stalls, until a process is worth it.

    The thread stalls while it makes a block and its CPU clock stands, because it waits for the
    interpreter's lock.
    """

    def __init__(self) -> None:
        self._votes = 0
        self._begin(None)

    def _begin(self, now: float | None) -> None:
        self._began = now
        self._making = self._stalled = 0.0
        self._batches = 0

    def wants_process(self, now: float, block: Block) -> bool:
        """Count a block that was received at a time; return whether a process is worth it."""
        if self._began is None:
            self._begin(now)
            return False
        self._making += block.seconds
        self._stalled += block.seconds - block.cpu_seconds
        self._batches += len(block.marks)
        elapsed = now - self._began
        if elapsed < WINDOW_SECONDS or self._batches < MIN_BATCHES:
            return False
        stalls = (
            self._stalled >= MIN_STALLED_SHARE * self._making
            and self._stalled >= MIN_STALLED_TIME * elapsed
        )
        self._votes = self._votes + 1 if stalls else 0
        if self._votes < VOTES:
            self._begin(now)
            return False
        _log.info(
            "the thread that makes batches stalls %.0f %% of its time on the interpreter's lock: "
            "a gather process takes over",
            100 * self._stalled / max(1e-9, self._making),
        )
        return True


class ThreadStage(QueuedStage):
    kind: StageKind = "thread"

    def __init__(self, wanted: int, make: Callable[[Channel], Producer]) -> None:
        super().__init__(wanted)
        self._begin_thread(make(self._link).run)

    def begin(self, epoch: int) -> None:
        self._link.begin(epoch)

    def end_pass(self, pass_number: int) -> None:
        self._link.end_pass(pass_number)


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
        return options.gather == "auto" and not fixed and len(os.sched_getaffinity(0)) > 1

    def start(
        self, kind: StageKind, start: Position, missing: MissingShards, wanted: int
    ) -> Stage:
        note = next_rank_note(self._options)
        make = self._process if kind == "process" else self._thread
        return make(start, missing, wanted, note)

    def _thread(
        self, start: Position, missing: MissingShards, wanted: int, note: RankNote | None
    ) -> Stage:
        options = self._options

        def make(link: Channel) -> Producer:
            ranks = rank_group(options, note)
            return Producer(
                *(options, link, self._framework, start, missing, ranks), self._cutter.cut_now
            )

        return ThreadStage(wanted, make)

    def _process(
        self, start: Position, missing: MissingShards, wanted: int, note: RankNote | None
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
            return ProcessStage(ChildProcess(), order, self._cutter.cut)
        lock = None if carrier is None else carrier.lock
        source = ProcessStage(ChildProcess(), order, lock=lock)
        return RelayedStage(source, wanted, self._cutter)
