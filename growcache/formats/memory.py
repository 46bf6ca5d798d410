"""Bound the memory of a sampler's visits: decoded values, and remembered facts about objects.

A few kB can decode to hundreds of MB. A visit therefore reserves bytes before it decodes, and
waits until they fit. A visit that exceeds the limit waits until it is alone. A visit that
already holds decoded bytes never waits, so visits cannot block each other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from growcache.errors import FormatError

MOST_DECODED_BYTES = 512_000_000  # of all visits of a sampler


@dataclass(slots=True, eq=False)
class _DecodingVisit:
    gate: DecodeGate
    largest: int | None  # most bytes of a sample, if known before the transform
    held: int = 0  # bytes
    ended: bool = False  # its threads may end later, and no longer count
    before: Token[_DecodingVisit | None] | None = None  # resets the context

    def __enter__(self) -> None:
        self.before = _current_visit.set(self)

    def __exit__(self, *_: object) -> None:
        assert self.before is not None
        _current_visit.reset(self.before)
        self.gate.release(self)


_current_visit: ContextVar[_DecodingVisit | None] = ContextVar(
    "growcache_decoding", default=None
)


class DecodeGate:
    """The limit on decoded bytes of all visits in one event loop."""

    def __init__(self, most: int = MOST_DECODED_BYTES) -> None:
        self._most = most
        self._held = 0
        self._queue: deque[tuple[_DecodingVisit, int, asyncio.Future[None]]] = deque()

    def visit(self, largest: int | None) -> _DecodingVisit:
        """Start a visit. ``largest`` bounds the bytes of one sample."""
        return _DecodingVisit(self, largest)

    async def reserve(self, one: _DecodingVisit, nbytes: int) -> None:
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((one, nbytes, came))
        self._let_in()
        try:
            await came
        finally:
            if not came.done() or came.cancelled():
                self._queue = deque(entry for entry in self._queue if entry[2] is not came)
                self._let_in()

    def correct(self, one: _DecodingVisit, nbytes: int) -> None:
        if one.ended:
            return
        self._held += nbytes - one.held
        one.held = nbytes
        self._let_in()

    def release(self, one: _DecodingVisit) -> None:
        self._held -= one.held
        one.held, one.ended = 0, True
        self._let_in()

    def _let_in(self) -> None:
        while self._queue and (found := self._next()) is not None:
            one, nbytes, came = found
            self._queue.remove(found)
            if came.done():  # the visit was given up
                continue
            if not one.ended:
                self._held += nbytes
                one.held += nbytes
            came.set_result(None)

    def _next(self) -> tuple[_DecodingVisit, int, asyncio.Future[None]] | None:
        for entry in self._queue:
            if entry[0].held or entry[0].ended:
                return entry
        fits = not self._held or self._held + self._queue[0][1] <= self._most
        return self._queue[0] if fits else None


async def reserve_decoded(nbytes: int) -> None:
    """Wait until the bytes fit. Outside a visit this returns at once."""
    if (one := _current_visit.get()) is not None:
        await one.gate.reserve(one, nbytes)


def correct_decoded(nbytes: int, before: int) -> None:
    if (one := _current_visit.get()) is not None:
        one.gate.correct(one, max(0, one.held + nbytes - before))


def refuse_large_sample(nbytes: int, key: str) -> None:
    """Refuse to decode a sample that the cache could not hold."""
    one = _current_visit.get()
    if one is not None and one.largest is not None and nbytes > one.largest:
        raise FormatError(
            f"{key}: a sample of {nbytes:,} bytes, decoded, is larger than the {one.largest:,} "
            "that a sample may have in this cache; keep it encoded, or make it smaller in "
            "sampling.transform",
            code="GC305",
        )


class ByteSemaphore:
    def __init__(self, most: int) -> None:
        self._free = most
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Hold ``count`` slots, or the whole semaphore if that is less."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A cache of about ``most`` bytes of values.

    Each dropped value is passed to ``on_evict``.
    """

    def __init__(self, most: int, on_evict: Callable[[V], None] = lambda _: None) -> None:
        self._most = most
        self._on_evict = on_evict
        self._bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        self._bytes -= self._values.pop(key, (None, 0))[1]
        self._values[key] = (value, nbytes)
        self._bytes += nbytes
        while self._bytes > self._most and len(self._values) > 1:
            _, (evicted, size) = self._values.popitem(last=False)
            self._bytes -= size
            self._on_evict(evicted)

    def pop(self, key: K) -> None:
        self._bytes -= self._values.pop(key, (None, 0))[1]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[V]:
        return (value for value, _ in self._values.values())


class SingleFlightCache(Generic[K, V]):
    """A cache in which concurrent callers wait for the first, because visits to an object start together.

    If the first caller fails or is cancelled, the next one fetches itself.
    """

    def __init__(self, most: int) -> None:
        self._kept: LruCache[K, V] = LruCache(most)
        self._asking: WeakValueDictionary[K, asyncio.Lock] = WeakValueDictionary()

    def peek(self, key: K) -> V | None:
        return self._kept.get(key)

    async def get(self, key: K, load: Callable[[], Awaitable[tuple[V, int]]]) -> V:
        """Return the value of a key. ``load`` returns the value and its approximate bytes."""
        if (known := self._kept.get(key)) is not None:
            return known
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            if (known := self._kept.get(key)) is not None:
                return known
            found, nbytes = await load()
            self._kept.put(key, found, nbytes)
            return found
