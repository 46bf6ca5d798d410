"""A producer in a process of its own: what the trainer knows of it.

No thread of the trainer takes part: the thread that asks for batches reads the socket, and
says at the same time which buffers nobody refers to any more.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from growcache.cache import services
from growcache.children import python_path
from growcache.loading.arena import Borrowed
from growcache.loading.blocks import Block
from growcache.loading.links import Died, Failure, Item
from growcache.loading.options import LoaderOptions
from growcache.loading.orders import (
    Begin,
    Command,
    EndPass,
    Halt,
    Logged,
    More,
    Order,
    Ready,
    ServiceFailed,
    Stop,
)
from growcache.loading.sources import CLOSED, JOIN_SECONDS, Kind
from growcache.loading.state import LoaderState, Mark
from growcache.loading.wire import Frame, Wire

ENVIRONMENT = {
    # Nothing there multiplies matrices, and idle BLAS threads spin at every start.
    "OPENBLAS_NUM_THREADS": "1",
    # What is made and freed for each block would be given back to the kernel, and cleared
    # anew for the next one.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the highest it takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


class Child:
    """A gather process and the wire to it; `close` ends it, from any thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "growcache", "gather", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**python_path(), **ENVIRONMENT},
            )
        self.wire = Wire(ours)
        _children.add(self)
        self._finalizer = weakref.finalize(self, _end, self._process, self.wire, os.getpid())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def send(self, command: Command) -> None:
        """Send a command; to a dead process it is lost, and what is received tells of that."""
        with suppress(OSError):
            self.wire.send(Frame(command))

    def speaks(self) -> bool:
        """Whether there is something to be received."""
        readable, _, _ = select.select([self.wire], [], [], 0)
        return bool(readable)

    def why(self) -> str:
        """Return how it ended; it is known to have."""
        try:
            code = self._process.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:
            return "hung up"
        if code >= 0:
            return f"ended with {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def close(self) -> None:
        """End it, and wait for that; twice is harmless."""
        self._finalizer()

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        self._process.returncode = 0  # nothing to wait for
        self._finalizer.detach()


def _end(process: subprocess.Popen[bytes], wire: Wire, pid: int) -> None:
    if pid != os.getpid():
        return
    with suppress(OSError):
        wire.send(Frame(Stop()))
    wire.shut()
    try:
        process.wait(JOIN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    wire.close()


_children: weakref.WeakSet[Child] = weakref.WeakSet()


def _forget_in_child() -> None:
    for child in list(_children):
        child.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class ProcessSource:
    """A producer in a gather process.

    Args:
        child: that has no order yet.
        order: what it is to make.
        finish: what is done with a block that was received.
    """

    kind: Kind = "process"
    halted: LoaderState | None = None  # nobody needs to know early
    making = (0.0, 0.0)

    def __init__(self, child: Child, order: Order, finish: Callable[[Block], Block]) -> None:
        self._child = child
        self._finish = finish
        self._borrowed = Borrowed()
        self._root = order.options.root.resolve()
        self.delivered = Mark(-1, 0)
        self.skipped = 0
        self.broken = False
        services.listeners.add(self)
        child.send(order)

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._child.send(Begin(epoch))

    def receive(self) -> Item:
        """Return what comes next."""
        try:
            while True:
                item = self._next()
                if isinstance(item, Logged):
                    logging.getLogger(item.name).log(item.level, "%s", item.message)
                elif not isinstance(item, Ready):
                    return self._finish(item) if isinstance(item, Block) else item
        except EOFError:
            if self._child.closed:
                return Failure(RuntimeError(CLOSED))
            self.broken = True
            return Died(self._child.why())
        except BaseException:
            self.broken = True  # half a message may have been read
            raise

    def _next(self) -> Item | Logged | Ready:
        item: Item | Logged | Ready
        item, skipped = self._borrowed.receive(self._child.wire)
        self.skipped = max(self.skipped, skipped)
        return item

    def more(self) -> None:
        """Say that a block was received."""
        self._child.send(More(self.delivered, *self._borrowed.take_back()))

    def end_pass(self, pass_number: int) -> None:
        """Say that a pass is over."""
        self._child.send(EndPass(pass_number))

    def halt(self) -> None:
        """Have it make no more blocks."""
        self._child.send(Halt())

    def service_failed(self, root: Path, reason: str) -> None:
        """Tell the process what it cannot know."""
        if root == self._root:
            self._child.send(ServiceFailed(reason))

    def close(self) -> None:
        """End it; twice is harmless."""
        self._child.close()


def portable(options: LoaderOptions) -> LoaderOptions:
    """Return the options as a gather process needs them."""
    # By the whole path, for either process may go elsewhere.
    return replace(options, path=str(options.root), transform=None, batch_transform=None)
