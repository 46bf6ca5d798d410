"""Child processes of a trainer, and the wires to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from typing import Any

from growcache.cache.sigterm import at_sigterm
from growcache.children import python_path
from growcache.loading.orders import Stop
from growcache.loading.wire import Frame, ToldError, Wire, pair

JOIN_SECONDS = 5.0
TERMINATE_SECONDS = 1.0
ENVIRONMENT = {
    # Nothing there multiplies matrices, and idle BLAS threads spin at every start.
    "OPENBLAS_NUM_THREADS": "1",
    # What is made and freed for each block would be given back to the kernel, and cleared
    # anew for the next one.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the highest it takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


class Child:
    """A process of growcache's own and the wire to it; `close` ends it, from any thread.

    Args:
        kind: as ``python -m growcache`` knows it.
        at_exit: whether the interpreter closes it at its end.
    """

    def __init__(self, kind: str = "gather", *, at_exit: bool = True) -> None:
        ours, theirs = pair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "growcache", kind, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**ENVIRONMENT, **python_path()},
                )
        except BaseException:
            ours.close()
            raise
        self.wire = Wire(ours)
        _children.add(self)
        self._finalizer = weakref.finalize(self, _end, self._process, self.wire, os.getpid())
        self._finalizer.atexit = at_exit

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def send(self, command: Any) -> None:
        """Send a command; to a dead process it is lost, and what is received tells of that."""
        with suppress(OSError):
            self.wire.send(Frame(command))

    def speaks(self) -> bool:
        """Whether there is something to be received."""
        return self.wire.has_come(0)

    def why(self, end: EOFError) -> str:
        """Return how it ended.

        Args:
            end: what was received last.
        """
        told = f": {end}" if isinstance(end, ToldError) else ""
        try:
            code = self._process.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:
            return f"hung up{told}"
        if code >= 0:
            return f"ended with {code}{told}"
        return f"was killed by {signal.Signals(-code).name}"

    def close(self) -> None:
        """End it, and wait for that; twice is harmless."""
        self._finalizer()

    def terminate(self) -> None:
        """Have it end as by SIGTERM: it lets its leases go."""
        self._process.terminate()

    def has_ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

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


def _terminate_all() -> None:
    """Have all children end as this process does, before it is gone.

    A gather process that finds its trainer gone ends as a reader that died: it keeps its leases.
    """
    children = [child for child in _children if not child.closed]
    for child in children:
        child.terminate()
    until = time.monotonic() + TERMINATE_SECONDS
    for child in children:
        child.has_ended(max(0.0, until - time.monotonic()))


at_sigterm(_terminate_all)
