"""Shared memory for blocks, between the process that fills it and the one that delivers it.

Buffers are memfds. They are anonymous, so nothing is left behind, and not limited by the size
of ``/dev/shm``. The sender makes them, the receiver maps them, and neither keeps a descriptor.
A buffer is filled again only after nothing in the receiving process refers to it. A buffer that
is used once, because the user collects batches, is freed with its views.
"""

from __future__ import annotations

import bisect
import fcntl
import itertools
import os
import pickle
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from growcache.cache.formats.mapped import map_shared
from growcache.loading.buffers import PAGE, BufferBytes, fork_mark, forked_since
from growcache.loading.child_process import Message, MessageSocket, StopCommand
from growcache.schema import Array


class BufferRange(NamedTuple):
    buffer: int
    start: int
    nbytes: int


class NewBuffer(NamedTuple):
    number: int
    nbytes: int
    kept: bool  # will be filled again


def _references(bases: dict[int, BufferBytes], number: int) -> int:
    return sys.getrefcount(bases[number])


# Count of `_references` for an array that only its dictionary refers to.
_UNSHARED = _references({0: np.empty(1, np.uint8)}, 0)


def plain_message(item: Any) -> Message:
    return Message(([], []), pickle.dumps(item, protocol=5))


class SharedReceiver:
    def __init__(self, lock: Callable[[BufferBytes], None] | None = None) -> None:
        self._lock = lock
        self._bases: dict[int, BufferBytes] = {}
        self._once: set[int] = set()  # buffers that are not returned
        self._lent: dict[int, object] = {}  # with the moment

    def receive(self, connection: MessageSocket) -> Any:
        """Return the next item, in writable shared memory.

        Raises:
            EOFError: The connection has ended.
        """
        while (item := self.receive_message(connection)) is None:
            pass
        return item

    def receive_message(self, connection: MessageSocket) -> Any | None:
        frame = connection.receive()
        if frame.descriptor is not None:
            self._map(frame.head, frame.descriptor)
            return None
        if isinstance(frame.head, StopCommand):
            raise EOFError
        places, gone = frame.head
        buffers = [self._bytes(place) for place in places]
        now = fork_mark()
        for number in {place.buffer for place in places} - self._once:
            self._lent.setdefault(number, now)
        item = pickle.loads(frame.body, buffers=buffers)
        for number in gone:
            del self._bases[number]
            self._once.discard(number)
            self._lent.pop(number, None)
        return item

    def _map(self, new: NewBuffer, descriptor: int) -> None:
        try:
            base = self._bases[new.number] = map_shared(descriptor, new.nbytes)
        finally:
            os.close(descriptor)
        if not new.kept:
            self._once.add(new.number)
        elif self._lock is not None:
            self._lock(base)

    def _bytes(self, place: BufferRange) -> BufferBytes:
        return self._bases[place.buffer][place.start : place.start + place.nbytes]

    def take_back(self) -> tuple[list[int], list[int]]:
        """Return the unreferenced buffers: (free, spoiled).

        A forked child may see spoiled ones.
        """
        unused = [n for n in self._lent if _references(self._bases, n) == _UNSHARED]
        free, spoiled = list[int](), list[int]()
        for number in unused:
            (spoiled if forked_since(self._lent.pop(number)) else free).append(number)
        return free, spoiled


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(slots=True)
class _SentBuffer:
    number: int
    address: int
    nbytes: int
    recycled: bool  # will be filled again
    base: weakref.ref[BufferBytes]
    receivers: set[MessageSocket]  # these have mapped it


class _SentBuffers:
    def __init__(self) -> None:
        self._made: dict[int, _SentBuffer] = {}
        self._addresses: list[int] = []  # ascending
        self.gone: list[_SentBuffer] = []
        # The garbage collector may free a base at any point of a thread.
        self.lock = threading.RLock()
        self._pid = os.getpid()

    def add(self, made: _SentBuffer, base: BufferBytes) -> None:
        with self.lock:
            self._made[made.address] = made
            bisect.insort(self._addresses, made.address)
        weakref.finalize(base, self._end, made).atexit = False

    def _end(self, made: _SentBuffer) -> None:
        if self._pid != os.getpid():  # a forked child fills nothing, and might wait forever
            return
        with self.lock:
            del self._made[made.address]
            self._addresses.remove(made.address)
        self.gone.append(made)

    def all(self) -> list[_SentBuffer]:
        with self.lock:
            return list(self._made.values())

    def find(self, memory: memoryview) -> tuple[_SentBuffer | None, BufferRange | None]:
        if not memory.nbytes:
            return None, None
        address = _address_of(np.frombuffer(memory, np.uint8))
        with self.lock:
            i = bisect.bisect_right(self._addresses, address) - 1
            made = self._made[self._addresses[i]] if i >= 0 else None
        if made is None or address >= made.address + made.nbytes:
            return None, None
        return made, BufferRange(made.number, address - made.address, memory.nbytes)


class SharedSender:
    """Sends items in shared memory, from one thread except for `returned`.

    A new buffer is sent at once to all receivers that may need it.
    """

    def __init__(self, receiver: MessageSocket | None = None) -> None:
        self.receivers = [] if receiver is None else [receiver]
        self._numbers = itertools.count()
        self.buffers = _SentBuffers()
        self._kept: dict[int, list[BufferBytes]] = {}  # buffers by the pool that keeps them
        self._lent: dict[int, BufferBytes] = {}
        self._gone: dict[MessageSocket, list[int]] = {}
        self._spoiled: queue.SimpleQueue[int] = queue.SimpleQueue()

    def allocate(
        self,
        nbytes: int,
        kept: list[BufferBytes] | None,
        *,
        to: Callable[[], Sequence[MessageSocket]] | None = None,
    ) -> BufferBytes:
        """Return a new buffer. ``to`` returns receivers other than the usual ones."""
        size = -(-nbytes // PAGE) * PAGE
        new = NewBuffer(next(self._numbers), size, kept is not None)
        receivers = set(self.receivers if to is None else to())
        descriptor = os.memfd_create("growcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            # Without seals, a truncation would kill a process that reads the mapped memory.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            base = map_shared(descriptor, size)
            for connection in receivers:
                with suppress(OSError):  # the receiver is gone, as the next message will show
                    connection.send(Message(new, b"", descriptor))
        finally:
            os.close(descriptor)
        if kept is not None:
            self._kept[new.number] = kept
        address, where = _address_of(base), weakref.ref(base)
        made = _SentBuffer(new.number, address, size, new.kept, where, receivers)
        self.buffers.add(made, base)
        return base

    def reaches(self, connection: MessageSocket, array: Array) -> bool:
        made, _ = self.buffers.find(_memory_of(array))
        return made is not None and connection in made.receivers

    def send(self, connection: MessageSocket, item: Any, *, lend: bool = True) -> None:
        """Send an item. Arrays in memory that the receiver has mapped are not copied."""
        places: list[BufferRange] = []

        def apart(buffer: pickle.PickleBuffer) -> bool:
            made, place = self.buffers.find(buffer.raw())
            if made is None or place is None or connection not in made.receivers:
                return True  # part of the message itself
            places.append(place)
            base = made.base()
            if lend and made.recycled and base is not None:
                self._lent[made.number] = base
            return False

        self._drop_spoiled()
        body = pickle.dumps(item, protocol=5, buffer_callback=apart)
        self._note_gone()
        connection.send(Message((places, self._gone.pop(connection, [])), body))

    def _note_gone(self) -> None:
        while self.buffers.gone:
            made = self.buffers.gone.pop()
            self._kept.pop(made.number, None)
            for connection in made.receivers:
                self._gone.setdefault(connection, []).append(made.number)

    def forget(self, connection: MessageSocket) -> None:
        self._note_gone()
        self._gone.pop(connection, None)
        for made in self.buffers.all():
            if connection in made.receivers and made.recycled:
                self._let_die(made.number, made.base())
            made.receivers.discard(connection)

    def _let_die(self, number: int, base: BufferBytes | None) -> None:
        """Stop recycling a buffer, which then lives as long as its views."""
        kept = self._kept[number]
        kept[:] = [other for other in kept if other is not base]

    def returned(self, free: Sequence[int], spoiled: Sequence[int]) -> None:
        for number in free:
            del self._lent[number]
        for number in spoiled:
            self._spoiled.put(number)

    def _drop_spoiled(self) -> None:
        while not self._spoiled.empty():
            number = self._spoiled.get()
            self._let_die(number, self._lent[number])
            del self._lent[number]  # in this order: it leaves its pool before it looks free


def _memory_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _address_of(array: BufferBytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
