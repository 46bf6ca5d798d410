"""What formats remember of objects between visits, so that a second one asks for less."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Kept(Generic[K, V]):
    """The values that were used last, as many as fit.

    Args:
        most: bytes of all of them together, as `put` is told.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return what is kept of a key; None: nothing."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Keep a value of about so many bytes, instead of those that were not used for longest."""
        self._bytes -= self._values.pop(key, (None, 0))[1]
        self._values[key] = (value, nbytes)
        self._bytes += nbytes
        while self._bytes > self._most and len(self._values) > 1:
            self._bytes -= self._values.popitem(last=False)[1][1]
