"""What a producer and its consumer share, in one process or across the border of two."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from growcache.loading.blocks import Block
from growcache.loading.packed import Packed
from growcache.loading.report import PassFacts
from growcache.loading.state import LoaderState, Mark, PassPlan
from growcache.loading.timing import head_start

LEAST_AHEAD = 2
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
    plan: Packed[PassPlan]
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

    state: LoaderState


@dataclass(frozen=True, slots=True)
class Died:
    """The process that the producer ran in is gone, and nobody asked it to go."""

    why: str


Item: TypeAlias = Block | PassBegun | EpochEnd | Failure | Halted | Died
LAST = Failure | Halted | Died  # nothing follows these


class HaltedError(Exception):
    """The producer was asked to halt; no user sees it."""


class Link:
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
        self.delivered = Mark(-1, 0)
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
        self.allow(LEAST_AHEAD)

    def allow(self, blocks: int) -> None:
        """Let so many more blocks wait for the consumer."""
        for _ in range(blocks):
            self.tokens.put(True)

    def more(self, delivered: Mark, *, waited: bool) -> None:
        """Say, for the consumer, that a block was received, and how far the loop was then.

        That its pass is over is said at once, so the two may come in either order.
        """
        self.delivered, self.waited = max(self.delivered, delivered), waited
        self.tokens.put(True)

    def end_pass(self, pass_number: int) -> None:
        """Say, for the consumer, that a pass is over, and its lease wanted no more."""
        self.delivered = Mark(pass_number + 1, 0)
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
        return 0.0 if self.by_block else head_start(self.step_seconds)

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
