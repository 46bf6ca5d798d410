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
from growcache.loading.position import LazyPickle, PassPlan, PassPosition
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
    """A snapshot was taken for the blocks that follow; `lease` is the name of its lease."""

    number: int
    plan: LazyPickle[PassPlan]
    facts: PassFacts
    lease: str = ""


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All blocks of an epoch were made; `lost` rows behind the last batch could not be read."""

    epoch: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    error: BaseException


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The producer's process ended without being asked to."""

    why: str


Item: TypeAlias = Block | PassBegun | EpochEnd | Failure | ProcessDied
LAST_ITEMS = Failure | ProcessDied  # nothing follows these


class Channel:
    """What a producer knows about its consumer.

    A token True allows one block; False asks to release what was delivered.
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
        self.wanted = wanted
        self._begun = threading.Condition()
        self._closing: list[Callable[[], None]] = []
        self.allow(MIN_BLOCKS_AHEAD)

    def allow(self, blocks: int) -> None:
        for _ in range(blocks):
            self.tokens.put(True)

    def more(self, delivered: PassPosition, *, waited: bool) -> None:
        """Acknowledge a block and record the consumer's position.

        The end of a pass is sent at once, so the two may arrive in either order.
        """
        self.delivered, self.waited = max(self.delivered, delivered), waited
        self.tokens.put(True)

    def end_pass(self, pass_number: int) -> None:
        self.delivered = PassPosition(pass_number + 1, 0)
        self.tokens.put(False)
        self.news.set()

    def begin(self, epoch: int) -> None:
        with self._begun:
            self.wanted = epoch
            self._begun.notify_all()

    def wants(self, epoch: int) -> bool:
        return epoch >= self.wanted and not self.stop.is_set()

    def wait_begun(self, epoch: int) -> None:
        with self._begun:
            self._begun.wait_for(lambda: self.wanted >= epoch or self.stop.is_set())
        self._give_way()

    def pause(self, epoch: int, seconds: float) -> bool:
        """Wait until the epoch is over, or for the given time; return whether to stop."""
        with self._begun:
            self._begun.wait_for(
                lambda: self.wanted > epoch or self.stop.is_set(), timeout=seconds
            )
        return self.stop.is_set()

    def token(self) -> bool:
        try:
            return self.tokens.get_nowait()
        except queue.Empty:
            token = self.tokens.get()
        self._give_way()
        return token

    def _give_way(self) -> None:
        """Wait until the consumer that woke this thread has its batch and is in its step.

        It releases the GIL where it drops the batch before. A thread that starts to work at
        that moment takes the GIL or the core away from it for milliseconds.
        """
        self.stop.wait(self.head_start())

    def head_start(self) -> float:
        return 0.0 if self.by_block else head_start_seconds(self.step_seconds)

    def hurries(self) -> bool:
        """Return whether the consumer waits, or will at once."""
        return self.waits or (self.waited and self.step_seconds < SHORT_STEP_SECONDS)

    def when_closed(self, call: Callable[[], None]) -> None:
        with self._begun:
            if not self.stop.is_set():
                self._closing.append(call)
                return
        call()

    def close(self) -> None:
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
    """A producer as the consumer sees it; used by the consumer's thread, except `close`.

    `broken` is True once nothing more comes, or an interrupt may have lost an item.
    """

    kind: StageKind
    delivered: PassPosition
    waited: bool

    @property
    def broken(self) -> bool: ...

    def begin(self, epoch: int) -> None: ...

    def receive(self, seconds: float | None = None) -> Item | None: ...

    def more(self) -> None: ...

    def done(self) -> None: ...

    def end_pass(self, pass_number: int) -> None: ...

    def close(self) -> None: ...


class AckQueue(queue.SimpleQueue[Item]):
    """A queue that counts its items, so that an item lost to an interrupt is noticed."""

    def __init__(self) -> None:
        self.made = self.done = 0

    def put(self, item: Item, block: bool = True, timeout: float | None = None) -> None:
        """Count and put an item.

        Incremented before the put, so that a concurrent reader over-counts lost items rather
        than under-counts.
        """
        self.made += 1
        super().put(item)

    @property
    def misses(self) -> bool:
        return self.made > self.done + self.qsize()


class QueuedStage:
    def __init__(self, wanted: int) -> None:
        self._items = AckQueue()
        self._link = Channel(wanted, self._items.put)
        self._thread: threading.Thread | None = None
        self._delivered_at = -math.inf
        self._pid = os.getpid()
        self.waited = False

    @property
    def broken(self) -> bool:
        return self._items.misses

    def done(self) -> None:
        self._items.done += 1

    def _begin_thread(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name="growcache-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._pid != os.getpid():  # a forked child has no such thread, and maybe its locks
            return
        self._link.close()
        self._end_thread()

    def _end_thread(self) -> None:
        self._items.put(Failure(RuntimeError(EPOCH_IS_OVER)))
        # The collector may run this in the very thread that it is to end, or in one of those
        # that the thread waits for.
        ours = threading.current_thread().name.startswith("growcache-")
        if self._thread is not None and not ours:
            self._thread.join(JOIN_SECONDS)

    @property
    def delivered(self) -> PassPosition:
        return self._link.delivered

    @delivered.setter
    def delivered(self, mark: PassPosition) -> None:
        before, self._delivered_at = self._delivered_at, time.monotonic()
        self._link.step_seconds = self._delivered_at - before
        self._link.delivered = mark

    def receive(self, seconds: float | None = None) -> Item | None:
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
        self._link.waited, self.waited = self.waited, False
        self._link.tokens.put(True)
