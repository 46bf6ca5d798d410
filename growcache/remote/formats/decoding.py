"""How many decoded bytes the visits of a sampler hold at once.

A few kB can become hundreds of MB: were sixteen visits to decode side by side whatever they come
upon, a sampler would need gigabytes. So a visit says what it is about to decode and waits until
that fits beside what others hold; one that is larger than all there may be waits to be alone.
Nobody waits with decoded bytes in hand, and so nobody waits for somebody who waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import ContextVar, Token
from dataclasses import dataclass

from growcache.errors import FormatError

MOST_BYTES = 512_000_000  # of all visits of a sampler


@dataclass(slots=True, eq=False)
class _Visit:
    """What one visit holds.

    Attributes:
        gate: that it goes through.
        largest: bytes that a sample may have, where that is known before it is transformed.
        held: bytes, now.
        ended: whether nothing of it counts any more: what it began may end later.
        before: what was counted around it.
    """

    gate: Gate
    largest: int | None
    held: int = 0
    ended: bool = False
    before: Token[_Visit | None] | None = None

    def __enter__(self) -> None:
        self.before = _current.set(self)

    def __exit__(self, *_: object) -> None:
        assert self.before is not None
        _current.reset(self.before)
        self.gate.leave(self)


_current: ContextVar[_Visit | None] = ContextVar("growcache_decoding", default=None)


class Gate:
    """Lets visits decode as far as they fit together; for one event loop.

    Args:
        most: bytes that all may hold.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._held = 0
        self._queue: deque[tuple[_Visit, int, asyncio.Future[None]]] = deque()

    def visit(self, largest: int | None) -> _Visit:
        """Return a context in which is counted what is decoded, until it ends.

        Args:
            largest: bytes that a sample may have; None: that cannot be said.
        """
        return _Visit(self, largest)

    async def enter(self, one: _Visit, nbytes: int) -> None:
        """Return once a visit may decode so many bytes more."""
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((one, nbytes, came))
        self._let_in()
        try:
            await came
        finally:
            if not came.done() or came.cancelled():
                self._queue = deque(entry for entry in self._queue if entry[2] is not came)
                self._let_in()

    def keep(self, one: _Visit, nbytes: int) -> None:
        """Note that a visit holds so many bytes now."""
        if one.ended:
            return
        self._held += nbytes - one.held
        one.held = nbytes
        self._let_in()

    def leave(self, one: _Visit) -> None:
        """Note that a visit has ended and holds nothing any more."""
        self._held -= one.held
        one.held, one.ended = 0, True
        self._let_in()

    def _let_in(self) -> None:
        while self._queue and (found := self._next()) is not None:
            one, nbytes, came = found
            self._queue.remove(found)
            if came.done():  # it was given up
                continue
            if not one.ended:
                self._held += nbytes
                one.held += nbytes
            came.set_result(None)

    def _next(self) -> tuple[_Visit, int, asyncio.Future[None]] | None:
        """Return who may go on: whoever holds some already, else the first if it fits."""
        for entry in self._queue:
            if entry[0].held or entry[0].ended:
                return entry
        fits = not self._held or self._held + self._queue[0][1] <= self._most
        return self._queue[0] if fits else None


async def decodes(nbytes: int) -> None:
    """Return once this visit may decode so many bytes; at once where no visit is counted."""
    if (one := _current.get()) is not None:
        await one.gate.enter(one, nbytes)


def decoded(nbytes: int, before: int) -> None:
    """Note that what was decoded takes so many bytes, and not the ``before`` that were thought."""
    if (one := _current.get()) is not None:
        one.gate.keep(one, max(0, one.held + nbytes - before))


def refuse_large_sample(nbytes: int, key: str) -> None:
    """Refuse to decode a sample that no group of shards could hold.

    Raises:
        FormatError: says how large it is, and may be.
    """
    one = _current.get()
    if one is not None and one.largest is not None and nbytes > one.largest:
        raise FormatError(
            f"{key}: a sample of {nbytes:,} bytes, decoded, is larger than the {one.largest:,} "
            "that a group of shards may take; keep it encoded, or make it smaller in "
            "sampling.transform"
        )
