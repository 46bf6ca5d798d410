"""Calls in daemon threads ahead of the need for their results, and the exception that ends them.

A daemon never delays an exit; `concurrent.futures` joins its threads at the interpreter's end.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar


class StoppedError(Exception):
    """Work that ran ahead was asked to end; it never reaches a user."""


T = TypeVar("T")


class Future(Generic[T]):
    """One call of a `DaemonThread`, or of the thread that gets to it first."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._begun = threading.Lock()  # acquired by the thread that makes the call, for good
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Make the call, unless another thread has, and keep only its result."""
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
    """A thread that makes calls ahead, one after the other, until `close`.

    It persists, because starting a thread beside a busy loop takes two switch intervals. It
    starts with the first call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ahead(self, function: Callable[[], T]) -> Future[T]:
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
        ahead = Future(function)
        self._calls.put(ahead.run)
        return ahead

    def close(self, *, wait: bool = True) -> None:
        """End the thread behind the queued calls."""
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
    """Calls made at once, by at most ``most`` threads; the first error stops those not yet made."""

    def __init__(self, calls: Sequence[Callable[[], T]], most: int) -> None:
        self._todo = deque(enumerate(calls))
        self._results: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}
        self._threads = [
            threading.Thread(target=self._work, name="growcache-call", daemon=True)
            for _ in range(min(most, len(calls)))
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while self._todo and not self._errors:
            try:
                number, call = self._todo.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                self._results[number] = call()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                self._errors[number] = error

    def results(self) -> list[T]:
        """Wait, and return what each call returned.

        Raises:
            BaseException: what the first of those that failed raised.
        """
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[number] for number in sorted(self._results)]
