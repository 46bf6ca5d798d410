"""Make blocks ahead of the consumer, epoch after epoch.

The producer continues past the end of an epoch, so that the first batches of the next one are
ready.
"""

from __future__ import annotations

import functools
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TypeAlias

import numpy as np

from growcache.errors import CacheError
from growcache.loading.agreement import Agreement, Offer
from growcache.loading.blocks import BatchCutter, Block, BlockAssembler
from growcache.loading.buffers import MIN_IN_FLIGHT, blocks_in_flight
from growcache.loading.channel import (
    Demand,
    EpochEnd,
    Failure,
    Item,
    PassStarted,
    QueuedStage,
    StageKind,
)
from growcache.loading.framework import Framework, ParallelCopies
from growcache.loading.options import LoaderOptions, RankShare
from growcache.loading.passes import Passes
from growcache.loading.plan import LazyPickle
from growcache.loading.rank_sync import RankGroup, next_rank_note, rank_group
from growcache.loading.report import PassFacts
from growcache.loading.resume import (
    MissingShards,
    Position,
    remaining_pass,
    rows_left_of_length,
)
from growcache.loading.resume_lease import ResumeRequest, resume_pass
from growcache.loading.shared_memory import SharedSender
from growcache.loading.waiting import WaitControl
from growcache.loading.windows import OpenPass, PassOpener, Piece, count_rows
from growcache.threads import StoppedError

# finish(block, wanted) completes a block before it waits for the consumer. It returns whether
# all of that was still wanted at its end.
Finish: TypeAlias = Callable[[Block, Callable[[], bool]], bool]


class GatherClock:
    """Measures the stalls of a gathering thread.

    A thread stalls if it does not run, unless it reads a page from disk. Windows are read
    ahead.
    """

    def __init__(self) -> None:
        self._seconds = self._stalled_seconds = 0.0

    @contextmanager
    def timed(self, copies: ParallelCopies) -> Iterator[None]:
        began, shared, ran = time.perf_counter(), copies.waited_seconds, time.thread_time()
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        yield
        seconds = time.perf_counter() - began - (copies.waited_seconds - shared)
        self._seconds += seconds
        if resource.getrusage(resource.RUSAGE_THREAD).ru_majflt == faults:
            self._stalled_seconds += max(0.0, seconds - (time.thread_time() - ran))

    def restart(self) -> tuple[float, float]:
        found = self._seconds, self._stalled_seconds
        self._seconds = self._stalled_seconds = 0.0
        return found


class Producer:
    def __init__(
        self,
        options: LoaderOptions,
        demand: Demand,
        put: Callable[[Item], None],
        framework: Framework,
        start: Position,
        missing: MissingShards,
        ranks: RankGroup | None,
        agreement: Agreement | None = None,
        finish: Finish | None = None,
        shared_sender: SharedSender | None = None,
    ) -> None:
        self._options = options
        self._demand = demand
        self._put_item = put
        self._finish = finish
        self._shared_sender = shared_sender
        self._copies = ParallelCopies(framework, demand.is_urgent)
        self._framework = self._copies.lent()
        self._start = start
        self._rest = None if start.mark is None else remaining_pass(start, options)
        self._missing = missing
        self._ranks = ranks
        self._agreement = agreement
        self._assembler: BlockAssembler | None = None
        self._clock = GatherClock()
        self._sized = False  # whether the number of waiting blocks is decided

    def run(self) -> None:
        with ExitStack() as opened:  # each is closed even if others fail
            try:
                self._produce(opened)
            except StoppedError:
                pass
            except BaseException as error:  # noqa: BLE001 - the consumer raises it
                self._put_item(Failure(error))

    def _produce(self, opened: ExitStack) -> None:
        if self._agreement is not None:
            opened.callback(self._agreement.close)
        opened.callback(self._copies.close)
        opened.callback(self._close_assembler)
        if self._framework.prepare is not None:
            self._framework.prepare()
        passes = opened.enter_context(closing(self._open_passes()))
        for epoch in itertools.count(self._start.epoch):
            passes.epoch = epoch
            self._epoch(epoch, passes)
            assembler = self._assembler
            lost = assembler.losses.until(passes.lost) if assembler is not None else 0
            self._put_item(EpochEnd(epoch, lost))

    def _close_assembler(self) -> None:
        if self._assembler is not None:
            self._assembler.close()

    def _open_passes(self) -> Passes:
        start, options, demand = self._start, self._options, self._demand
        resume = None
        if self._rest is not None:
            attempt = ResumeRequest(
                *(options, start.fingerprint, self._missing, demand.wake, demand.stop.is_set),
                self._ranks,
            )
            found = functools.partial(resume_pass, attempt, self._rest)
            resume = functools.partial(PassOpener.resume, found=found, step=start.step)
        elif self._agreement is not None and start.mark is not None:
            # Nothing of it is left here, so no rank continues it.
            watch = WaitControl(demand.wake, demand.stop.is_set)
            self._agreement.agree(Offer(start.mark.pass_number, start.step), watch)
        return Passes(
            *(options, demand, start.next_pass, self._ranks, resume, self._begin_pass),
            self._agreement,
        )

    def _begin_pass(self, opened_pass: OpenPass) -> None:
        snapshot = opened_pass.snapshot
        if self._assembler is None:
            self._assembler = BlockAssembler(
                *(self._options, snapshot, self._framework, self._demand.stop.is_set),
                *(self._start.transform_schema, self._shared_sender),
            )
            if self._demand.acknowledged_per_block:
                self._demand.lag_rows = self._assembler.block_rows
        facts, plan = (
            PassFacts.of(snapshot, opened_pass.waited_seconds),
            LazyPickle(opened_pass.plan),
        )
        self._put_item(PassStarted(opened_pass.number, plan, facts, snapshot.lease.name))

    def _epoch(self, epoch: int, passes: Passes) -> None:
        options, done = self._options, self._start.step if epoch == self._start.epoch else 0
        if options.samples_per_epoch is not None:
            left = rows_left_of_length(options.samples_per_epoch, done, options)
            self._epoch_share(epoch, passes, options.rank_share(left))
        elif done and self._rest is None:
            return  # its last batch was delivered
        elif options.ranks.world_size > 1:
            # Ranks on one machine wait for one another anyway.
            share = options.rank_share(passes.next_pass(hurry=options.ranks.share))
            self._epoch_share(epoch, passes, share, whole_pass=True)
        else:
            self._whole_pass(epoch, passes, done)

    def _epoch_share(
        self, epoch: int, passes: Passes, share: RankShare, *, whole_pass: bool = False
    ) -> None:
        """Make the blocks of an epoch, or skip its rest if the consumer left it.

        So later epochs stay the same.
        """
        done = block_start = empty_passes = 0
        self._shrink_if_awaited()
        while done < share.rows and not (whole_pass and self._abandoned(epoch)):
            # A block is whole steps, so that all ranks make their steps from the same rows.
            end = block_start + (self._assembler.rows * share.ranks if self._assembler else 1)
            rows = end - done if not self._abandoned(epoch) else share.rows
            pieces = passes.take(min(share.rows - done, rows))
            if not pieces:
                if empty_passes > 1:
                    raise self._unreadable()
                passes.next_pass()
                self._shrink_if_awaited()
                empty_passes += 1
                continue
            first, done, empty_passes = done, done + count_rows(pieces), 0
            if not self._abandoned(epoch):
                padding = _padding_pieces(pieces[-1], share) if done == share.rows else []
                alone = self._options.ranks.world_size == 1
                mine = pieces if alone else _rank_pieces(pieces, first, share)
                if not self._add(passes, pieces, mine, padding):
                    passes.retake(pieces)
                    done = first
                    continue
            if done == share.rows or done == end:
                self._put_block(epoch, passes)
                block_start = done

    def _whole_pass(self, epoch: int, passes: Passes, done: int) -> None:
        passes.next_pass(hurry=False)
        self._shrink_if_awaited()
        assert self._assembler is not None
        wanted, found, delivered = 0, 0, done
        while found == wanted and not self._abandoned(epoch):
            wanted = self._assembler.rows
            pieces = passes.take(wanted)
            found = count_rows(pieces)
            usable = self._options.usable(found)
            if usable:
                kept = _first_rows(pieces, usable)
                if not self._add(passes, kept, kept, []):
                    passes.retake(pieces)
                    found = wanted
                    continue
                self._put_block(epoch, passes)
                delivered += usable
        if not delivered and not self._abandoned(epoch):
            raise self._unreadable()

    def _shrink_if_awaited(self) -> None:
        demand = self._demand
        if self._assembler is not None and (demand.waited or demand.waits):
            self._assembler.shrink()

    def _add(
        self, passes: Passes, pieces: list[Piece], mine: list[Piece], padding: list[Piece]
    ) -> bool:
        """Take this rank's rows and count the rows of all ranks; return False if unreadable."""
        assert self._assembler is not None
        with self._clock.timed(self._copies):
            added = self._assembler.add(mine + padding, pieces)
        if added:
            passes.read(pieces)
        return added

    def _put_block(self, epoch: int, passes: Passes) -> None:
        assert self._assembler is not None
        if self._abandoned(epoch):
            self._assembler.discard()
            return
        with self._clock.timed(self._copies):
            block = self._assembler.finish(epoch)
        block.seconds, block.stalled_seconds = self._clock.restart()
        block.thread = threading.get_native_id()
        # Not timed, because `batch_transform` runs in this thread, also with a gather process.
        wanted = functools.partial(self._demand.wants, epoch)
        finished = self._finish is None or self._finish(block, wanted)
        if self._demand.stop.is_set():
            raise StoppedError
        if not finished:
            return  # the consumer has left the epoch meanwhile
        if not self._sized:
            self._sized = True
            nbytes = block.nbytes * self._assembler.block_rows // max(1, block.rows)
            self._demand.allow(blocks_in_flight(nbytes) - MIN_IN_FLIGHT)
        passes.release_delivered()
        while not self._demand.wait_for_slot():
            self._demand.yield_to_consumer()
            passes.release_delivered()
        if self._demand.stop.is_set():
            raise StoppedError
        self._put_item(block)
        self._demand.yield_to_consumer()  # after the block is complete

    def _abandoned(self, epoch: int) -> bool:
        return epoch < self._demand.wanted

    def _unreadable(self) -> CacheError:
        return CacheError(
            f"no batch of {self._options.batch_size} samples can be read from "
            f"{self._options.root}; run growcache check",
            code="GC415",
        )


def _first_rows(pieces: list[Piece], rows: int) -> list[Piece]:
    kept = []
    for window, start, stop in pieces:
        if n := min(rows, stop - start):
            kept.append(Piece(window, start, start + n))
        rows -= n
    return kept


def _rank_pieces(pieces: list[Piece], first: int, share: RankShare) -> list[Piece]:
    mine, begin = [], first
    for window, low, high in pieces:
        end = begin + high - low
        rows = [np.arange(a, b) for a, b in share.mine(begin, end)]
        if rows:
            chosen = window.chosen(np.concatenate(rows) + (low - begin))
            mine.append(Piece(chosen, 0, len(chosen)))
        begin = end
    return mine


def _padding_pieces(piece: Piece, share: RankShare) -> list[Piece]:
    if not share.padding:
        return []
    last = np.full(share.padding, piece.stop - 1)
    return [Piece(piece.window.chosen(last, padding=True), 0, share.padding)]


class ThreadStage(QueuedStage):
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
        ranks = rank_group(options, next_rank_note(options)) if options.ranks.share else None
        agree = self._framework.agreement if options.agrees else None
        producer = Producer(
            *(options, self.demand, self.items.put, self._framework),
            *(position, missing, ranks, None if agree is None else agree(options)),
            finish=self._cutter.cut_now,
        )
        self._start_thread(producer.run)
