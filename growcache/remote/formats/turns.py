"""How much the threads of a process decode at once, where few bytes can become very many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Lets as many in as fit together.

    Args:
        most: of whatever is counted, at once.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._changed = threading.Condition()

    @contextmanager
    def of(self, count: int) -> Iterator[None]:
        """Wait until so many, at most all there may be, have their turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()
