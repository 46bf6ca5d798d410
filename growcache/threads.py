"""Work in daemon threads, begun before its result is needed, and the exception that ends it.

A daemon never delays an exit; `concurrent.futures` joins its threads at the interpreter's end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar


class StoppedError(Exception):
    """What runs ahead was asked to end; no user sees it."""


T = TypeVar("T")


class Future(Generic[T]):
    """One call that another thread makes, or who gets there first; see `DaemonThread.ahead`.

    Args:
        function: called once.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._begun = threading.Lock()  # by who makes the call, and never let go of
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Make the call, unless it was begun, and keep nothing of it but its result."""
        if not self._begun.acquire(blocking=False):
            return
        function, self._function = self._function, None
        assert function is not None
        try:
            self._value.append(function())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._error = error
        finally:
            del function
            self._running.release()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; return whether `result` can be had at once."""
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()
        return True

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; waits for it."""
        with self._running:
            if self._error is not None:
                raise self._error
            return self._value[0]


class DaemonThread:
    """A thread for calls that are made ahead, one after the other, until `close`.

    It stays, for to start a thread takes as long as that takes to have the interpreter's lock:
    beside a busy loop two switch intervals. It is a daemon, so it never delays an exit, and
    starts with the first call.

    Args:
        name: of the thread, for stack dumps.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ahead(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called as soon as the calls before are over."""
        if self._thread is None:
            thread = threading.Thread(
                target=_run_calls,
                args=[self._calls],
                name=f"growcache-{self._name}",
                daemon=True,
            )
            thread.start()  # which may fail, and then there is none
            self._thread = thread
        ahead = Future(function)
        self._calls.put(ahead.run)
        return ahead

    def close(self, *, wait: bool = True) -> None:
        """Have the thread end behind the calls that were asked for.

        Args:
            wait: until it has ended.
        """
        self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()


def _run_calls(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call()
        del call  # it holds the result, which may be a snapshot
