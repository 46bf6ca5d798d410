"""Start the stage that makes batches, and choose between a thread and a process by measurement.

A thread that copies needs no interpreter lock, but it needs the lock between two copies. Beside a
loop that is busy in Python it gets the lock only every switch interval (5 ms). A process helps where
the thread stalls for much of the time that it makes blocks.
"""

from __future__ import annotations

import logging
import os

from growcache.loading.blocks import BatchCutter, Block
from growcache.loading.channel import Demand, QueuedStage, Stage, StageKind
from growcache.loading.framework import Framework
from growcache.loading.gather_process import CutStage, ProcessStage
from growcache.loading.options import LoaderOptions
from growcache.loading.position import Position, PositionTracker
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
    """A producer in a thread of this process."""

    kind: StageKind = "thread"

    def __init__(
        self, options: LoaderOptions, framework: Framework, cutter: BatchCutter
    ) -> None:
        super().__init__(options)
        self._framework = framework
        self._cutter = cutter

    def reset(self, position: Position, missing: MissingShards) -> None:
        options = self._options
        self.demand = Demand(position.next_epoch)
        self.tracker = PositionTracker(options, position)
        ranks = rank_group(options, next_rank_note(options))
        producer = Producer(
            *(options, self.demand, self._items.put, self._framework),
            *(position, missing, ranks, self._cutter.cut_now),
        )
        self._start_thread(producer.run)


def may_choose(options: LoaderOptions) -> bool:
    """Return whether a process may replace the thread.

    Other ranks follow the process that they know, a fixed set is pinned by the pass that found it,
    and a transform runs in threads of the trainer.
    """
    pinned = options.ranks.share or options.fixed or options.transform is not None
    return options.gather == "auto" and not pinned and len(os.sched_getaffinity(0)) > 1


def make_stage(kind: StageKind, options: LoaderOptions, framework: Framework) -> Stage:
    cutter = BatchCutter(options, framework)
    if kind == "thread":
        return ThreadStage(options, framework, cutter)
    transfer = framework.carrier
    if options.batch_transform is None and transfer is None:
        return ProcessStage(options, cutter.cut)
    lock = None if transfer is None else transfer.lock
    return CutStage(options, ProcessStage(options, lock=lock), cutter)
