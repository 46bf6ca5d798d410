"""Work that is begun before its result is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """One call in a thread of its own; the thread is a daemon, so it never delays an exit.

    Args:
        function: called once, at once.
        name: of the thread, for stack dumps.
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"growcache-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._function())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._error = error

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; waits for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value[0]
