"""A producer in a process of its own: what the trainer knows of it.

No thread of the trainer takes part, unless batches are transformed there or sent to a device:
the thread that asks for them reads the socket, and says at the same time which buffers nobody
refers to any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from growcache.cache import services
from growcache.loading.blocks import Block
from growcache.loading.borrowed import Borrowed
from growcache.loading.buffers import Bytes
from growcache.loading.child import Child
from growcache.loading.crews import arguments_of
from growcache.loading.links import Died, Failure, Item
from growcache.loading.options import LoaderOptions
from growcache.loading.orders import (
    Begin,
    EndPass,
    Halt,
    Logged,
    More,
    Order,
    Ready,
    ServiceChanged,
)
from growcache.loading.shipping import ship
from growcache.loading.sources import CLOSED, Kind
from growcache.loading.state import LoaderState, Mark


class ProcessSource:
    """A producer in a gather process.

    Args:
        child: that has no order yet.
        order: what it is to make.
        finish: what is done with a block that was received; None: nothing.
        lock: called with each piece of shared memory that blocks come in again and again.
    """

    kind: Kind = "process"
    halted: LoaderState | None = None  # nobody needs to know early
    making = (0.0, 0.0)

    def __init__(
        self,
        child: Child,
        order: Order,
        finish: Callable[[Block], Block] | None = None,
        lock: Callable[[Bytes], None] | None = None,
    ) -> None:
        self._child = child
        self._finish = finish
        self._borrowed = Borrowed(lock)
        self._root = order.options.root.resolve()
        self.delivered = Mark(-1, 0)
        self.waited = False
        self.broken = False
        child.send(order)
        services.listeners.add(self)  # the order comes first
        if (reason := services.reason_of(self._root)) != order.failed:
            self.service_changed(self._root, reason)

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._child.send(Begin(epoch))

    def receive(self, seconds: float | None = None) -> Item | None:
        """Return what comes next, None where nothing comes for so long."""
        while True:
            if not self._child.wire.has_come(0):
                self.waited = True
                if not self._child.wire.has_come(seconds):
                    return None
            self.broken = True  # an interrupt may come with half a message read, or a whole one
            item = self._received()
            if isinstance(item, Logged):
                logging.getLogger(item.name).log(item.level, "%s", item.message)
            elif isinstance(item, Block) and self._finish is not None:
                return self._finish(item)
            elif not isinstance(item, Ready):
                return item
            self.broken = False

    def _received(self) -> Item | Logged | Ready:
        try:
            item: Item | Logged | Ready = self._borrowed.receive(self._child.wire)
        except EOFError as end:
            if self._child.closed:
                return Failure(RuntimeError(CLOSED))
            return Died(self._child.why(end))
        return item

    def done(self) -> None:
        """Say that all was done about what was received."""
        self.broken = False

    def more(self) -> None:
        """Say that a block was received."""
        waited, self.waited = self.waited, False
        self._child.send(More(self.delivered, waited, *self._borrowed.take_back()))

    def end_pass(self, pass_number: int) -> None:
        """Say that a pass is over."""
        self._child.send(EndPass(pass_number))

    def halt(self) -> None:
        """Have it make no more blocks."""
        self._child.send(Halt())

    def service_changed(self, root: Path, reason: str | None) -> None:
        """Tell the process what it cannot know; a forked child tells nothing."""
        if root == self._root and not self._child.closed:
            self._child.send(ServiceChanged(reason))

    def close(self) -> None:
        """End it; twice is harmless."""
        self._child.close()


def portable(options: LoaderOptions) -> LoaderOptions:
    """Return the options as a gather process needs them."""
    # By the whole path, for either process may go elsewhere.
    function = options.transform
    shipped = None if function is None else ship(function, arguments_of(function))
    return replace(options, path=str(options.root), transform=shipped, batch_transform=None)
