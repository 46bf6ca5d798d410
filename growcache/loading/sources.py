"""Where the consumer of a loader gets its blocks from, and the thread that makes them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from growcache.loading.links import Failure, Item, Link
from growcache.loading.producer import Producer
from growcache.loading.state import Mark

JOIN_SECONDS = 5.0
CLOSED = "this epoch is over: the loader was closed, or iterated anew meanwhile"


class Source(Protocol):
    """A producer as the consumer sees it; used by the consumer's thread, but for `close`.

    Attributes:
        kind: ``thread`` or ``process``.
        delivered: where the consumer stands.
        broken: whether nothing more can be received from it.
    """

    kind: str
    delivered: Mark

    @property
    def broken(self) -> bool:
        """See there."""

    @property
    def skipped(self) -> int:
        """Samples of corrupt shards, so far."""

    def begin(self, epoch: int) -> None:
        """Begin an epoch; what belongs to earlier ones is not wanted any more."""

    def receive(self) -> Item:
        """Return what comes next; waits for it."""

    def more(self) -> None:
        """Say that a block was received, so that another may be put."""

    def end_pass(self, pass_number: int) -> None:
        """Say that a pass is over, and its lease wanted no more."""

    def halt(self) -> None:
        """Have it make no more blocks, but keep its leases until it is closed."""

    def close(self) -> None:
        """End it, from any thread; it frees its leases on the way out."""


class ThreadSource:
    """A producer in a thread of this process.

    Args:
        wanted: the epoch that begins now.
        make: makes the producer for a link.
    """

    kind = "thread"
    broken = False

    def __init__(self, wanted: int, make: Callable[[Link], Producer]) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._link = Link(wanted, self._items.put)
        self._pid = os.getpid()
        run = make(self._link).run
        self._thread = threading.Thread(target=run, name="growcache-loader", daemon=True)
        self._thread.start()

    @property
    def delivered(self) -> Mark:
        """Where the consumer stands."""
        return self._link.delivered

    @delivered.setter
    def delivered(self, mark: Mark) -> None:
        self._link.delivered = mark

    @property
    def skipped(self) -> int:
        """Samples of corrupt shards, so far."""
        return self._link.skipped

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._link.begin(epoch)

    def receive(self) -> Item:
        """Return what comes next."""
        return self._items.get()

    def more(self) -> None:
        """Say that a block was received."""
        self._link.tokens.put(True)

    def end_pass(self, pass_number: int) -> None:
        """Say that a pass is over."""
        self._link.end_pass(pass_number)

    def halt(self) -> None:
        """Have it make no more blocks."""
        self._link.halt.set()
        self._link.tokens.put(True)  # a block that waits for one is made already

    def close(self) -> None:
        """End it; twice is harmless."""
        if self._pid != os.getpid():  # a forked child has no such thread
            return
        self._link.close()
        self._items.put(Failure(RuntimeError(CLOSED)))
        # The collector may run this in the very thread that it is to end.
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
