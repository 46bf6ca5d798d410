"""What formats remember of objects between visits, so that a second one asks for less."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

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


class Asked(Generic[K, V]):
    """What is asked of the store once, and kept; who wants it meanwhile waits for the answer.

    Visits to one object begin side by side, and all of them need its header. Where the one that
    asks fails, or is given up, the next one asks itself.

    Args:
        most: bytes of all answers together, as `get` is told.
    """

    def __init__(self, most: int) -> None:
        self._kept: Kept[K, V] = Kept(most)
        self._asking: WeakValueDictionary[K, asyncio.Lock] = WeakValueDictionary()

    def known(self, key: K) -> V | None:
        """Return what is kept of a key; None: nothing."""
        return self._kept.get(key)

    async def get(self, key: K, ask: Callable[[], Awaitable[tuple[V, int]]]) -> V:
        """Return what is known of a key.

        Args:
            key: whatever tells one from another.
            ask: returns that, and about how many bytes it takes.
        """
        if (known := self._kept.get(key)) is not None:
            return known
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            if (known := self._kept.get(key)) is not None:
                return known
            found, nbytes = await ask()
            self._kept.put(key, found, nbytes)
            return found
