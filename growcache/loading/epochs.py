"""Epochs: a thread that runs ahead over an endless walk, and the consumer's side of it.

The thread does not stop at the end of an epoch. It puts a mark into its queue and goes
on, so the first batches of the next epoch wait there before they are asked for.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from growcache.cache.formats.tfrecord import MappedShard
from growcache.errors import CacheError
from growcache.loading.gather import (
    LARGE_ROW_BYTES,
    Gatherer,
    Integers,
    Take,
    batches_per_block,
    take_rows,
)
from growcache.loading.options import LoaderOptions
from growcache.loading.passes import OpenPass, Piece, StoppedError, Walk
from growcache.loading.report import PassFacts, Report, Tally
from growcache.loading.snapshot import Snapshot
from growcache.loading.transforms import Transform
from growcache.schema import Array, Origin

BLOCKS_AHEAD = 3
JOIN_SECONDS = 5.0

Batch: TypeAlias = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Block:
    """Some batches of an epoch in one set of arrays.

    Attributes:
        epoch: that it belongs to.
        arrays: [rows, *shape] per field.
        numbers: int64 [rows], the shard of each row.
    """

    epoch: int
    arrays: Batch
    numbers: Integers


@dataclass(frozen=True, slots=True)
class PassBegun:
    """A snapshot was taken for what follows."""

    number: int
    facts: PassFacts


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All blocks of an epoch have come."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The thread ended with this error."""

    error: BaseException


Item: TypeAlias = Block | PassBegun | EpochEnd | Failure


class Link:
    """What the thread and the consumer share.

    Attributes:
        items: from the thread; unbounded, but for the blocks in it there must be tokens.
        tokens: rights to put a block.
        wanted: the consumer's epoch; what belongs to earlier ones is not made any more.
        skipped: samples of corrupt shards.
    """

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.wake = threading.Event()
        self.wanted = 0
        self.skipped = 0
        self._pid = os.getpid()
        for _ in range(BLOCKS_AHEAD):
            self.tokens.put(None)

    def close(self, thread: threading.Thread) -> None:
        """End the thread and wait for it; it frees its leases on the way out."""
        if self._pid != os.getpid():  # a forked child has no such thread
            return
        self.stop.set()
        self.wake.set()
        self.tokens.put(None)
        self.items.put(Failure(RuntimeError("the loader was closed while it was iterated")))
        # The collector may run this in the very thread that it is to end.
        if thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)


class Producer:
    """The thread's side: walks, gathers, transforms, puts.

    Args:
        options: of the loader.
        link: to the consumer.
        take: copies rows of a shard.
        first_epoch: number of its first epoch.
        first_pass: number of its first pass.
    """

    def __init__(
        self, options: LoaderOptions, link: Link, take: Take, first_epoch: int, first_pass: int
    ) -> None:
        self._options = options
        self._link = link
        self._take = take
        self._first_epoch = first_epoch
        self._first_pass = first_pass
        self._gatherer: Gatherer | None = None
        self._transform: Transform | None = None
        self._block_rows = options.batch_size

    def run(self) -> None:
        """Produce epochs until the link is closed; any error goes to the consumer."""
        link = self._link
        walk = Walk(self._options, self._first_pass, link.stop, link.wake, self._begin_pass)
        try:
            for epoch in itertools.count(self._first_epoch):
                self._epoch(epoch, walk)
                link.items.put(EpochEnd(epoch))
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised in the consumer
            link.items.put(Failure(error))
        finally:
            walk.close()
            if self._transform is not None:
                self._transform.close()

    def _begin_pass(self, begun: OpenPass) -> None:
        snapshot = begun.snapshot
        facts = PassFacts(snapshot.shards, snapshot.view, begun.waited_seconds)
        self._link.items.put(PassBegun(begun.number, facts))
        if self._gatherer is None:
            self._prepare(snapshot)

    def _prepare(self, snapshot: Snapshot) -> None:
        options, nbytes = self._options, snapshot.schema.nbytes
        self._block_rows = options.batch_size * batches_per_block(nbytes, options.batch_size)
        self._gatherer = Gatherer(
            snapshot.schema, self._block_rows, self._take, in_order=nbytes < LARGE_ROW_BYTES
        )
        if options.transform is not None:
            self._transform = Transform(options.transform, options.seed, self._block_rows)

    def _epoch(self, epoch: int, walk: Walk) -> None:
        delivered = 0
        for pieces in self._pieces(epoch, walk):
            if not self._abandoned(epoch):
                delivered += self._deliver(epoch, walk, pieces)
        if not delivered and not self._abandoned(epoch):
            raise CacheError(
                f"no batch of {self._options.batch_size} samples can be read from "
                f"{self._options.root}; run growcache check"
            )

    def _pieces(self, epoch: int, walk: Walk) -> Iterator[list[Piece]]:
        """Yield the rows of each block of an epoch.

        An abandoned epoch of fixed length is walked to its end all the same, without
        copying, so that what later epochs hold does not depend on how far this one ran.
        """
        left = self._options.samples_per_epoch
        if left is None:
            walk.next_pass()
            while not self._abandoned(epoch):
                pieces = walk.take(self._block_rows, across=False)
                yield pieces
                if _count(pieces) < self._block_rows:
                    return
            return
        left = self._options.usable(left)
        while left:
            pieces = walk.take(min(left, self._block_rows), across=True)
            left -= _count(pieces)
            yield pieces

    def _abandoned(self, epoch: int) -> bool:
        return epoch < self._link.wanted

    def _deliver(self, epoch: int, walk: Walk, pieces: list[Piece]) -> int:
        self._link.skipped = walk.skipped
        rows = self._options.usable(_count(pieces))
        pieces = _shortened(pieces, rows)
        if not pieces:
            return 0
        self._link.tokens.get()
        if self._link.stop.is_set():
            raise StoppedError
        block = self._assemble(epoch, pieces)
        walk.read(pieces)
        self._link.items.put(block)
        return rows

    def _assemble(self, epoch: int, pieces: list[Piece]) -> Block:
        assert self._gatherer is not None
        shards: list[MappedShard | None] = []
        places, rows, numbers = [], [], []
        for window, start, stop in pieces:
            place = window.places[start:stop]
            places.append(place + len(shards))
            rows.append(window.rows[start:stop])
            numbers.append(np.asarray(window.plan.numbers)[place])
            shards += window.shards
        arrays, origin = self._gatherer.gather(
            shards, np.concatenate(places), np.concatenate(rows)
        )
        if self._transform is not None:
            arrays = self._transformed(arrays, origin, pieces)
        return Block(epoch, arrays, np.concatenate(numbers)[origin])

    def _transformed(self, arrays: Batch, origin: Integers, pieces: list[Piece]) -> Batch:
        assert self._transform is not None
        where: list[tuple[int, int]] = []
        origins: list[Origin] = []
        for window, start, stop in pieces:
            plan = window.plan
            where += [(plan.pass_number, p) for p in window.positions[start:stop].tolist()]
            if self._transform.takes_origin:
                pairs = zip(window.places[start:stop], window.rows[start:stop], strict=True)
                origins += [
                    window.snapshot.sidecar(plan.numbers[place]).origin(row)
                    for place, row in pairs
                ]
        order = origin.tolist()
        return self._transform.run(
            arrays,
            [where[i] for i in order],
            [origins[i] for i in order] if origins else None,
        )


def _count(pieces: list[Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


def _shortened(pieces: list[Piece], rows: int) -> list[Piece]:
    kept = []
    for window, start, stop in pieces:
        n = min(rows, stop - start)
        if n:
            kept.append(Piece(window, start, start + n))
        rows -= n
    return kept


class Engine:
    """The consumer's side: each `epoch` is one epoch of batches.

    Its thread starts with the first epoch and ends with `close`, garbage collection or the
    interpreter.

    Args:
        options: of the loader.
        take: copies rows of a shard; the adapter hands in what its framework does best.
        on_thread_start: called in the thread before all else.
    """

    def __init__(
        self,
        options: LoaderOptions,
        take: Take = take_rows,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._options = options
        self._take = take
        self._on_thread_start = on_thread_start
        self._link: Link | None = None
        self._pid = os.getpid()
        self._next_epoch = self._next_pass = 0
        self._finalizer: weakref.finalize[..., Engine] | None = None
        self._tally = Tally(options.root)

    def epoch(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch.

        What is left of an epoch that was broken off is not made up for: it is gone, and an
        older iterator raises RuntimeError where it is asked again.
        """
        link = self._running()
        number, self._next_epoch = self._next_epoch, self._next_epoch + 1
        link.wanted = number
        self._tally.begin_epoch()
        while True:
            item = self._receive(link, number)
            if isinstance(item, Failure):
                self.close()
                raise item.error
            if isinstance(item, Block):
                yield from self._batches(item)
                del item  # its memory is wanted for the block after the next
            elif isinstance(item, EpochEnd):
                self._tally.end_epoch()
                return

    @property
    def report(self) -> Report:
        """What was delivered so far."""
        return self._tally.report(self._link.skipped if self._link else 0)

    def close(self) -> None:
        """End the thread and free the leases; the next epoch starts another."""
        if self._finalizer is not None:
            self._finalizer()
        self._link = self._finalizer = None

    def _running(self) -> Link:
        if self._pid != os.getpid():  # a fork copies no threads
            self._link, self._pid = None, os.getpid()
            if self._finalizer is not None:
                self._finalizer.detach()
        if self._link is None:
            self._link = self._start()
        return self._link

    def _start(self) -> Link:
        link = Link()
        link.wanted = self._next_epoch
        producer = Producer(self._options, link, self._take, self._next_epoch, self._next_pass)
        prepare = self._on_thread_start

        def run() -> None:
            if prepare is not None:
                prepare()
            producer.run()

        thread = threading.Thread(target=run, name="growcache-loader", daemon=True)
        thread.start()
        # Also at exit: a daemon in the middle of a copy must not meet a dying interpreter.
        self._finalizer = weakref.finalize(self, link.close, thread)
        return link

    def _receive(self, link: Link, number: int) -> Item:
        """Return the next item of this epoch; what is left of earlier ones is dropped."""
        while True:
            if link is not self._link or link.wanted != number:
                raise RuntimeError(
                    "this epoch is over: the loader was closed, or iterated anew meanwhile"
                )
            began = time.perf_counter()
            item = link.items.get()
            self._tally.waited(time.perf_counter() - began)
            if isinstance(item, PassBegun):
                self._next_pass = item.number + 1
                self._tally.begin_pass(item.facts)
                continue
            if isinstance(item, Block):
                link.tokens.put(None)
            if isinstance(item, Failure) or item.epoch == number:
                return item

    def _batches(self, block: Block) -> Iterator[Batch]:
        rows, size = len(block.numbers), self._options.batch_size
        delivered = 0
        try:
            for start in range(0, rows, size):
                delivered = min(start + size, rows)
                yield {name: a[start:delivered] for name, a in block.arrays.items()}
        finally:
            self._tally.deliver(block.numbers[:delivered])
