"""The delivering side of shared buffers: maps them, and tells when nobody refers to them."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from growcache.cache.formats.mapping import map_shared
from growcache.loading import forks
from growcache.loading.buffers import Bytes
from growcache.loading.orders import Stop
from growcache.loading.wire import Frame, Wire


class Place(NamedTuple):
    """Where bytes lie.

    Attributes:
        buffer: its number.
        start: the first byte.
        nbytes: how many.
    """

    buffer: int
    start: int
    nbytes: int


class NewBuffer(NamedTuple):
    """A buffer whose descriptor comes with the message.

    Attributes:
        number: of the buffer.
        nbytes: of it.
        kept: whether it will be filled again.
    """

    number: int
    nbytes: int
    kept: bool


def _references(bases: dict[int, Bytes], number: int) -> int:
    return sys.getrefcount(bases[number])


# What `_references` counts for an array that only its dictionary holds.
_UNSHARED = _references({0: np.empty(1, np.uint8)}, 0)


def message(item: Any) -> Frame:
    """Return an item without arrays as `Borrowed` receives it; any thread may send it."""
    return Frame(([], []), pickle.dumps(item, protocol=5))


class Borrowed:
    """The side that delivers; used by one thread at a time.

    Args:
        lock: called with each buffer that will be filled again.
    """

    def __init__(self, lock: Callable[[Bytes], None] | None = None) -> None:
        self._lock = lock
        self._bases: dict[int, Bytes] = {}
        self._once: set[int] = set()
        self._lent: dict[int, object] = {}  # and the moment

    def receive(self, wire: Wire) -> Any:
        """Return the next item; its arrays lie in shared memory, and may be written to.

        Raises:
            EOFError: the other side is gone, or says `Stop`.
        """
        while not (frame := wire.receive()).body:
            if isinstance(frame.head, Stop):
                raise EOFError
            self._map(frame)
        places, gone = frame.head
        buffers = [self._bytes(place) for place in places]
        self._note({place.buffer for place in places})
        item = pickle.loads(frame.body, buffers=buffers)
        for number in gone:
            del self._bases[number]
            self._lent.pop(number, None)
        return item

    def _map(self, frame: Frame) -> None:
        try:
            for new, descriptor in zip(frame.head, frame.descriptors, strict=True):
                base = self._bases[new.number] = map_shared(descriptor, new.nbytes)
                if not new.kept:
                    self._once.add(new.number)
                elif self._lock is not None:
                    self._lock(base)
                del base
        finally:
            for descriptor in frame.descriptors:
                os.close(descriptor)

    def _bytes(self, place: Place) -> Bytes:
        return self._bases[place.buffer][place.start : place.start + place.nbytes]

    def _note(self, used: set[int]) -> None:
        """Note what was lent now; what is used once is forgotten, and lives with its views."""
        once, now = self._once & used, forks.moment()
        self._once -= once
        for number in used - once:
            self._lent.setdefault(number, now)
        for number in once:
            del self._bases[number]

    def take_back(self) -> tuple[list[int], list[int]]:
        """Return what nobody here refers to any more: (free, spoiled) numbers, each once.

        What is spoiled may not be filled again, for a child that was forked may see it.
        """
        unused = [n for n in self._lent if _references(self._bases, n) == _UNSHARED]
        free, spoiled = list[int](), list[int]()
        for number in unused:
            (spoiled if forks.since(self._lent.pop(number)) else free).append(number)
        return free, spoiled
