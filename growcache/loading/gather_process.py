"""A producer in a process of its own, outside of the trainer's GIL: both ends.

The consumer's thread reads the socket and returns free buffers with the same message. A thread of
the trainer takes part only where `batch_transform` or a device needs one. The end of the connection
without a stop command is the trainer's death and ends the process at once, so that its leases are
those of a dead reader, as the trainer's own would be.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from growcache.cache import system
from growcache.cache.lease_views import RankNote
from growcache.cache.system import release_at_sigterm
from growcache.loading import framework
from growcache.loading.blocks import BatchCutter, Block
from growcache.loading.buffers import BufferBytes
from growcache.loading.channel import (
    EPOCH_IS_OVER,
    LAST_ITEMS,
    Channel,
    Failure,
    Item,
    ProcessDied,
    QueuedStage,
    StageKind,
)
from growcache.loading.child_process import ChildProcess, MessageSocket, StopCommand, listen
from growcache.loading.framework import Bytes, Framework, Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.position import PassPosition, Position
from growcache.loading.producer import Producer
from growcache.loading.rank_sync import rank_group
from growcache.loading.resume import MissingShards
from growcache.loading.shared_memory import SharedReceiver, SharedSender, plain_message
from growcache.loading.user_function import function_arguments, pickle_function, portable_error
from growcache.threads import StoppedError


@dataclass(frozen=True, slots=True)
class GatherSetup:
    """The first command to a gather process.

    `argv` is the trainer's, whose command the leases name; `failed` is why the service of the
    trainer has ended, if it has.
    """

    options: LoaderOptions
    start: Position
    missing: MissingShards
    note: RankNote | None
    wanted: int
    argv: list[str]
    level: int
    failed: str | None


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    epoch: int


@dataclass(frozen=True, slots=True)
class BlockReceived:
    """The acknowledgement of a block.

    Buffers `free` may be filled again; `spoiled` ones may not.
    """

    delivered: PassPosition
    waited: bool
    free: list[int]
    spoiled: list[int]


@dataclass(frozen=True, slots=True)
class EndPass:
    pass_number: int


@dataclass(frozen=True, slots=True)
class ServiceChanged:
    """The trainer's service on the cache has ended, for this reason, or restarted (None)."""

    reason: str | None


Command: TypeAlias = (
    GatherSetup | BeginEpoch | BlockReceived | EndPass | StopCommand | ServiceChanged
)


@dataclass(frozen=True, slots=True)
class LogRecordSent:
    name: str
    level: int
    message: str


class ProcessStage:
    """A producer in a gather process."""

    kind: StageKind = "process"

    def __init__(
        self,
        child: ChildProcess,
        order: GatherSetup,
        finish: Callable[[Block], Block] | None = None,
        lock: Callable[[BufferBytes], None] | None = None,
    ) -> None:
        self._child = child
        self._finish = finish
        self._borrowed = SharedReceiver(lock)
        self._root = order.options.root.resolve()
        self.delivered = PassPosition(-1, 0)
        self.waited = False
        self.broken = False
        child.send(order)
        system.service_listeners.add(self)  # the order comes first
        if (reason := system.service_end_reason(self._root)) != order.failed:
            self.service_changed(self._root, reason)

    def begin(self, epoch: int) -> None:
        self._child.send(BeginEpoch(epoch))

    def receive(self, seconds: float | None = None) -> Item | None:
        while True:
            if not self._child.wire.has_come(0):
                self.waited = True
                if not self._child.wire.has_come(seconds):
                    return None
            self.broken = True  # an interrupt may come with half a message read, or a whole one
            item = self._received()
            if isinstance(item, LogRecordSent):
                logging.getLogger(item.name).log(item.level, "%s", item.message)
            elif isinstance(item, Block) and self._finish is not None:
                return self._finish(item)
            else:
                return item
            self.broken = False

    def _received(self) -> Item | LogRecordSent:
        try:
            item: Item | LogRecordSent = self._borrowed.receive(self._child.wire)
        except EOFError as end:
            if self._child.closed:
                return Failure(RuntimeError(EPOCH_IS_OVER))
            return ProcessDied(self._child.why(end))
        return item

    def done(self) -> None:
        self.broken = False

    def more(self) -> None:
        waited, self.waited = self.waited, False
        self._child.send(BlockReceived(self.delivered, waited, *self._borrowed.take_back()))

    def end_pass(self, pass_number: int) -> None:
        self._child.send(EndPass(pass_number))

    def service_changed(self, root: Path, reason: str | None) -> None:
        if root == self._root and not self._child.closed:
            self._child.send(ServiceChanged(reason))

    def close(self) -> None:
        self._child.close()


def portable_options(options: LoaderOptions) -> LoaderOptions:
    """Return the options as a gather process needs them."""
    # By the whole path, for either process may go elsewhere.
    function = options.transform
    shipped = (
        None if function is None else pickle_function(function, function_arguments(function))
    )
    return replace(options, path=str(options.root), transform=shipped, batch_transform=None)


class RelayedStage(QueuedStage):
    """A producer in a gather process, with a thread that cuts its blocks."""

    kind: StageKind = "process"

    def __init__(self, source: ProcessStage, wanted: int, cutter: BatchCutter) -> None:
        super().__init__(wanted)
        self._source = source
        self._cutter = cutter
        self._link.when_closed(source.close)
        self._begin_thread(self._run)

    def begin(self, epoch: int) -> None:
        self._link.begin(epoch)
        self._source.begin(epoch)

    def end_pass(self, pass_number: int) -> None:
        self._source.end_pass(pass_number)

    def _run(self) -> None:
        try:
            self._pass_all_on()
        except BaseException as error:  # noqa: BLE001 - it is raised in the consumer
            self._link.put(Failure(error))

    def _pass_all_on(self) -> None:
        link, last = self._link, False
        while not last and not link.stop.is_set():
            item = self._source.receive()
            assert item is not None  # it waits without end
            last = isinstance(item, LAST_ITEMS)
            if isinstance(item, Block):
                self._pass_on(item)
            else:
                link.put(item)

    def _pass_on(self, block: Block) -> None:
        link = self._link
        self._cutter.cut_now(block, functools.partial(link.wants, block.epoch))
        link.token()
        link.put(block)
        self._source.delivered, self._source.waited = link.delivered, link.waited
        self._source.more()


# The thread that gathers takes turns with those that open windows; by default for 5 ms each.
SWITCH_SECONDS = 0.5e-3
# From here on a row is copied quicker than an index of all rows.
LOCKED_ROW_BYTES = 8192


def main(wire: MessageSocket) -> None:
    """Serve the trainer until it sends stop, or is gone."""
    try:
        order = wire.receive().head
    except EOFError:
        return
    if isinstance(order, GatherSetup):  # else there is nothing to do any more
        _run_producer(wire, order)
    # What threads are left hold nothing; an orderly end would wait for them.
    sys.stderr.flush()
    os._exit(0)


def _run_producer(wire: MessageSocket, order: GatherSetup) -> None:
    release_at_sigterm()
    sys.argv = order.argv
    sys.setswitchinterval(SWITCH_SECONDS)
    _forward_logs(wire, order.level)
    system.note_service_end(order.options.root, order.failed)
    arena = SharedSender()
    outlet = _ProcessOutput(wire, arena, order.wanted)
    listen(wire, functools.partial(_receive_commands, wire, arena, outlet.link, order))
    ranks = rank_group(order.options, order.note)
    lent = Framework(take_rows_locked, take_slices_locked, allocate=arena.allocate)
    begin = order.start, order.missing
    Producer(order.options, outlet.link, lent, *begin, ranks, arena=arena).run()


def take_rows_locked(memory: Bytes, starts: Integers, out: Bytes) -> None:
    """Copy rows like `growcache.loading.framework.take_rows`, long ones one by one.

    That is fastest, and holds the interpreter's lock, which no other thread needs here. With
    rows of 256 KiB it has 1.1 times the speed of torch's copies, with 3 KiB three quarters; but
    the import of torch takes two seconds and 150 MB.
    """
    nbytes = out.shape[1]
    if nbytes < LOCKED_ROW_BYTES:
        framework.take_rows(memory, starts, out)
        return
    if starts.min() < 0 or starts.max() > len(memory) - nbytes:
        raise IndexError(f"rows at {starts.min()} to {starts.max()} of {len(memory)} bytes")
    source, target = memory.data, out.reshape(-1).data
    for place, start in zip(range(0, len(target), nbytes), starts.tolist(), strict=True):
        target[place : place + nbytes] = source[start : start + nbytes]


def take_slices_locked(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> None:
    np.concatenate(framework.slices(memory, starts, lengths), out=out)


class _ProcessOutput:
    def __init__(self, wire: MessageSocket, arena: SharedSender, wanted: int) -> None:
        self._wire = wire
        self._arena = arena
        self.link = Channel(wanted, self._put)
        self.link.by_block = True

    def _put(self, item: Item) -> None:
        if isinstance(item, Failure):
            item = Failure(portable_error(item.error, "the gather process"))
        try:
            self._arena.send(self._wire, item)
        except OSError:
            # Told to stop, or to be told in a moment; where the trainer is gone, this ends. It
            # ends as well where but half of a message went, and the trainer is told.
            self._wire.shut()
            self.link.stop.wait()
            raise StoppedError from None


def _receive_commands(
    wire: MessageSocket, arena: SharedSender, link: Channel, order: GatherSetup
) -> None:
    while True:
        match wire.receive().head:
            case BlockReceived(delivered, waited, free, spoiled):
                arena.returned(free, spoiled)
                link.more(delivered, waited=waited)
            case BeginEpoch(epoch):
                link.begin(epoch)
            case EndPass(pass_number):
                link.end_pass(pass_number)
            case ServiceChanged(reason):
                system.note_service_end(order.options.root, reason)
                link.wake.set()
            case StopCommand():
                link.close()
                return


class _LogForwarder(logging.Handler):
    """Sends log records to the trainer."""

    def __init__(self, wire: MessageSocket) -> None:
        super().__init__()
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        said = LogRecordSent(record.name, record.levelno, record.getMessage())
        try:
            self._wire.send(plain_message(said))
        except OSError:
            return  # nobody is there to hear it


def _forward_logs(wire: MessageSocket, level: int) -> None:
    log = logging.getLogger("growcache")
    log.setLevel(level)
    log.addHandler(_LogForwarder(wire))
    log.propagate = False
