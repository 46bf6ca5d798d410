"""Epochs as the training loop sees them: the consumer's side of a stage.

The consumer replaces a stage that died, is too slow, or lost an item to an interrupt. The new
stage continues from the position after the last delivered batch.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.system import release_at_sigterm
from growcache.errors import CacheError, CacheMissingError, GrowcacheError
from growcache.loading.blocks import BatchCutter, Block, count_per_shard
from growcache.loading.channel import (
    EPOCH_IS_OVER,
    EpochEnd,
    Failure,
    Item,
    PassStarted,
    ProcessDied,
    Stage,
    StageKind,
)
from growcache.loading.delivered_rows import BatchRows
from growcache.loading.framework import NUMPY, Framework
from growcache.loading.gather_process import (
    CutStage,
    GatherChoice,
    ProcessStage,
    kind_after_death,
    may_switch_to_process,
)
from growcache.loading.journal_frames import DeliveredBatch
from growcache.loading.journal_writer import JournalWriter
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import LazyPickle, PassPlan, PassPosition
from growcache.loading.producer import ThreadStage
from growcache.loading.report import DeliveryCounts, ReaderCounters, Report
from growcache.loading.resume import MissingShards, Position, remaining_pass
from growcache.loading.resume_lease import options_of, refuse_missing, refuse_other_cache
from growcache.loading.transform import TransformSchema

_log = logging.getLogger(__name__)


class Consumer:
    """The consumer of a loader's batches.

    The first epoch starts the stage. `close`, garbage collection or the interpreter's end stops
    it.
    """

    def __init__(self, options: LoaderOptions, framework: Framework = NUMPY) -> None:
        self._options = options
        self._framework = framework
        self._batches_at_once = framework.batches_at_once
        self.stage: Stage | None = None
        self._handled = 0  # items of the stage
        self._iteration = object()  # of the iterator that may continue
        self._pid = os.getpid()
        self._next_epoch = self._next_pass = 0
        self._loaded: Position | None = None  # until a batch after it is delivered
        self._missing: MissingShards = "refetch"
        self._tracker = PositionTracker(options, Position())
        self._finalizer: weakref.finalize[..., Consumer] | None = None
        self.deliveries = DeliveryCounts(options.root)
        self._counters = _counters_of(options)
        self._journal = JournalWriter(options) if options.journal is not None else None
        self._counted_pass: int | None = None  # pass that started last
        self._delivered_pass: int | None = None  # pass of the latest batch
        # Closes a replaced stage, which keeps its leases until the next stage has some.
        self._close_previous: Callable[[], object] | None = None
        self._kind: StageKind = "process" if options.gather == "process" else "thread"
        self._choice = GatherChoice() if may_switch_to_process(options) else None
        self._switching = False  # to a process, after the current block is delivered
        self._running_block: _DeliveredBlock | None = None  # the loop gets its batches now
        self._replaced = False  # since a block was received

    def prefetch(self) -> None:
        self._stage_running()

    def epoch(self, pause_seconds: float | None = None) -> Iterator[Any]:
        """Yield the batches of the next epoch, and None after each `pause_seconds` without one.

        The rest of an abandoned epoch is dropped, and its iterator raises RuntimeError.
        """
        stage = self._stage_running()
        number, self._next_epoch = self._next_epoch, self._next_epoch + 1
        iteration = self._iteration = object()
        stage.demand.begin(number)
        self._tracker.begin_epoch(number)
        counted = self.deliveries.begin_epoch()
        self._counters.begin_epoch(number)
        while True:
            item = self._receive(iteration, number, pause_seconds)
            if item is None:
                yield None
                continue
            if isinstance(item, Failure):
                self.close()
                if isinstance(item.error, GrowcacheError):
                    item.error.__traceback__ = None  # its frames are useless to the user
                raise item.error
            self._loaded = None
            if isinstance(item, Block):
                yield from self._batches(item, iteration, counted)
                del item  # its memory is needed for the block after the next
            elif isinstance(item, EpochEnd):
                self.deliveries.skip(item.lost)
                self._end_epoch(number)
                return

    def _end_epoch(self, number: int) -> None:
        self._tracker.end_epoch(number)
        self._counters.flush()  # the lease may end with its pass
        if self._journal is not None:
            with self._closed_on_error():
                self._journal.flush()
        if self._options.samples_per_epoch is None and self.stage is not None:
            self.stage.demand.end_pass(self._next_pass - 1)
        self.deliveries.end_epoch()

    @property
    def report(self) -> Report:
        stage = self.stage
        if self._running_block is not None:
            self._count_delivered(self._running_block)
        return replace(self.deliveries.report(), gather=stage.kind if stage else self._kind)

    @property
    def loaded(self) -> Position | None:
        """The loaded position from which the next iteration continues, or None."""
        return self._loaded

    def position(self) -> Position:
        return self._tracker.state

    @property
    def step(self) -> int:
        return self._tracker.step

    @property
    def global_step(self) -> int:
        return self._tracker.global_step

    def note_state(self) -> None:
        self._counters.note_state()
        if self._journal is not None:
            with self._closed_on_error():
                self._journal.sync()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close on an error, so that a loader that raised keeps neither threads nor leases."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def reset(self, position: Position, missing: MissingShards) -> None:
        """Continue from a position.

        Raises:
            ConfigError: The position belongs to another cache.
            CacheError: Shards are gone, and `missing` forbids that.
        """
        self._refuse(position, missing)
        self.close()
        self.note_state()
        self._loaded, self._missing, self._counted_pass = position, missing, None
        self._delivered_pass = None
        self._tracker = PositionTracker(self._options, position)

    def _refuse(self, position: Position, missing: MissingShards) -> None:
        options = options_of(self._options, position.fingerprint)
        try:
            view = read_index(options.root, retired=True)
        except CacheMissingError:
            view = IndexView()
        refuse_other_cache(view, position.fingerprint, options)
        rest = remaining_pass(position, options)
        if missing == "error" and rest is not None:
            refuse_missing(view, rest, options)

    def close(self) -> None:
        self._iteration = object()
        self._close_stage()
        if self._journal is not None:
            self._journal.close()

    def _close_stage(self) -> None:
        if self._switching:
            self._kind, self._switching = "process", False
        self._counters.close()
        self._finish_previous()
        finalizer, self._finalizer, self.stage = self._finalizer, None, None
        if finalizer is not None:
            finalizer()

    def _stage_running(self) -> Stage:
        if self._pid != os.getpid():  # a fork copies neither threads nor children
            self._forked()
        if self._loaded is not None:  # left before its first batch, so it is loaded again
            self.close()
        if self.stage is not None and self.stage.taken != self._handled:
            self._replace_after_lost_item()
        if self.stage is None:
            return self._start()
        return self.stage

    def _replace_after_lost_item(self) -> None:
        self.close()
        if self._options.keeps_count:
            raise CacheError(
                "an interrupt lost a batch of this rank, and the other ranks continue without "
                "it; start a new epoch on all ranks",
                code="GC704",
            )
        # The rest of an abandoned pass is not needed, so its shards may be evicted and drawn
        # again.
        self._tracker.begin_epoch(self._next_epoch)
        self._loaded = self._resume_position()

    def _forked(self) -> None:
        self.stage, self._close_previous, self._pid = None, None, os.getpid()
        self._switching = False
        self._counters = _counters_of(self._options)
        if self._journal is not None:  # the parent keeps its journal
            self._journal = JournalWriter(self._options)
        if self._finalizer is not None:
            self._finalizer.detach()

    def _start(self) -> Stage:
        release_at_sigterm()
        start = self._loaded or Position(
            epoch=self._next_epoch,
            next_epoch=self._next_epoch,
            next_pass=self._next_pass,
            global_step=self.global_step,
        )
        if self._journal is not None:
            self._journal.open(start.global_step)
        self._next_epoch, self._next_pass = start.next_epoch, start.next_pass
        return self._adopt(self._new_stage(self._kind, start), start)

    def _new_stage(self, kind: StageKind, start: Position) -> Stage:
        stage = make_stage(kind, self._options, self._framework)
        stage.reset(start, self._missing)
        return stage

    def _adopt(self, stage: Stage, start: Position) -> Stage:
        self.stage, self._handled = stage, 0
        self._tracker = PositionTracker(self._options, start)
        # Also at exit, because a daemon in the middle of a copy must not meet a dying
        # interpreter.
        self._finalizer = weakref.finalize(self, _end_stage, self._counters, stage)
        return stage

    def _replace_dead_process(self, died: ProcessDied) -> None:
        self._close_stage()
        self._kind = kind_after_death(self._options, died, again=self._replaced)
        self._choice, self._replaced = None, True
        start = self._resume_position()
        self._adopt(self._new_stage(self._kind, start), start)

    def _resume_position(self) -> Position:
        """Return the position to continue from.

        A pass without a delivered batch starts anew.
        """
        state, started_pass = self.position(), self._counted_pass
        if (
            state.mark is None
            and started_pass is not None
            and started_pass != self._delivered_pass
        ):
            return replace(state, next_pass=started_pass)
        return state

    def _receive(
        self, iteration: object, number: int, pause_seconds: float | None
    ) -> Item | None:
        while True:
            if iteration is not self._iteration or self._pid != os.getpid():
                raise RuntimeError(EPOCH_IS_OVER)
            if self._switching:
                self._switch_to_process()
            if (stage := self.stage) is None:
                raise RuntimeError(EPOCH_IS_OVER)
            began = time.perf_counter()
            item = stage.next(pause_seconds)
            self.count_wait(time.perf_counter() - began)
            if item is None:
                return None
            self._finish_previous()  # its successor has leases now, or failed
            if isinstance(item, Failure):
                return item
            if isinstance(item, ProcessDied):
                self._replace_dead_process(item)
                continue
            if isinstance(item, PassStarted):
                with self._closed_on_error():  # writing the journal may fail
                    self._begin_pass(item)
            elif isinstance(item, Block):
                self._replaced = False
                choice, now = self._choice, time.perf_counter()
                if choice is not None and choice.wants_process(now, item):
                    self._choice, self._switching = None, True
            self._handled += 1
            if not isinstance(item, PassStarted) and item.epoch == number:
                return item

    def count_wait(self, seconds: float) -> None:
        self.deliveries.waited(seconds)
        self._counters.wait(seconds)

    def _switch_to_process(self) -> None:
        self._switching = False
        start = self._resume_position()
        try:
            following = self._new_stage("process", start)
        except OSError as error:  # too many processes, or no working directory
            _log.warning("loader cannot start a gather process and keeps its thread: %s", error)
            return
        self._kind = "process"
        self._counters.flush()  # before its lease ends
        self._close_previous = self._finalizer
        self._adopt(following, start)

    def _finish_previous(self) -> None:
        close, self._close_previous = self._close_previous, None
        if close is not None:
            close()

    def _begin_pass(self, item: PassStarted) -> None:
        self._next_pass = item.number + 1
        fingerprint = item.facts.view.fingerprint
        self._tracker.begin_pass(item.number, item.plan, fingerprint)
        if self._journal is not None:
            self._journal.begin_pass(item.plan.get(), fingerprint)
        again = item.number == self._counted_pass
        self.deliveries.begin_pass(item.number, item.facts, again=again)
        self._counted_pass = item.number
        self._counters.begin_pass(item.number, item.lease)

    def _batches(self, block: Block, iteration: object, counted: int) -> Iterator[Any]:
        stage = self.stage
        assert stage is not None
        rows, size = block.rows, self._options.batch_size
        delivered = 0
        running = self._running_block = _DeliveredBlock(block, counted)
        try:
            for i, (mark, lost) in enumerate(zip(block.marks, block.lost, strict=True), 1):
                # An abandoned iterator must not move the position.
                if iteration is not self._iteration:
                    raise RuntimeError(EPOCH_IS_OVER)
                # First, because no batch is delivered without it.
                if block.irregular is not None:
                    self._note_in_journal(block, block.irregular.get(i - 1))
                before, delivered = delivered, min(delivered + size, rows)
                self._counters.receive(delivered - before)
                running.delivered = delivered
                stage.demand.deliver(mark)
                self._delivered_pass = mark.pass_number
                self._tracker.deliver(block.epoch, mark, block.transform_schema)
                if lost:
                    self.deliveries.skip(lost)
                if i % self._batches_at_once == 0 or delivered == rows:
                    yield self._cut(block)
        except GeneratorExit:
            self._counters.flush()  # the loop was left, and may not return
            raise
        finally:
            self._count_delivered(running)
            if self._running_block is running:
                self._running_block = None

    def _note_in_journal(self, block: Block, rows: BatchRows | None) -> None:
        assert self._journal is not None
        try:
            if rows is None:
                self._journal.follow()
            else:
                step = self._tracker.step_of(block.epoch)
                batch = DeliveredBatch(self.global_step, block.epoch, step, 0, rows)
                self._journal.deliver(batch, block.transform_schema)
        except BaseException:
            self.close()
            raise

    def _count_delivered(self, running: _DeliveredBlock) -> None:
        self.deliveries.deliver(running.uncounted(), running.counted)
        if self._delivered_pass is not None:
            self.deliveries.enter(self._delivered_pass)

    def _cut(self, block: Block) -> Any:
        try:
            return next(block.batches)
        except BaseException:
            self.close()
            raise


def _counters_of(options: LoaderOptions) -> ReaderCounters:
    """Return the counters.

    One rank per machine watches the service, unless the cache is fixed.
    """
    watched = options.root if options.ranks.leads and not options.fixed else None
    return ReaderCounters(CacheLayout(options.root), watched)


def _end_stage(counters: ReaderCounters, stage: Stage) -> None:
    counters.close()  # first, because the lease ends with the stage
    stage.close()


class _DeliveredBlock:
    def __init__(self, block: Block, counted: int) -> None:
        self.counted = counted
        self.delivered = 0
        self._rows, self._counts, self._drawn = block.rows, block.counts, block.drawn
        self._counted: dict[int, int] = {}  # rows by shard

    def uncounted(self) -> dict[int, int]:
        whole = self.delivered == self._rows
        now = self._counts if whole else count_per_shard(self._drawn, self.delivered)
        before, self._counted = self._counted, now
        if not before:
            return now
        return {n: more for n, count in now.items() if (more := count - before.get(n, 0))}


def make_stage(kind: StageKind, options: LoaderOptions, framework: Framework) -> Stage:
    cutter = BatchCutter(options, framework)
    if kind == "thread":
        return ThreadStage(options, framework, cutter)
    transfer = framework.transfer
    if options.batch_transform is None and transfer is None:
        return ProcessStage(options, cutter.cut)
    lock = None if transfer is None else transfer.lock
    return CutStage(options, ProcessStage(options, lock=lock), cutter)


class PositionTracker:
    def __init__(self, options: LoaderOptions, start: Position) -> None:
        self._whole_passes = options.samples_per_epoch is None
        self._epoch, self._step = start.epoch, start.step
        self._global_step = start.global_step
        self._next_epoch, self._next_pass = start.next_epoch, start.next_pass
        self._fingerprint, self._mark = start.fingerprint, start.mark
        self._transform_schema = start.transform_schema
        # A block may extend into the next pass, which therefore starts before this one has
        # ended.
        self._plans = {} if start.plan is None else {start.plan.number: LazyPickle(start.plan)}

    @property
    def state(self) -> Position:
        mark = self._mark
        return Position(
            epoch=self._epoch,
            step=self._step,
            next_epoch=self._next_epoch,
            next_pass=self._next_pass if mark is None else mark.pass_number + 1,
            fingerprint=self._fingerprint,
            transform_schema=self._transform_schema,
            global_step=self._global_step,
            mark=mark,
            plan=None if mark is None else self._plans[mark.pass_number].get(),
        )

    @property
    def step(self) -> int:
        """Number of batches delivered in its epoch. No plan is needed."""
        return self._step

    @property
    def global_step(self) -> int:
        return self._global_step

    def step_of(self, epoch: int) -> int:
        """Number of batches delivered in an epoch, which may be the next one."""
        return self._step if epoch == self._epoch else 0

    def begin_epoch(self, number: int) -> None:
        self._next_epoch = number
        if self._whole_passes and number != self._epoch:
            self._leave(number)

    def begin_pass(
        self, number: int, plan: LazyPickle[PassPlan], fingerprint: str | None
    ) -> None:
        self._plans[number] = plan
        self._fingerprint = fingerprint
        if self._mark is None:
            self._next_pass = number + 1

    def deliver(
        self, epoch: int, mark: PassPosition, transform_schema: TransformSchema
    ) -> None:
        self._step = self.step_of(epoch) + 1
        self._global_step += 1
        self._epoch, self._transform_schema = epoch, transform_schema
        if self._mark is None or mark.pass_number != self._mark.pass_number:
            self._plans = {n: p for n, p in self._plans.items() if n >= mark.pass_number}
        self._mark = mark

    def end_epoch(self, number: int) -> None:
        self._next_epoch = number + 1
        if self._whole_passes:
            self._leave(number + 1)
        else:
            self._epoch, self._step = number + 1, 0

    def _leave(self, epoch: int) -> None:
        if self._mark is not None:
            self._next_pass = self._mark.pass_number + 1
        self._epoch, self._step, self._mark = epoch, 0, None
