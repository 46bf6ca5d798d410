"""Where the consumer of a loader gets its blocks from, and the thread that makes them."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from growcache.loading.child import JOIN_SECONDS
from growcache.loading.links import Failure, Halted, Item, Link
from growcache.loading.producer import Producer
from growcache.loading.state import LoaderState, Mark

Kind: TypeAlias = Literal["thread", "process"]

CLOSED = "this epoch is over: the loader was closed, or iterated anew meanwhile"


class Source(Protocol):
    """A producer as the consumer sees it; used by the consumer's thread, but for `close`.

    Attributes:
        kind: where it runs.
        delivered: where the consumer stands.
        waited: whether it had to wait for the latest block.
        broken: whether nothing more comes, or something was lost: an interrupt may come when
            it was received, and nothing was done about it.
    """

    kind: Kind
    delivered: Mark
    waited: bool

    @property
    def broken(self) -> bool:
        """See there."""

    @property
    def halted(self) -> LoaderState | None:
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


class Handover(queue.SimpleQueue[Item]):
    """What one thread makes and another takes, which may lose of it what an interrupt meets.

    Attributes:
        made: items that were put.
        done: items about which all was done.
        halted: where their producer halted, if it did.
    """

    def __init__(self) -> None:
        self.made = self.done = 0
        self.halted: LoaderState | None = None

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


class Queued:
    """What a thread of this process puts, and the consumer receives.

    Args:
        wanted: the epoch that begins now.
    """

    def __init__(self, wanted: int) -> None:
        self._items = Handover()
        self._link = Link(wanted, self._items.put)
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
        self._items.put(Failure(RuntimeError(CLOSED)))
        # The collector may run this in the very thread that it is to end, or in one of those
        # that the thread waits for.
        ours = threading.current_thread().name.startswith("growcache-")
        if self._thread is not None and not ours:
            self._thread.join(JOIN_SECONDS)

    @property
    def delivered(self) -> Mark:
        """Where the consumer stands."""
        return self._link.delivered

    @delivered.setter
    def delivered(self, mark: Mark) -> None:
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


class ThreadSource(Queued):
    """A producer in a thread of this process.

    Args:
        wanted: the epoch that begins now.
        make: makes the producer for a link.
    """

    kind: Kind = "thread"

    def __init__(self, wanted: int, make: Callable[[Link], Producer]) -> None:
        super().__init__(wanted)
        self._begin_thread(make(self._link).run)

    @property
    def halted(self) -> LoaderState | None:
        """Where it halted; None: it goes on."""
        return self._items.halted

    @property
    def making(self) -> tuple[float, float]:
        """(seconds, CPU seconds) that blocks took."""
        return self._link.making

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._link.begin(epoch)

    def end_pass(self, pass_number: int) -> None:
        """Say that a pass is over."""
        self._link.end_pass(pass_number)

    def halt(self) -> None:
        """Have it make no more blocks."""
        self._link.halt.set()
        self._link.tokens.put(True)  # a block that waits for one is made already
