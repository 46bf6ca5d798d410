"""Epochs as the training loop sees them: the consumer's side of a channel."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.system import release_at_sigterm
from growcache.errors import CacheError, CacheMissingError, GrowcacheError
from growcache.loading.blocks import Block, count_per_shard
from growcache.loading.channel import (
    EPOCH_IS_OVER,
    EpochEnd,
    Failure,
    Item,
    PassBegun,
    ProcessDied,
    Stage,
    StageKind,
)
from growcache.loading.framework import NUMPY, Framework
from growcache.loading.options import LoaderOptions
from growcache.loading.position import Position, PositionTracker, remaining_pass
from growcache.loading.report import DeliveryCounts, ReaderCounters, Report
from growcache.loading.resume import MissingShards, refuse_missing, refuse_other_cache
from growcache.loading.stages import GatherChoice, StageFactory

_log = logging.getLogger(__name__)


class Consumer:
    """The consumer's side of a stage; each `epoch` is one epoch of batches.

    The stage starts with the first epoch and ends with `close`, garbage collection or the
    interpreter.
    """

    def __init__(self, options: LoaderOptions, framework: Framework = NUMPY) -> None:
        self._options = options
        self._starter = StageFactory(options, framework)
        self._at_once = framework.at_once
        self._source: Stage | None = None
        self._turn = object()  # of the iterator that may go on
        self._pid = os.getpid()
        self._next_epoch = self._next_pass = 0
        self._loaded: Position | None = None  # until something of it was delivered
        self._missing: MissingShards = "refetch"
        self._bookmark = PositionTracker(options, Position())
        self._finalizer: weakref.finalize[..., Consumer] | None = None
        self._tally = DeliveryCounts(options.root)
        self._counters = ReaderCounters(CacheLayout(options.root))
        self._counted_pass: int | None = None  # the one begun last, and
        self._delivered_pass: int | None = None  # that of the latest batch
        # Closes a stage that was replaced: it keeps its leases until the next one has some.
        self._leaving: Callable[[], object] | None = None
        self._kind: StageKind = "process" if options.gather == "process" else "thread"
        self._choice = GatherChoice() if self._starter.may_choose else None
        self._switching = False  # to a process, once the current block is delivered
        self._running_block: _DeliveredBlock | None = None  # of which the loop gets batches
        self._revived = False  # since a block was received

    def begin(self) -> None:
        self._running()

    def epoch(self, pause_seconds: float | None = None) -> Iterator[Any]:
        """Yield the batches of the next epoch, and None after each `pause_seconds` without one.

        The rest of an epoch that was broken off is dropped; its iterator raises RuntimeError
        when it is asked again.
        """
        source = self._running()
        number, self._next_epoch = self._next_epoch, self._next_epoch + 1
        turn = self._turn = object()
        source.begin(number)
        self._bookmark.begin_epoch(number)
        counted = self._tally.begin_epoch()
        self._counters.begin_epoch(number)
        while True:
            item = self._receive(turn, number, pause_seconds)
            if item is None:
                yield None
                continue
            if isinstance(item, Failure):
                self.close()
                raise _without_frames(item.error)
            self._loaded = None
            if isinstance(item, Block):
                yield from self._batches(item, turn, counted)
                del item  # its memory is wanted for the block after the next
            elif isinstance(item, EpochEnd):
                self._tally.skip(item.lost)
                self._end_epoch(number)
                return

    def _end_epoch(self, number: int) -> None:
        self._bookmark.end_epoch(number)
        self._counters.flush()  # the lease may go with its pass
        if self._options.samples_per_epoch is None and self._source is not None:
            self._source.end_pass(self._next_pass - 1)
        self._tally.end_epoch()

    @property
    def report(self) -> Report:
        source = self._source
        if self._running_block is not None:
            self._tell(self._running_block)
        return replace(self._tally.report(), gather=source.kind if source else self._kind)

    @property
    def state(self) -> Position:
        return self._bookmark.state

    @property
    def step(self) -> int:
        return self._bookmark.step

    def note_state(self) -> None:
        self._counters.note_state()

    def load(self, state: Position, missing: MissingShards) -> None:
        """Continue from a position with the next epoch.

        Raises ConfigError for another cache, CacheError if shards are gone and `missing`
        forbids that.
        """
        self._refuse(state, missing)
        self.close()
        self.note_state()
        self._loaded, self._missing, self._counted_pass = state, missing, None
        self._delivered_pass = None
        self._bookmark = PositionTracker(self._options, state)

    def _refuse(self, state: Position, missing: MissingShards) -> None:
        try:
            view = read_index(self._options.root, retired=True)
        except CacheMissingError:
            view = IndexView()
        refuse_other_cache(view, state.fingerprint, self._options)
        rest = remaining_pass(state, self._options)
        if missing == "error" and rest is not None:
            refuse_missing(view, rest, self._options)

    def close(self) -> None:
        self._turn = object()
        self._let_go()

    def _let_go(self) -> None:
        if self._switching:
            self._kind, self._switching = "process", False
        self._counters.close()
        self._leave()
        finalizer, self._finalizer, self._source = self._finalizer, None, None
        if finalizer is not None:
            finalizer()

    def _running(self) -> Stage:
        if self._pid != os.getpid():  # a fork copies no threads, and no children
            self._forked()
        if self._loaded is not None:  # broken off before the first batch: once more
            self.close()
        if self._source is not None and self._source.broken:
            self._replace_broken()
        if self._source is None:
            return self._start()
        return self._source

    def _replace_broken(self) -> None:
        self.close()
        if self._options.ranks.share:
            raise CacheError(
                "an interrupt met a batch on its way here, and the other ranks go on without this "
                "one; begin a new epoch on all ranks"
            )
        # What is left of a broken off pass is wanted no more, and may be evicted: it would be drawn anew.
        self._bookmark.begin_epoch(self._next_epoch)
        self._loaded = self._behind_delivered()

    def _forked(self) -> None:
        self._source, self._leaving, self._pid = None, None, os.getpid()
        self._counters = ReaderCounters(CacheLayout(self._options.root))
        if self._finalizer is not None:
            self._finalizer.detach()

    def _start(self) -> Stage:
        release_at_sigterm()
        start = self._loaded or Position(
            epoch=self._next_epoch, next_epoch=self._next_epoch, next_pass=self._next_pass
        )
        self._next_epoch, self._next_pass = start.next_epoch, start.next_pass
        self._bookmark = PositionTracker(self._options, start)
        return self._begin_at(start, self._next_epoch)

    def _begin_at(self, start: Position, wanted: int) -> Stage:
        return self._adopt(self._starter.start(self._kind, start, self._missing, wanted))

    def _adopt(self, source: Stage) -> Stage:
        self._source = source
        # Also at exit: a daemon in the middle of a copy must not meet a dying interpreter.
        self._finalizer = weakref.finalize(self, _end_stage, self._counters, source)
        return source

    def _revive(self, died: ProcessDied, number: int) -> None:
        self._let_go()
        if self._options.gather == "auto":
            self._kind, self._choice = "thread", None
        elif self._revived or self._options.ranks.share:
            again = (
                "again, before its first batch" if self._revived else "which other ranks follow"
            )
            raise CacheError(
                f"the gather process {died.why}, {again}; look for what ended it (the kernel's "
                "log names what it killed for want of memory), or use gather='thread'"
            )
        _log.warning(
            "the gather process %s; %s goes on behind the batch delivered last",
            *(died.why, "a thread" if self._options.gather == "auto" else "another one"),
        )
        self._revived = True
        self._begin_at(self._behind_delivered(), number)

    def _behind_delivered(self) -> Position:
        """Return where another stage continues; a pass without a delivered batch begins anew."""
        state, begun = self.state, self._counted_pass
        if state.mark is None and begun is not None and begun != self._delivered_pass:
            return replace(state, next_pass=begun)
        return state

    def _receive(self, turn: object, number: int, pause_seconds: float | None) -> Item | None:
        while True:
            if self._switching:
                self._switch(number)
            source = self._source
            if turn is not self._turn or source is None or self._pid != os.getpid():
                raise RuntimeError(EPOCH_IS_OVER)
            began = time.perf_counter()
            item = source.receive(pause_seconds)
            if item is None:
                self._waited(time.perf_counter() - began)
                return None
            self._leave()  # what followed it has leases now, or failed
            self._waited(time.perf_counter() - began)
            if isinstance(item, Failure):
                return item
            if isinstance(item, ProcessDied):
                self._revive(item, number)
                continue
            if isinstance(item, PassBegun):
                self._begin_pass(item)
            elif isinstance(item, Block):
                self._revived = False
                source.more()
                self._choose(item)
            source.done()
            if not isinstance(item, PassBegun) and item.epoch == number:
                return item

    def _waited(self, seconds: float) -> None:
        self._tally.waited(seconds)
        self._counters.wait(seconds)

    def _choose(self, block: Block) -> None:
        if self._choice is not None and self._choice.wants_process(time.perf_counter(), block):
            self._choice, self._switching = None, True

    def _switch(self, number: int) -> None:
        """Have a process continue behind the batch delivered last."""
        self._switching = False
        try:
            following = self._starter.start(
                "process", self._behind_delivered(), self._missing, number
            )
        except OSError as error:  # too many processes, or the working directory is gone
            _log.warning("no gather process can be started, the thread goes on: %s", error)
            return
        self._kind = "process"
        self._counters.flush()  # before its lease goes
        self._leaving = self._finalizer
        self._adopt(following)

    def _leave(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving()

    def _begin_pass(self, item: PassBegun) -> None:
        self._next_pass = item.number + 1
        fingerprint = item.facts.view.fingerprint
        self._bookmark.begin_pass(item.number, item.plan, fingerprint)
        again = item.number == self._counted_pass
        self._tally.begin_pass(item.number, item.facts, again=again)
        self._counted_pass = item.number
        self._counters.begin_pass(item.number, item.lease)

    def _batches(self, block: Block, turn: object, counted: int) -> Iterator[Any]:
        source = self._source
        assert source is not None
        rows, size = block.rows, self._options.batch_size
        delivered = 0
        running = self._running_block = _DeliveredBlock(block, counted)
        try:
            for i, (mark, lost) in enumerate(zip(block.marks, block.lost, strict=True), 1):
                if turn is not self._turn:  # it would move what the loader says of itself
                    raise RuntimeError(EPOCH_IS_OVER)
                before, delivered = delivered, min(delivered + size, rows)
                self._counters.receive(delivered - before)
                running.delivered = delivered
                source.delivered, self._delivered_pass = mark, mark.pass_number
                self._bookmark.deliver(block.epoch, mark, block.form)
                if lost:
                    self._tally.skip(lost)
                if i % self._at_once == 0 or delivered == rows:
                    yield self._cut(block)
        except GeneratorExit:
            self._counters.flush()  # the loop was left, and may not come back
            raise
        finally:
            self._tell(running)
            if self._running_block is running:
                self._running_block = None

    def _tell(self, running: _DeliveredBlock) -> None:
        self._tally.deliver(running.uncounted(), running.counted)
        if self._delivered_pass is not None:
            self._tally.enter(self._delivered_pass)

    def _cut(self, block: Block) -> Any:
        try:
            return next(block.batches)
        except BaseException:
            self.close()
            raise


def _end_stage(counters: ReaderCounters, source: Stage) -> None:
    counters.close()  # first: the lease goes with the source
    source.close()


def _without_frames(error: BaseException) -> BaseException:
    return error.with_traceback(None) if isinstance(error, GrowcacheError) else error


class _DeliveredBlock:
    def __init__(self, block: Block, counted: int) -> None:
        self.counted = counted
        self.delivered = 0
        self._rows, self._counts, self._drawn = block.rows, block.counts, block.drawn
        self._told: dict[int, int] = {}  # by shard, of what was counted

    def uncounted(self) -> dict[int, int]:
        """Return rows per shard delivered since the last call."""
        whole = self.delivered == self._rows
        now = self._counts if whole else count_per_shard(self._drawn, self.delivered)
        before, self._told = self._told, now
        if not before:
            return now
        return {n: more for n, count in now.items() if (more := count - before.get(n, 0))}
