"""Messages arrive whole, whatever their size, and with the descriptor that was sent."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import CacheError
from growcache.loading.child_process import (
    PACKET_BYTES,
    Message,
    MessageSocket,
    PeerFailedError,
    socket_pair,
)


@pytest.fixture
def ends() -> Iterator[tuple[MessageSocket, MessageSocket]]:
    out, into = map(MessageSocket, socket_pair())
    yield out, into
    out.close()
    into.close()


around_packets = st.builds(
    lambda packets, more: max(0, packets * PACKET_BYTES + more),
    st.integers(0, 3),
    st.integers(-100, 100),
)


@given(st.lists(around_packets, min_size=1, max_size=3))
def test_messages_of_any_size_arrive_one_by_one(sizes: list[int]) -> None:
    out, into = map(MessageSocket, socket_pair())
    bodies = [bytes([i]) * size for i, size in enumerate(sizes)]

    def send() -> None:
        for i, body in enumerate(bodies):
            out.send(Message({"n": i}, body))

    sending = threading.Thread(target=send)
    sending.start()
    frames = [into.receive() for _ in bodies]
    sending.join()
    assert [(frame.head, bytes(frame.body)) for frame in frames] == [
        ({"n": i}, body) for i, body in enumerate(bodies)
    ]
    out.close()
    into.close()


def test_the_end_is_told(ends: tuple[MessageSocket, MessageSocket]) -> None:
    out, into = ends
    out.send(Message("last"))
    out.shut()
    assert into.receive().head == "last"
    with pytest.raises(EOFError):
        into.receive()


def test_last_words_are_heard_of_one_who_left_something_unread(
    ends: tuple[MessageSocket, MessageSocket],
) -> None:
    ours, theirs = ends
    ours.send(Message("a command that is never received"))
    theirs.send_error(RuntimeError("no such thing here"))
    theirs.close()
    with pytest.raises(PeerFailedError, match="no such thing here"):
        ours.receive()
    with pytest.raises(EOFError):
        ours.receive()


def test_a_descriptor_comes_with_its_message(ends: tuple[MessageSocket, MessageSocket]) -> None:
    out, into = ends
    reading, writing = os.pipe()
    out.send(Message("a pipe", b"body", writing))
    os.close(writing)
    found = into.receive().descriptor
    assert found is not None
    os.write(found, b"through it")
    os.close(found)
    assert os.read(reading, 100) == b"through it"
    os.close(reading)


def test_a_descriptor_that_did_not_arrive_is_missed(
    ends: tuple[MessageSocket, MessageSocket],
) -> None:
    out, into = ends
    reading, writing = os.pipe()
    out.send(Message("a pipe", b"", writing))
    free = os.dup(reading)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # room for none
    try:
        with pytest.raises(CacheError, match="did not arrive"):
            into.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for descriptor in (reading, writing):
        os.close(descriptor)
