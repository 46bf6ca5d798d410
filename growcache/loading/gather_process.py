"""A producer in a gather process, outside the trainer's GIL: when it is worth it, and both ends.

A copying thread needs no interpreter lock, except between two copies. While the loop is busy in
Python, the thread gets the lock only every switch interval (5 ms), and a process helps.

The consumer's thread reads the socket, and returns free buffers in the same message. Another
thread of the trainer takes part only if `batch_transform` or a device needs one. The end of the
connection without a stop command means the trainer's death. It ends the process at once, so
that its leases are those of a dead reader.
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
from growcache.errors import CacheError
from growcache.loading import framework
from growcache.loading.blocks import BatchCutter, Block
from growcache.loading.buffers import BLOCK_BYTES, BufferBytes
from growcache.loading.channel import (
    EPOCH_IS_OVER,
    LAST_ITEMS,
    MIN_BLOCKS_AHEAD,
    Demand,
    Failure,
    Item,
    ProcessDied,
    QueuedStage,
    Stage,
    StageKind,
)
from growcache.loading.child_process import ChildProcess, MessageSocket, StopCommand, listen
from growcache.loading.framework import Bytes, Framework, Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import PassPosition
from growcache.loading.producer import Producer
from growcache.loading.rank_sync import next_rank_note, rank_group
from growcache.loading.resume import MissingShards, Position
from growcache.loading.shared_memory import SharedReceiver, SharedSender, plain_message
from growcache.loading.transform import function_arguments, pickle_function, portable_error
from growcache.threads import StoppedError

_log = logging.getLogger(__name__)

WINDOW_SECONDS = 0.5
MIN_BATCHES = 4  # in a window
VOTES = 3  # consecutive windows, because one may be unusual
MIN_STALLED_SHARE = 0.3  # of the time in which the thread makes blocks
MIN_STALLED_TIME = 0.02  # of the loop's time; below this, a process is not worth its memory


class GatherChoice:
    """Chooses between thread and process from stalls.

    A thread is stalled if it could run and does not read from disk: it waits for the
    interpreter's lock.
    """

    def __init__(self) -> None:
        self._votes = 0
        self._begin(None, 0)

    def _begin(self, now: float | None, thread: int) -> None:
        self._began, self._thread = now, thread
        self._delayed = run_delay_seconds(thread)
        self._making = self._stalled = 0.0
        self._batches = 0

    def wants_process(self, now: float, block: Block) -> bool:
        if self._began is None or self._thread != block.thread:
            self._begin(now, block.thread)
            return False
        self._making += block.seconds
        self._stalled += block.stalled_seconds
        self._batches += len(block.marks)
        elapsed = now - self._began
        if elapsed < WINDOW_SECONDS or self._batches < MIN_BATCHES:
            return False
        # A process would wait for a processor, too.
        delayed = run_delay_seconds(self._thread) - self._delayed
        stalled = max(0.0, self._stalled - delayed)
        stalls = (
            stalled >= MIN_STALLED_SHARE * self._making
            and stalled >= MIN_STALLED_TIME * elapsed
        )
        self._votes = self._votes + 1 if stalls else 0
        if self._votes < VOTES:
            self._begin(now, block.thread)
            return False
        _log.info(
            "gather thread stalls %.0f %% of its time on the interpreter's lock; a gather "
            "process takes over",
            100 * stalled / max(1e-9, self._making),
        )
        return True


def run_delay_seconds(thread: int) -> float:
    """Return how long a thread of this process was ready without a processor; 0 if unknown."""
    try:
        _, nanoseconds, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(nanoseconds) / 1e9


def may_switch_to_process(options: LoaderOptions) -> bool:
    """Return whether the loader may change to a process.

    Other ranks follow the process that they know, and a transform runs in threads of the
    trainer. A fixed set is pinned by the pass that found it.
    """
    pinned = options.keeps_count or options.fixed or options.transform is not None
    return options.gather == "auto" and not pinned and len(os.sched_getaffinity(0)) > 1


def kind_after_death(options: LoaderOptions, died: ProcessDied, *, again: bool) -> StageKind:
    """Return the kind of the next stage after a process died.

    Raises:
        CacheError: The process was itself a replacement, or other ranks follow it.
    """
    if options.gather != "auto" and (again or options.ranks.share):
        reason = "again, before its first batch" if again else "and other ranks follow it"
        raise CacheError(
            f"the gather process {died.why}, {reason}; find out what ended it (the kernel's "
            "log names processes that it killed because memory ran out), or use gather='thread'",
            code="GC607",
        )
    kind: StageKind = "thread" if options.gather == "auto" else "process"
    _log.warning(
        "gather process %s; %s continues after the last delivered batch",
        *(died.why, "a thread" if kind == "thread" else "another one"),
    )
    return kind


# Blocks that wait as batches if a `CutStage` makes them. The gather process makes as many
# fewer.
CUT_BLOCKS_AHEAD = 1


@dataclass(frozen=True, slots=True)
class GatherSetup:
    options: LoaderOptions
    start: Position
    missing: MissingShards
    note: RankNote | None
    argv: list[str]  # of the trainer, whose command the leases show
    level: int
    failed: str | None  # why the trainer's service ended
    blocks_ahead: int


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    epoch: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    delivered: PassPosition
    waited: bool
    free: list[int]  # buffers that may be filled again
    spoiled: list[int]  # buffers that may not


@dataclass(frozen=True, slots=True)
class EndPass:
    pass_number: int


@dataclass(frozen=True, slots=True)
class ServiceChanged:
    reason: str | None


Command: TypeAlias = (
    GatherSetup | BeginEpoch | Acknowledge | EndPass | StopCommand | ServiceChanged
)


@dataclass(frozen=True, slots=True)
class LogRecordSent:
    name: str
    level: int
    message: str


class RemoteDemand(Demand):
    def __init__(self, epoch: int, child: ChildProcess) -> None:
        super().__init__(epoch, CUT_BLOCKS_AHEAD)
        self._child = child

    def begin(self, epoch: int) -> None:
        super().begin(epoch)
        self._child.send(BeginEpoch(epoch))

    def end_pass(self, pass_number: int) -> None:
        super().end_pass(pass_number)
        self._child.send(EndPass(pass_number))


class ProcessStage(Stage):
    kind: StageKind = "process"

    def __init__(
        self,
        options: LoaderOptions,
        finish: Callable[[Block], Block] | None = None,
        lock: Callable[[BufferBytes], None] | None = None,
    ) -> None:
        super().__init__(options)
        self._finish = finish
        self._receiver = SharedReceiver(lock)
        self._root = options.root.resolve()
        self._waited = False
        self._taken = 0

    @property
    def taken(self) -> int:
        return self._taken

    def reset(self, position: Position, missing: MissingShards) -> None:
        setup = GatherSetup(
            options=portable_options(self._options),
            start=position,
            missing=missing,
            note=next_rank_note(self._options) if self._options.ranks.share else None,
            argv=sys.argv,
            level=logging.getLogger("growcache").getEffectiveLevel(),
            failed=system.service_end_reason(self._options.root),
            blocks_ahead=MIN_BLOCKS_AHEAD - (CUT_BLOCKS_AHEAD if self._finish is None else 0),
        )
        self._child = ChildProcess()
        self.demand = RemoteDemand(position.next_epoch, self._child)
        self._child.send(setup)
        system.service_listeners.add(self)  # the setup comes first
        if (reason := system.service_end_reason(self._root)) != setup.failed:
            self.service_changed(self._root, reason)

    def next(self, seconds: float | None = None) -> Item | None:
        while True:
            if not self._child.connection.has_come(0):
                self._waited = True
                if not self._child.connection.has_come(seconds):
                    return None
            self._taken += 1  # an interrupt may leave half of a message unread
            item = self._receive()
            if item is None or isinstance(item, LogRecordSent):
                self._taken -= 1
                if item is not None:
                    logging.getLogger(item.name).log(item.level, "%s", item.message)
                continue
            if isinstance(item, Block):
                self._acknowledge()
                return item if self._finish is None else self._finish(item)
            return item

    def _receive(self) -> Item | LogRecordSent | None:
        try:
            item: Item | LogRecordSent | None = self._receiver.receive_message(
                self._child.connection
            )
        except EOFError as end:
            if self._child.closed:
                return Failure(RuntimeError(EPOCH_IS_OVER))
            return ProcessDied(self._child.why(end))
        return item

    def _acknowledge(self) -> None:
        waited, self._waited = self._waited, False
        buffers = self._receiver.take_back()
        self._child.send(Acknowledge(self.demand.delivered, waited, *buffers))

    def service_changed(self, root: Path, reason: str | None) -> None:
        """Forward the change. A forked child sends nothing."""
        if root == self._root and not self._child.closed:
            self._child.send(ServiceChanged(reason))

    def close(self) -> None:
        self._child.close()


def portable_options(options: LoaderOptions) -> LoaderOptions:
    # With the absolute path, because either process may change directory.
    function = options.transform
    shipped = (
        None if function is None else pickle_function(function, function_arguments(function))
    )
    return replace(options, path=str(options.root), transform=shipped, batch_transform=None)


class CutStage(QueuedStage):
    """Cuts the blocks of another stage, in a thread ahead of the consumer."""

    def __init__(self, options: LoaderOptions, source: Stage, cutter: BatchCutter) -> None:
        super().__init__(options)
        self.kind = source.kind
        self._source = source
        self._cutter = cutter

    def reset(self, position: Position, missing: MissingShards) -> None:
        self._source.reset(position, missing)
        self.demand = self._source.demand
        self._start_thread(self._run)

    def close(self) -> None:
        if self._pid == os.getpid():
            self.demand.close()
            self._source.close()
            self._end_thread()

    def _run(self) -> None:
        try:
            self._cut_all()
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            self.items.put(Failure(error))

    def _cut_all(self) -> None:
        demand, has_room, last = self.demand, False, False
        while not last and not demand.stop.is_set():
            while not has_room:  # before the source acknowledges a block
                has_room = demand.wait_for_slot()
                demand.yield_to_consumer()
            item = self._source.next()
            assert item is not None  # it waits without a limit
            if isinstance(item, Block):
                self._cutter.cut_now(item, functools.partial(demand.wants, item.epoch))
                has_room = False
            self.items.put(item)
            last = isinstance(item, LAST_ITEMS)
            del item  # its memory is needed again


# The gathering thread takes turns with those that open windows, by default for 5 ms each.
SWITCH_SECONDS = 0.5e-3
# Copying longer rows is faster than making an index of all rows.
LOCKED_ROW_BYTES = 8192


def main(connection: MessageSocket) -> None:
    try:
        setup = connection.receive().head
    except EOFError:
        return
    if isinstance(setup, GatherSetup):  # else nothing is left to do
        _run_producer(connection, setup)
    # The other threads hold nothing, and an orderly exit would wait for them.
    sys.stderr.flush()
    os._exit(0)


def _run_producer(connection: MessageSocket, setup: GatherSetup) -> None:
    release_at_sigterm()
    sys.argv = setup.argv
    sys.setswitchinterval(SWITCH_SECONDS)
    _forward_logs(connection, setup.level)
    system.note_service_end(setup.options.root, setup.failed)
    shared_sender = SharedSender(connection)
    demand = Demand(setup.start.next_epoch, setup.blocks_ahead)
    demand.acknowledged_per_block = True
    listen(
        connection,
        functools.partial(_receive_commands, connection, shared_sender, demand, setup),
    )
    ranks = None if setup.note is None else rank_group(setup.options, setup.note)
    lent = Framework(
        *(take_rows_locked, take_slices_locked),
        allocate=shared_sender.allocate,
        block_bytes=BLOCK_BYTES,
    )
    put = functools.partial(_put, connection, shared_sender, demand)
    begin = setup.start, setup.missing, ranks
    Producer(setup.options, demand, put, lent, *begin, shared_sender=shared_sender).run()


def take_rows_locked(memory: Bytes, starts: Integers, out: Bytes) -> None:
    """Copy long rows one by one, which is fastest if no other thread needs the interpreter's lock.

    Rows of 256 KiB are copied at 1.1 times the speed of torch's copies, and rows of 3 KiB at
    three quarters of it. But importing torch takes two seconds and 150 MB.
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


def _put(
    connection: MessageSocket, shared_sender: SharedSender, demand: Demand, item: Item
) -> None:
    if isinstance(item, Failure):
        item = Failure(portable_error(item.error, "the gather process"))
    try:
        shared_sender.send(connection, item)
    except OSError:
        # A stop command has arrived or is on its way. If the trainer is gone, this process
        # ends. It also ends after half a message, which the trainer notices.
        connection.shut()
        demand.stop.wait()
        raise StoppedError from None


def _receive_commands(
    connection: MessageSocket, shared_sender: SharedSender, demand: Demand, setup: GatherSetup
) -> None:
    while True:
        match connection.receive().head:
            case Acknowledge(delivered, waited, free, spoiled):
                shared_sender.returned(free, spoiled)
                # The end of a pass is sent at once, so the two may arrive in either order.
                demand.delivered = max(demand.delivered, delivered)
                demand.acknowledge(waited=waited)
            case BeginEpoch(epoch):
                demand.begin(epoch)
            case EndPass(pass_number):
                demand.end_pass(pass_number)
            case ServiceChanged(reason):
                system.note_service_end(setup.options.root, reason)
                demand.wake.set()
            case StopCommand():
                demand.close()
                return


class _LogForwarder(logging.Handler):
    def __init__(self, connection: MessageSocket) -> None:
        super().__init__()
        self._wire = connection

    def emit(self, record: logging.LogRecord) -> None:
        said = LogRecordSent(record.name, record.levelno, record.getMessage())
        try:
            self._wire.send(plain_message(said))
        except OSError:
            return  # the trainer is gone


def _forward_logs(connection: MessageSocket, level: int) -> None:
    log = logging.getLogger("growcache")
    log.setLevel(level)
    log.addHandler(_LogForwarder(connection))
    log.propagate = False
