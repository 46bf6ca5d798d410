"""Messages between a trainer and the processes that work for it, over a pair of sockets.

Each is a head, pickled, and a body of bytes that the receiver reads as it likes; file
descriptors may come with it. Both ends are growcache's own, so nothing foreign is unpickled.
The sockets keep packets apart: a message is one, or several where it is long, and to receive
one takes one system call. The loop waits for that.
"""

from __future__ import annotations

import array
import os
import pickle
import select
import socket
import struct
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from growcache.errors import CacheError

LENGTHS = struct.Struct("<QQI")  # of head and body, and how many descriptors
DESCRIPTOR_BYTES = array.array("i").itemsize
MOST_DESCRIPTORS = 64
ROOM = socket.CMSG_SPACE(MOST_DESCRIPTORS * DESCRIPTOR_BYTES)
PACKET_BYTES = 32 * 1024  # far less than what sockets have room for
TELL_SECONDS = 0.1
LONGEST_WORDS = 2000  # of an error, so that it takes one packet


_Packet = TypeVar("_Packet")


class Frame(NamedTuple):
    """One message.

    Attributes:
        head: any value that can be pickled.
        body: bytes; empty for most.
        descriptors: the receiver closes those it got; the sender keeps its own.
    """

    head: Any
    body: bytes | memoryview = b""
    descriptors: Sequence[int] = ()


class ToldError(EOFError):
    """The other side ended, and said why."""


class _Ended(NamedTuple):
    """What a side sends last where it ends by an error.

    Attributes:
        why: the error, in words.
    """

    why: str


def _heard(receive: Callable[[], _Packet]) -> _Packet:
    """Return what comes next, also of one who ended and left something unread.

    The kernel tells of that once, as a reset connection, in front of what was sent before.
    """
    try:
        return receive()
    except ConnectionResetError:
        return receive()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return what the two ends of a wire stand on."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Wire:
    """One end; any thread may send, one receives.

    A forked child closes its copy, or the other side would not see this one end.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._turn = threading.Lock()
        _wires.add(self)

    def send(self, frame: Frame) -> None:
        """Send a message, whole.

        Raises:
            OSError: the other side is gone.
        """
        head = pickle.dumps(frame.head, protocol=5)
        lengths = LENGTHS.pack(len(head), len(frame.body), len(frame.descriptors))
        message = memoryview(b"".join((lengths, head, frame.body)))
        rights = []
        if frame.descriptors:
            descriptors = array.array("i", frame.descriptors)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        with self._turn:
            self._socket.sendmsg([message[:PACKET_BYTES]], rights)
            for start in range(PACKET_BYTES, len(message), PACKET_BYTES):
                self._socket.send(message[start : start + PACKET_BYTES])

    def tell(self, error: BaseException) -> None:
        """Say what ends this process, if that can be said at once; nothing may follow."""
        if not self._turn.acquire(timeout=TELL_SECONDS):
            return  # a message is under way that nobody receives
        head = pickle.dumps(_Ended(_words(error)), protocol=5)
        try:
            self._socket.send(LENGTHS.pack(len(head), 0, 0) + head, socket.MSG_DONTWAIT)
        except OSError:
            return  # there is no room, or nobody there
        finally:
            self._turn.release()

    def receive(self) -> Frame:
        """Return the next message; waits for it.

        Raises:
            EOFError: the other side is gone, or this one was shut; a `ToldError` where it
                said why.
            CacheError: this process may not open as many files as came with it.
        """
        try:
            message, descriptors = self._message()
        except OSError as error:
            raise EOFError(str(error)) from None
        head, body, count = LENGTHS.unpack_from(message)
        if len(descriptors) < count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise CacheError(
                f"a process of growcache's sent {count} file descriptors, {len(descriptors)} "
                "came: this process has as many open as it may (ulimit -n)"
            )
        end = LENGTHS.size + head
        found = pickle.loads(message[LENGTHS.size : end])
        if isinstance(found, _Ended):
            raise ToldError(found.why)
        return Frame(found, message[end : end + body], descriptors)

    def _message(self) -> tuple[memoryview, list[int]]:
        first, rights, _, _ = _heard(
            lambda: self._socket.recvmsg(PACKET_BYTES, ROOM, socket.MSG_CMSG_CLOEXEC)
        )
        descriptors = array.array("i")
        for _, _, content in rights:
            descriptors.frombytes(content[: len(content) - len(content) % DESCRIPTOR_BYTES])
        if len(first) < LENGTHS.size:
            raise EOFError("the other side is gone")
        if len(first) < PACKET_BYTES:
            return memoryview(first), descriptors.tolist()
        return self._rest(first), descriptors.tolist()

    def _rest(self, first: bytes) -> memoryview:
        """Return the whole of a message that may have more packets."""
        message = memoryview(bytearray(LENGTHS.size + sum(LENGTHS.unpack_from(first)[:2])))
        message[: len(first)] = first
        have = len(first)
        while have < len(message):
            got = _heard(partial(self._socket.recv_into, message[have:]))
            if not got:
                raise EOFError("the other side is gone")
            have += got
        return message

    def has_come(self, seconds: float | None) -> bool:
        """Wait for so long at most, or until `receive` has something, if only the end: True."""
        descriptor = self.fileno()
        if descriptor < 0:
            return True
        waiting = select.poll()  # unlike select.select it takes any number of descriptors
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(None if seconds is None else 1000 * seconds))

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._socket.fileno()

    def shut(self) -> None:
        """End the connection; who waits in `receive`, on either side, is woken."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end's descriptor; nobody may use it any more."""
        self._socket.close()


def _words(error: BaseException) -> str:
    """Return an error in one line: what it is, and the innermost line of code."""
    said = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    frames = traceback.extract_tb(error.__traceback__)
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames[-1:])
    return said[:LONGEST_WORDS] + where


_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_in_child() -> None:
    for wire in list(_wires):
        wire.close()


os.register_at_fork(after_in_child=_close_in_child)
