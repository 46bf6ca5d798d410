"""The channel between a consumer and what makes its batches, in one process or across two."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from growcache.loading.blocks import Block
from growcache.loading.child_process import JOIN_SECONDS
from growcache.loading.position import LazyPickle, PassPlan, PassPosition, Position
from growcache.loading.report import PassFacts

HEAD_START_SECONDS = 0.01  # of the consumer, at most


def head_start_seconds(step_seconds: float) -> float:
    """Return how long a thread that the consumer woke lets it go first.

    Half a step: then it is neither still about to take its batch nor about to ask for the
    next one.

    >>> head_start_seconds(0.005), head_start_seconds(3.0)
    (0.0025, 0.01)
    """
    return min(HEAD_START_SECONDS, step_seconds / 2)


MIN_BLOCKS_AHEAD = 2
# A loop that computes no longer for a batch, and had to wait, will wait again.
SHORT_STEP_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class PassBegun:
    """A snapshot was taken for what follows.

    Attributes:
        number: of the pass.
        plan: of it; the loop, which waits for this item, needs it for a checkpoint only.
        facts: for the report.
        lease: the name of the lease that holds the snapshot.
    """

    number: int
    plan: LazyPickle[PassPlan]
    facts: PassFacts
    lease: str = ""


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All blocks of an epoch have come.

    Attributes:
        epoch: that is over.
        lost: planned rows behind its last batch that could not be read.
    """

    epoch: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """The producer ended with this error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Halted:
    """The producer was asked to halt: nothing follows, and another may go on from here.

    It keeps its leases until it is closed.
    """

    state: Position


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The process that the producer ran in is gone, and nobody asked it to go."""

    why: str


Item: TypeAlias = Block | PassBegun | EpochEnd | Failure | Halted | ProcessDied
LAST_ITEMS = Failure | Halted | ProcessDied  # nothing follows these


class HaltedError(Exception):
    """The producer was asked to halt; no user sees it."""


class Channel:
    """What a producer knows of its consumer.

    Args:
        wanted: the epoch that the consumer has begun.
        put: takes what the producer made to the consumer.

    Attributes:
        put: see there; a block needs a token.
        tokens: True: a right to put a block. False: look at what was delivered.
        stop: set when the producer shall end, together with ``wake``.
        wake: ends its waits for samples.
        news: set when a pass is over, for a producer that waits for the next one to begin.
        halt: set when it shall make no more blocks, but keep its leases.
        wanted: the epoch that the consumer has begun; what belongs to earlier ones is not
            made any more.
        delivered: where the consumer stands.
        by_block: whether that is told with each block only, when it begins.
        waited: whether the consumer had to wait for the latest block that it received.
        waits: whether it waits for what comes next, where that is known.
        step_seconds: of the consumer, the latest one, where that is known.
        making: (seconds, CPU seconds) that blocks took, without any wait for others.
    """

    def __init__(self, wanted: int, put: Callable[[Item], None]) -> None:
        self.put = put
        self.tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.delivered = PassPosition(-1, 0)
        self.by_block = False
        self.waited = True  # for what comes first
        self.waits = False
        self.step_seconds = math.inf
        self.stop = threading.Event()
        self.wake = threading.Event()
        self.news = threading.Event()
        self.halt = threading.Event()
        self.wanted = wanted
        self.making = (0.0, 0.0)
        self._begun = threading.Condition()
        self._closing: list[Callable[[], None]] = []
        self.allow(MIN_BLOCKS_AHEAD)

    def allow(self, blocks: int) -> None:
        """Let so many more blocks wait for the consumer."""
        for _ in range(blocks):
            self.tokens.put(True)

    def more(self, delivered: PassPosition, *, waited: bool) -> None:
        """Say, for the consumer, that a block was received, and how far the loop was then.

        That its pass is over is said at once, so the two may come in either order.
        """
        self.delivered, self.waited = max(self.delivered, delivered), waited
        self.tokens.put(True)

    def end_pass(self, pass_number: int) -> None:
        """Say, for the consumer, that a pass is over, and its lease wanted no more."""
        self.delivered = PassPosition(pass_number + 1, 0)
        self.tokens.put(False)
        self.news.set()

    def begin(self, epoch: int) -> None:
        """Begin an epoch, for the consumer."""
        with self._begun:
            self.wanted = epoch
            self._begun.notify_all()

    def wants(self, epoch: int) -> bool:
        """Whether the consumer still wants what is made for an epoch."""
        return epoch >= self.wanted and not self.stop.is_set()

    def wait_begun(self, epoch: int) -> None:
        """Return when the consumer has begun the epoch, or the link is closed."""
        with self._begun:
            self._begun.wait_for(lambda: self.wanted >= epoch or self.stop.is_set())
        self._give_way()

    def pause(self, epoch: int, seconds: float) -> bool:
        """Wait so long, or until the consumer is through with an epoch; return whether to end."""
        with self._begun:
            self._begun.wait_for(
                lambda: self.wanted > epoch or self.stop.is_set(), timeout=seconds
            )
        return self.stop.is_set()

    def token(self) -> bool:
        """Return the next of the tokens, once there is one, and the consumer in its step."""
        try:
            return self.tokens.get_nowait()
        except queue.Empty:
            token = self.tokens.get()
        self._give_way()
        return token

    def _give_way(self) -> None:
        """Wait until the consumer that woke this thread has its batch, and is in its step.

        It is on its way there at this moment, and lets go of the GIL where it drops the batch
        before. A thread that goes to work now takes the GIL, or the core, away from it: for
        milliseconds, where there are as many busy threads as cores.
        """
        self.stop.wait(self.head_start())

    def head_start(self) -> float:
        """Return for how many seconds the consumer that woke a thread is not in its step yet.

        One in another process loses nothing by what is done here.
        """
        return 0.0 if self.by_block else head_start_seconds(self.step_seconds)

    def hurries(self) -> bool:
        """Return whether the consumer waits, or will at once."""
        return self.waits or (self.waited and self.step_seconds < SHORT_STEP_SECONDS)

    def when_closed(self, call: Callable[[], None]) -> None:
        """Have what the producer waits for ended as well, by who closes the link."""
        with self._begun:
            if not self.stop.is_set():
                self._closing.append(call)
                return
        call()

    def close(self) -> None:
        """Have the producer end; it frees its leases on the way out."""
        with self._begun:
            self.stop.set()
            closing, self._closing = self._closing, []
            self._begun.notify_all()
        self.wake.set()
        self.tokens.put(True)
        for call in closing:
            call()


StageKind: TypeAlias = Literal["thread", "process"]

EPOCH_IS_OVER = "this epoch is over: the loader was closed, or iterated anew meanwhile"


class Stage(Protocol):
    """A producer as the consumer sees it; used by the consumer's thread, but for `close`.

    Attributes:
        kind: where it runs.
        delivered: where the consumer stands.
        waited: whether it had to wait for the latest block.
        broken: whether nothing more comes, or something was lost: an interrupt may come when
            it was received, and nothing was done about it.
    """

    kind: StageKind
    delivered: PassPosition
    waited: bool

    @property
    def broken(self) -> bool:
        """See there."""

    @property
    def halted(self) -> Position | None:
        """Where it halted, known before all that it made was received; None: it goes on."""

    @property
    def making(self) -> tuple[float, float]:
        """(seconds, CPU seconds) that blocks took here, without any wait for others."""

    def begin(self, epoch: int) -> None:
        """Begin an epoch; what belongs to earlier ones is not wanted any more."""

    def receive(self, seconds: float | None = None) -> Item | None:
        """Return what comes next; waits for it, or so long: then None."""

    def more(self) -> None:
        """Say that a block was received, so that another may be put."""

    def done(self) -> None:
        """Say that all was done about what was received, and more is to follow."""

    def end_pass(self, pass_number: int) -> None:
        """Say that a pass is over, and its lease wanted no more."""

    def halt(self) -> None:
        """Have it make no more blocks, but keep its leases until it is closed."""

    def close(self) -> None:
        """End it, from any thread; it frees its leases on the way out."""


class AckQueue(queue.SimpleQueue[Item]):
    """What one thread makes and another takes, which may lose of it what an interrupt meets.

    Attributes:
        made: items that were put.
        done: items about which all was done.
        halted: where their producer halted, if it did.
    """

    def __init__(self) -> None:
        self.made = self.done = 0
        self.halted: Position | None = None

    def put(self, item: Item, block: bool = True, timeout: float | None = None) -> None:
        """Put an item; counted first, for who looks in between should miss too many."""
        self.made += 1
        if isinstance(item, Halted):
            self.halted = item.state
        super().put(item)

    @property
    def misses(self) -> bool:
        """Whether there are items that were taken, and not all was done about them."""
        return self.made > self.done + self.qsize()


class QueuedStage:
    """What a thread of this process puts, and the consumer receives.

    Args:
        wanted: the epoch that begins now.
    """

    def __init__(self, wanted: int) -> None:
        self._items = AckQueue()
        self._link = Channel(wanted, self._items.put)
        self._thread: threading.Thread | None = None
        self._delivered_at = -math.inf
        self._pid = os.getpid()
        self.waited = False

    @property
    def broken(self) -> bool:
        """Whether an item was lost, or the last one came."""
        return self._items.misses

    def done(self) -> None:
        """Say that all was done about what was received."""
        self._items.done += 1

    def _begin_thread(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name="growcache-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; twice is harmless."""
        if self._pid != os.getpid():  # a forked child has no such thread, and maybe its locks
            return
        self._link.close()
        self._end_thread()

    def _end_thread(self) -> None:
        """Wake the consumer, and wait for the thread, which was told to end."""
        self._items.put(Failure(RuntimeError(EPOCH_IS_OVER)))
        # The collector may run this in the very thread that it is to end, or in one of those
        # that the thread waits for.
        ours = threading.current_thread().name.startswith("growcache-")
        if self._thread is not None and not ours:
            self._thread.join(JOIN_SECONDS)

    @property
    def delivered(self) -> PassPosition:
        """Where the consumer stands."""
        return self._link.delivered

    @delivered.setter
    def delivered(self, mark: PassPosition) -> None:
        before, self._delivered_at = self._delivered_at, time.monotonic()
        self._link.step_seconds = self._delivered_at - before
        self._link.delivered = mark

    def receive(self, seconds: float | None = None) -> Item | None:
        """Return what comes next, None where it takes longer."""
        self._link.waits = self._items.empty()
        self.waited |= self._link.waits
        began = time.monotonic()
        try:
            item = self._items.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            self._link.waits = False
            self._delivered_at += time.monotonic() - began  # which is no part of the step
        return item

    def more(self) -> None:
        """Say that a block was received."""
        self._link.waited, self.waited = self.waited, False
        self._link.tokens.put(True)
