"""Values that travel as bytes, and are made again only where somebody asks for them."""

from __future__ import annotations

import pickle
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Packed(Generic[T]):
    """A value that the other process may never want; to unpickle this costs a copy of bytes.

    What ten thousand shards are described by takes ten milliseconds to make, and more than
    that where the collector looks at all objects in between; the training loop would wait.
    Used by one thread.

    Args:
        value: that can be pickled.
    """

    __slots__ = ("_data", "_value")

    def __init__(self, value: T) -> None:
        self._value: list[T] = [value]
        self._data = b""

    def get(self) -> T:
        """Return the value."""
        if not self._value:
            self._value, self._data = [pickle.loads(self._data)], b""
        return self._value[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _packed, (self._data or pickle.dumps(self.get(), protocol=5),)


def _packed(data: bytes) -> Packed[Any]:  # what a pickle calls
    made = Packed[Any](None)
    made._value, made._data = [], data
    return made
