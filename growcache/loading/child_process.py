"""Child processes of a trainer, and messages to and from them over a pair of sockets.

Both ends are growcache's own, so nothing foreign is unpickled. The sockets keep packets
separate, so a short message takes one system call. This module imports little, because a child
whose imports fail must still report that to its parent.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from growcache.cache.system import at_sigterm
from growcache.errors import CacheError
from growcache.usercode import child_environment

LENGTHS = struct.Struct("<QQ?")  # sizes of head and body, and whether a descriptor follows
DESCRIPTOR = struct.Struct("i")
ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTOR.size)
PACKET_BYTES = 32 * 1024  # much less than a socket's buffer
SEND_ERROR_SECONDS = 0.1
MAX_ERROR_CHARACTERS = 2000  # of an error, so that it fits one packet


_Packet = TypeVar("_Packet")


class Message(NamedTuple):
    """A pickled value, bytes, and a descriptor, of which each side closes its own copy."""

    head: Any
    body: bytes | memoryview = b""
    descriptor: int | None = None


class PeerFailedError(EOFError):
    pass


class _PeerFailed(NamedTuple):
    why: str


def _receive_past_reset(receive: Callable[[], _Packet]) -> _Packet:
    """Receive a packet after a reset, which the kernel reports once before earlier packets."""
    try:
        return receive()
    except ConnectionResetError:
        return receive()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class MessageSocket:
    """A socket for messages. Any thread may send, and one receives.

    A fork's copy is closed, so that the peer notices the end.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._turn = threading.Lock()
        _message_sockets.add(self)

    def send(self, frame: Message) -> None:
        head = pickle.dumps(frame.head, protocol=5)
        descriptors = [] if frame.descriptor is None else [frame.descriptor]
        lengths = LENGTHS.pack(len(head), len(frame.body), bool(descriptors))
        message = memoryview(b"".join((lengths, head, frame.body)))
        with self._turn:
            socket.send_fds(self._socket, [message[:PACKET_BYTES]], descriptors)
            for start in range(PACKET_BYTES, len(message), PACKET_BYTES):
                self._socket.send(message[start : start + PACKET_BYTES])

    def send_error(self, error: BaseException) -> None:
        if not self._turn.acquire(timeout=SEND_ERROR_SECONDS):
            return  # another message is in progress that the peer does not receive
        head = pickle.dumps(_PeerFailed(_describe_error(error)), protocol=5)
        try:
            self._socket.send(LENGTHS.pack(len(head), 0, False) + head, socket.MSG_DONTWAIT)
        except OSError:
            return  # the socket is full, or the peer is gone
        finally:
            self._turn.release()

    def receive(self) -> Message:
        """Return the next message.

        Raises:
            EOFError: The connection has ended.
            PeerFailedError: The peer gave a reason for its end.
        """
        try:
            message, descriptors = self._message()
        except OSError as error:
            raise EOFError(str(error)) from None
        head, body, has_descriptor = LENGTHS.unpack_from(message)
        if has_descriptor and not descriptors:
            raise CacheError(
                "a file descriptor from another growcache process did not arrive, because this "
                "process has reached its limit of open files (ulimit -n)",
                code="GC418",
            )
        end = LENGTHS.size + head
        found = pickle.loads(message[LENGTHS.size : end])
        if isinstance(found, _PeerFailed):
            raise PeerFailedError(found.why)
        return Message(found, message[end : end + body], *descriptors)

    def _message(self) -> tuple[memoryview, list[int]]:
        # Not `socket.recv_fds`, which drops the flags, so that a child would inherit the
        # descriptor.
        first, rights, _, _ = _receive_past_reset(
            lambda: self._socket.recvmsg(PACKET_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        )
        descriptors = [
            number for *_, content in rights for number in DESCRIPTOR.unpack(content)
        ]
        if len(first) < LENGTHS.size:
            raise EOFError("the other side is gone")
        if len(first) < PACKET_BYTES:
            return memoryview(first), descriptors
        return self._rest(first), descriptors

    def _rest(self, first: bytes) -> memoryview:
        message = memoryview(bytearray(LENGTHS.size + sum(LENGTHS.unpack_from(first)[:2])))
        message[: len(first)] = first
        have = len(first)
        while have < len(message):
            got = _receive_past_reset(partial(self._socket.recv_into, message[have:]))
            if not got:
                raise EOFError("the other side is gone")
            have += got
        return message

    def has_come(self, seconds: float | None) -> bool:
        descriptor = self.fileno()
        if descriptor < 0:
            return True
        waiting = select.poll()  # unlike select.select, without a limit on descriptors
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(None if seconds is None else 1000 * seconds))

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        """End the connection, which wakes `receive` on both sides."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _describe_error(error: BaseException) -> str:
    said = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    frames = traceback.extract_tb(error.__traceback__)
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames[-1:])
    return said[:MAX_ERROR_CHARACTERS] + where


_message_sockets: weakref.WeakSet[MessageSocket] = weakref.WeakSet()


def _close_sockets_in_child() -> None:
    for connection in list(_message_sockets):
        connection.close()


os.register_at_fork(after_in_child=_close_sockets_in_child)


JOIN_SECONDS = 5.0
TERMINATE_SECONDS = 1.0
CHILD_ENVIRONMENT = {
    # No matrices are multiplied there, and idle BLAS threads would spin at every start.
    "OPENBLAS_NUM_THREADS": "1",
    # Memory that is freed with a block would be returned to the kernel, and cleared again for
    # the next block.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest accepted value
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


class ChildProcess:
    def __init__(self, kind: str = "gather", *, at_exit: bool = True) -> None:
        ours, theirs = socket_pair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "growcache", kind, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**CHILD_ENVIRONMENT, **child_environment()},
                )
        except BaseException:
            ours.close()
            raise
        self.connection = MessageSocket(ours)
        _children.add(self)
        self._finalizer = weakref.finalize(
            self, _end_child, self._process, self.connection, os.getpid()
        )
        self._finalizer.atexit = at_exit

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def send(self, command: Any) -> None:
        """Send a command. If the process is dead, `receive` reports it."""
        with suppress(OSError):
            self.connection.send(Message(command))

    def why(self, end: EOFError) -> str:
        reason = f": {end}" if isinstance(end, PeerFailedError) else ""
        try:
            code = self._process.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:
            return f"hung up{reason}"
        if code >= 0:
            return f"ended with {code}{reason}"
        return f"was killed by {signal.Signals(-code).name}"

    def close(self) -> None:
        self._finalizer()

    def terminate(self) -> None:
        """Send SIGTERM, after which the process releases its leases and ends."""
        self._process.terminate()

    def has_ended(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def forget(self) -> None:
        self._process.returncode = 0  # nothing to wait for
        self._finalizer.detach()


def _end_child(process: subprocess.Popen[bytes], connection: MessageSocket, pid: int) -> None:
    if pid != os.getpid():
        return
    with suppress(OSError):
        connection.send(Message(StopCommand()))
    connection.shut()
    try:
        process.wait(JOIN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    connection.close()


_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _forget_children_in_child() -> None:
    for child in list(_children):
        child.forget()


os.register_at_fork(after_in_child=_forget_children_in_child)


def _terminate_all() -> None:
    """End all children, because a gather process without its trainer would keep its leases."""
    children = [child for child in _children if not child.closed]
    for child in children:
        child.terminate()
    until = time.monotonic() + TERMINATE_SECONDS
    for child in children:
        child.has_ended(max(0.0, until - time.monotonic()))


at_sigterm(_terminate_all)


def listen(connection: MessageSocket, receive_commands: Callable[[], None]) -> None:
    """Receive commands in a thread.

    The end of the connection, or an error, ends this process at once.

    Otherwise the process and its parent would wait for each other.
    """
    threading.Thread(
        target=_run_listener,
        args=(connection, receive_commands),
        name="growcache-listen",
        daemon=True,
    ).start()


def _run_listener(connection: MessageSocket, receive_commands: Callable[[], None]) -> None:
    try:
        receive_commands()
    except EOFError:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - this process is useless now
        connection.send_error(error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


# Under the name by which ``python -m growcache`` knows the process.
CHILD_MODULES = {
    "gather": "growcache.loading.gather_process",
    "transform": "growcache.loading.transform_workers",
}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer
    connection = MessageSocket(socket.socket(fileno=int(sys.argv[2])))
    try:
        importlib.import_module(CHILD_MODULES[sys.argv[1]]).main(connection)
    except BaseException as error:
        connection.send_error(error)
        raise


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Tells the process to end properly."""
