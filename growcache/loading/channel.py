"""The channel between a consumer and the producer of its batches, in one process or between two."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from growcache.loading.blocks import Block
from growcache.loading.child_process import JOIN_SECONDS
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import LazyPickle, PassPlan, PassPosition
from growcache.loading.report import PassFacts
from growcache.loading.resume import MissingShards, Position

HEAD_START_SECONDS = 0.01  # of the consumer, at most


def head_start_seconds(step_seconds: float) -> float:
    """Return how long a thread lets the consumer go first after waking it: half a step.

    By then the consumer has taken its batch, and does not ask for the next one yet.

    >>> head_start_seconds(0.005), head_start_seconds(3.0)
    (0.0025, 0.01)
    """
    return min(HEAD_START_SECONDS, step_seconds / 2)


MIN_BLOCKS_AHEAD = 2
# A loop with a shorter step that had to wait will wait again.
SHORT_STEP_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class PassStarted:
    """A snapshot was taken for the next blocks. `lease` is the name of its lease."""

    number: int
    plan: LazyPickle[PassPlan]
    facts: PassFacts
    lease: str = ""


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All blocks of an epoch were made. `lost` rows after the last batch could not be read."""

    epoch: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    error: BaseException


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The producer's process ended without a stop command."""

    why: str


Item: TypeAlias = Block | PassStarted | EpochEnd | Failure | ProcessDied
LAST_ITEMS = Failure | ProcessDied  # nothing follows these


class Demand:
    """The consumer's progress and demand, as a stage sees them from another thread.

    The consumer calls `begin`, `deliver`, `acknowledge` and `end_pass`, and the producer the
    other methods. A token True allows one block. False asks the producer to release delivered
    windows.
    """

    def __init__(self, epoch: int, blocks_ahead: int = MIN_BLOCKS_AHEAD) -> None:
        self.tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.delivered = PassPosition(-1, 0)
        # Whether the position is known only once per block, and how many rows the consumer may
        # then be ahead of it.
        self.acknowledged_per_block = False
        self.lag_rows = 0
        self.waited = True  # whether the consumer waited for the latest block
        self.waits = False
        self.step_seconds = math.inf
        self.stop = threading.Event()
        self.wake = threading.Event()  # ends waits for samples early
        self.pass_changed = threading.Event()  # a pass has ended, or the next one is due
        self.wanted = epoch
        self._delivered_at = -math.inf
        self._woken = False  # whether the producer waited for the consumer and has not yielded
        self.changed = threading.Condition()
        self.allow(blocks_ahead)

    # --- the consumer's side ---

    def begin(self, epoch: int) -> None:
        with self.changed:
            self.wanted = epoch
            self.changed.notify_all()

    def deliver(self, position: PassPosition) -> None:
        """Record a delivered batch, without a lock, because the loop calls it for each batch."""
        before, self._delivered_at = self._delivered_at, time.monotonic()
        self.step_seconds = self._delivered_at - before
        self.delivered = position

    def acknowledge(self, *, waited: bool) -> None:
        """Record that a block was received, so that another one may follow."""
        self.waited = waited
        self.tokens.put(True)

    def end_pass(self, pass_number: int) -> None:
        self.delivered = PassPosition(pass_number + 1, 0)
        self.tokens.put(False)
        self.pass_changed.set()

    def waiting(self, seconds: float) -> None:
        """Exclude the consumer's waiting time from its step."""
        self._delivered_at += seconds

    # --- the producer's side ---

    def furthest(self) -> PassPosition:
        """Return the last position that the consumer may have reached."""
        at = self.delivered
        return at._replace(position=at.position + self.lag_rows)

    def allow(self, blocks: int) -> None:
        for _ in range(blocks):
            self.tokens.put(True)

    def wants(self, epoch: int) -> bool:
        return epoch >= self.wanted and not self.stop.is_set()

    def wait_begun(self, epoch: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.wanted >= epoch or self.stop.is_set())
        self.stop.wait(self.head_start())

    def pause(self, epoch: int, seconds: float) -> bool:
        with self.changed:
            self.changed.wait_for(
                lambda: self.wanted > epoch or self.stop.is_set(), timeout=seconds
            )
        return self.stop.is_set()

    def wait_for_slot(self) -> bool:
        """Wait for a token; return whether it allows a block."""
        try:
            return self.tokens.get_nowait()
        except queue.Empty:
            self._woken = True
            return self.tokens.get()

    def yield_to_consumer(self) -> None:
        """Wait until the consumer that woke this thread has its batch and is in its step.

        A thread that works earlier takes the GIL or the core away from the consumer for
        milliseconds.
        """
        woken, self._woken = self._woken, False
        if woken:
            self.stop.wait(self.head_start())

    def head_start(self) -> float:
        return 0.0 if self.acknowledged_per_block else head_start_seconds(self.step_seconds)

    def is_urgent(self) -> bool:
        """Return whether the consumer waits, or will wait at once."""
        return self.waits or (self.waited and self.step_seconds < SHORT_STEP_SECONDS)

    def close(self) -> None:
        with self.changed:
            self.stop.set()
            self.changed.notify_all()
        self.wake.set()
        self.tokens.put(True)


StageKind: TypeAlias = Literal["thread", "process"]

EPOCH_IS_OVER = "this epoch is over: the loader was closed, or a new iteration began meanwhile"


class Stage(ABC):
    """Makes the blocks of a loader, epoch after epoch. One thread calls it, except for `close`.

    Everything after a position is a function of the position, the cache and the options. So
    `reset(position)` on any other stage continues with the same batches.
    """

    kind: StageKind
    demand: Demand

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options

    @abstractmethod
    def reset(self, position: Position, missing: MissingShards) -> None:
        """Start at a position; called once. `missing` is the action for missing shards."""

    @abstractmethod
    def next(self, seconds: float | None = None) -> Item | None:
        """Return the next item and acknowledge it, or None if it takes longer than ``seconds``."""

    @abstractmethod
    def close(self) -> None:
        """End the stage, from any thread.

        Its leases are released, too. A second call does nothing.
        """

    @property
    @abstractmethod
    def taken(self) -> int:
        """Number of items that `next` has taken, including one that an interrupt may have lost."""


class AckQueue(queue.SimpleQueue[Item]):
    """A queue that counts its items, so that an item lost to an interrupt is noticed."""

    def __init__(self) -> None:
        self._made = 0

    def put(self, item: Item, block: bool = True, timeout: float | None = None) -> None:
        """Count first, because a concurrent reader may see one item too many, but never one too few."""
        self._made += 1
        super().put(item)

    @property
    def taken(self) -> int:
        return self._made - self.qsize()


class QueuedStage(Stage):
    def __init__(self, options: LoaderOptions) -> None:
        super().__init__(options)
        self.items = AckQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._waited = False

    @property
    def taken(self) -> int:
        return self.items.taken

    def _start_thread(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name="growcache-loader", daemon=True)
        self._thread.start()

    def next(self, seconds: float | None = None) -> Item | None:
        demand = self.demand
        demand.waits = self.items.empty()
        self._waited |= demand.waits
        began = time.monotonic()
        try:
            item = self.items.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            demand.waits = False
            demand.waiting(time.monotonic() - began)
        if isinstance(item, Block):
            waited, self._waited = self._waited, False
            demand.acknowledge(waited=waited)
        return item

    def close(self) -> None:
        if self._pid != os.getpid():  # a forked child lacks this thread, and may hold its locks
            return
        self.demand.close()
        self._end_thread()

    def _end_thread(self) -> None:
        self.items.put(Failure(RuntimeError(EPOCH_IS_OVER)))  # wakes the consumer
        # The garbage collector may run this in the thread that it is about to end, or in one
        # that this thread waits for.
        ours = threading.current_thread().name.startswith("growcache-")
        if self._thread is not None and not ours:
            self._thread.join(JOIN_SECONDS)
