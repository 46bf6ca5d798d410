"""Calls in daemon threads, made before their results are needed.

Daemon threads never delay an exit, whereas `concurrent.futures` joins its threads at the
interpreter's end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar


class StoppedError(Exception):
    """A thread that works ahead was asked to end. Users never see it."""


T = TypeVar("T")


class Future(Generic[T]):
    """One call of a `DaemonThread`, or of the thread that reaches it first."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._taken = threading.Lock()  # the thread that makes the call keeps it
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Make the call unless another thread has made it, and keep only its result."""
        if not self._taken.acquire(blocking=False):
            return
        function, self._function = self._function, None
        assert function is not None
        try:
            self._value.append(function())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        finally:
            del function
            self._running.release()

    @property
    def has_failed(self) -> bool:
        """Whether the call has raised."""
        return self._error is not None

    def wait(self, seconds: float) -> bool:
        """Wait for the result; return whether it is available."""
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()
        return True

    def result(self) -> T:
        """Wait for the call; return its result or raise its error."""
        with self._running:
            if self._error is not None:
                raise self._error
            return self._value[0]


class DaemonThread:
    """A persistent thread, because a new one would take two switch intervals to start."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call and return its future."""
        if self._thread is None:
            thread = threading.Thread(
                target=_run_calls,
                args=[self._calls],
                name=f"growcache-{self._name}",
                daemon=True,
            )
            thread.start()  # may fail, and then there is no thread
            self._thread = thread
        future = Future(function)
        self._calls.put(future.run)
        return future

    def close(self, *, wait: bool = True) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()


def _run_calls(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call()
        del call  # it references the result, which may be a snapshot


class ConcurrentCalls(Generic[T]):
    """Calls in at most ``most`` threads.

    The first error cancels the calls that have not started.
    """

    def __init__(self, calls: Sequence[Callable[[], T]], most: int) -> None:
        self._futures = [Future(call) for call in calls]
        self._has_failed = False
        self._threads = [
            threading.Thread(target=self._work, name="growcache-call", daemon=True)
            for _ in range(min(most, len(calls)))
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        for future in self._futures:
            if self._has_failed:
                return
            future.run()
            self._has_failed |= future.has_failed

    def results(self) -> list[T]:
        """Wait for all calls; return their results or raise the first error."""
        for thread in self._threads:
            thread.join()
        return [future.result() for future in self._futures]
