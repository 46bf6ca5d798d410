"""Messages between a trainer and its gather process, over a pair of sockets.

Each is a head, pickled, and a body of bytes that the receiver reads as it likes; file
descriptors may come with it. Both ends are growcache's own, so nothing foreign is unpickled.
"""

from __future__ import annotations

import array
import os
import pickle
import select
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

LENGTHS = struct.Struct("<QQI")  # of head and body, and how many descriptors
DESCRIPTOR_BYTES = array.array("i").itemsize
MOST_DESCRIPTORS = 64


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
        rights = [
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.descriptors))
        ] * bool(frame.descriptors)
        with self._turn:
            sent = self._socket.sendmsg([lengths, head, frame.body], rights)
            if sent < len(lengths) + len(head) + len(frame.body):
                whole = b"".join((lengths, head, frame.body))
                self._socket.sendall(memoryview(whole)[sent:])

    def receive(self) -> Frame:
        """Return the next message; waits for it.

        Raises:
            EOFError: the other side is gone, or this one was shut.
        """
        try:
            lengths, descriptors = self._first()
            head_bytes, body_bytes, _ = LENGTHS.unpack(lengths)
            data = self._exactly(head_bytes + body_bytes)
        except OSError as error:
            raise EOFError(str(error)) from None
        return Frame(pickle.loads(data[:head_bytes]), data[head_bytes:], descriptors)

    def _first(self) -> tuple[bytes, list[int]]:
        """Return the lengths of a message, and the descriptors that come with it."""
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * DESCRIPTOR_BYTES)
        data, rights, _, _ = self._socket.recvmsg(LENGTHS.size, room, socket.MSG_CMSG_CLOEXEC)
        found = array.array("i")
        for _, _, content in rights:
            found.frombytes(content[: len(content) - len(content) % DESCRIPTOR_BYTES])
        rest = LENGTHS.size - len(data)
        return (data + bytes(self._exactly(rest)) if rest else data), found.tolist()

    def _exactly(self, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        have = 0
        while have < nbytes:
            got = self._socket.recv_into(data[have:])
            if not got:
                raise EOFError("the other side is gone")
            have += got
        return data

    def has_come(self, seconds: float) -> bool:
        """Wait for so long at most; return whether `receive` has something, if only the end."""
        if self.fileno() < 0:
            return True
        waiting = select.poll()  # unlike select.select it takes any number of descriptors
        waiting.register(self, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

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


_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_in_child() -> None:
    for wire in list(_wires):
        wire.close()


os.register_at_fork(after_in_child=_close_in_child)
