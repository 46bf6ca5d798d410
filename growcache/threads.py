"""Calls in daemon threads, made before their results are needed.

A daemon never delays an exit; `concurrent.futures` joins its threads at the interpreter's end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar


class StoppedError(Exception):
    """Work ahead was asked to end; no user sees it."""


T = TypeVar("T")


class Future(Generic[T]):
    """One call of a `DaemonThread`, or of the thread that gets to it first."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._taken = threading.Lock()  # acquired by the thread that makes the call, for good
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Make the call, unless another thread has, and keep only its result."""
        if not self._taken.acquire(blocking=False):
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

    @property
    def has_failed(self) -> bool:
        """Whether the call was made and raised."""
        return self._error is not None

    def wait(self, seconds: float) -> bool:
        """Wait; return whether `result` returns at once."""
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()
        return True

    def result(self) -> T:
        """Return the call's result or raise its error; waits for it."""
        with self._running:
            if self._error is not None:
                raise self._error
            return self._value[0]


class DaemonThread:
    """A persistent thread, because starting one while another is busy takes two switch intervals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call."""
        if self._thread is None:
            thread = threading.Thread(
                target=_run_calls,
                args=[self._calls],
                name=f"growcache-{self._name}",
                daemon=True,
            )
            thread.start()  # which may fail, and then there is none
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
        del call  # it holds the result, which may be a snapshot


class ConcurrentCalls(Generic[T]):
    """Calls by at most ``most`` threads; the first error stops the calls that wait."""

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
        """Wait, and return the result of each call, or raise the first error."""
        for thread in self._threads:
            thread.join()
        return [future.result() for future in self._futures]
