"""A proxy that tampers with what a store answers: wrong ranges, short and odd answers.

Requests pass through unaltered, so the store behind must not care for its own name. Only answers
that carry an object's bytes are tampered with.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.servers.threads import Handler, in_threads

_DROPPED = frozenset({"connection", "transfer-encoding", "content-length", "date", "server"})


@dataclass(frozen=True)
class Answer:
    """What a server answers.

    Attributes:
        status: of HTTP.
        headers: all but the length.
        body: as the client shall get it.
        length: what Content-Length claims; None: the length of the body.
        chunked: whether the body goes without a length, in one chunk.
        whole: whether the body is sent to its end; else the connection is closed after it.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    length: int | None = None
    chunked: bool = False
    whole: bool = True

    def header(self, name: str) -> str:
        """The value of a header; empty where it is missing."""
        found = (value for key, value in self.headers.items() if key.lower() == name.lower())
        return next(found, "")

    def having(self, **more: str) -> Answer:
        """The same with other headers; an empty value removes one. Underscores are dashes."""
        named = {name.replace("_", "-"): value for name, value in more.items()}
        lowered = {name.lower() for name in named}
        kept = {k: v for k, v in self.headers.items() if k.lower() not in lowered}
        return replace(self, headers=kept | {k: v for k, v in named.items() if v})


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    Attributes:
        path: of the request, unquoted, without a query.
        start: of the range.
        stop: of the range, not in it.
        ranged: whether there was one.
        data: all of the object.
    """

    path: str
    start: int
    stop: int
    ranged: bool
    data: bytes = field(repr=False)

    @property
    def total(self) -> int:
        """Bytes of the object."""
        return len(self.data)


Tamper = Callable[[Wanted, Answer], Answer]


def other_bytes(wanted: Wanted, answer: Answer) -> Answer:
    """As many bytes as were asked for, from another place, which Content-Range names."""
    count = wanted.stop - wanted.start
    start = wanted.start - count if wanted.start >= count else wanted.stop
    start = min(start, wanted.total - count)
    span = f"bytes {start}-{start + count - 1}/{wanted.total}"
    return replace(
        answer.having(Content_Range=span), status=206, body=wanted.data[start : start + count]
    )


def other_total(wanted: Wanted, answer: Answer) -> Answer:
    """A range as it was asked for, of an object of another size: its bytes are others'."""
    span = f"bytes {wanted.start}-{wanted.stop - 1}/{wanted.total + 640}"
    return replace(answer.having(Content_Range=span), status=206, body=answer.body[::-1])


def short_range(wanted: Wanted, answer: Answer) -> Answer:
    """Half of the range, which says so."""
    half = answer.body[: len(answer.body) // 2]
    span = f"bytes {wanted.start}-{wanted.start + len(half) - 1}/{wanted.total}"
    return replace(answer.having(Content_Range=span), status=206, body=half)


def short(wanted: Wanted, answer: Answer) -> Answer:
    """Half of the bytes, which are said to be all."""
    return replace(answer, body=answer.body[: len(answer.body) // 2])


def cut_off(wanted: Wanted, answer: Answer) -> Answer:
    """Half of the bytes, then the connection is closed."""
    half = answer.body[: len(answer.body) // 2]
    return replace(answer, body=half, length=len(answer.body), whole=False)


def short_chunked(wanted: Wanted, answer: Answer) -> Answer:
    """Half of the bytes, without a length."""
    return replace(answer, body=answer.body[: len(answer.body) // 2], chunked=True)


def cut_off_chunked(wanted: Wanted, answer: Answer) -> Answer:
    """Half of the bytes, without a length; then the connection is closed."""
    half = answer.body[: len(answer.body) // 2]
    return replace(answer, body=half, chunked=True, whole=False)


def too_long(wanted: Wanted, answer: Answer) -> Answer:
    """More bytes than were asked for."""
    return replace(answer, body=answer.body + bytes(100))


def whole(wanted: Wanted, answer: Answer) -> Answer:
    """All of the object, as servers without ranges answer."""
    return replace(answer.having(Content_Range=""), status=200, body=wanted.data)


def nameless_range(wanted: Wanted, answer: Answer) -> Answer:
    """A 206 that does not say which bytes it holds: others."""
    return other_bytes(wanted, answer).having(Content_Range="")


def odd_range(wanted: Wanted, answer: Answer) -> Answer:
    """A Content-Range that cannot be read, and other bytes."""
    return other_bytes(wanted, answer).having(Content_Range="bytes from here to there")


def error_in_200(wanted: Wanted, answer: Answer) -> Answer:
    """An error's page where an object was expected."""
    page = b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"
    return Answer(200, {"Content-Type": "application/xml"}, page)


def login_page(wanted: Wanted, answer: Answer) -> Answer:
    """What the network of a hotel answers, of the length that was expected."""
    page = b"<html>Please log in" + b" " * len(answer.body)
    return Answer(200, {"Content-Type": "text/html"}, page[: len(answer.body)])


RANGES = (other_bytes, other_total, short_range, whole, nameless_range, odd_range)
BODIES = (
    short,
    cut_off,
    short_chunked,
    cut_off_chunked,
    too_long,
    error_in_200,
    login_page,
)
KINDS: dict[str, Tamper] = {tamper.__name__: tamper for tamper in (*RANGES, *BODIES)}


@dataclass
class Tampering:
    """A running proxy.

    Attributes:
        endpoint: its address.
        objects: what objects hold, by the last component of their names.
        tamper: what is done to answers; None: nothing.
        each: one of this number of answers with an object's bytes is tampered with.
        seen: answers with an object's bytes so far.
        done: those that were tampered with.
    """

    endpoint: str
    objects: Mapping[str, bytes] = field(repr=False)
    tamper: Tamper | None = None
    each: int = 1
    seen: int = 0
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def next_tamper(self) -> Tamper | None:
        """What is done to the next answer."""
        with self.lock:
            self.seen += 1
            if self.tamper is None or self.seen % self.each:
                return None
            self.done += 1
            return self.tamper


class _Handler(Handler):
    upstream: tuple[str, int]
    state: Tampering

    def do_GET(self) -> None:
        asked = self.headers.get("Range") or self.headers.get("x-ms-range") or ""
        answer = self._upstream(self.command, dict(self.headers.items()))
        is_object = self.command == "GET" and self._is_object(answer)
        if is_object and (tamper := self.state.next_tamper()) is not None:
            answer = tamper(self._wanted(asked), answer)
        self._send(answer)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _is_object(self, answer: Answer) -> bool:
        path = unquote(urlsplit(self.path).path)
        listed = any(word in self.path for word in ("list-type=", "comp=list", "prefix="))
        told = self.path.startswith("/storage/v1/") and "alt=media" not in self.path
        has_name = "." in path.rpartition("/")[2]
        return answer.status in (200, 206) and has_name and not listed and not told

    def _wanted(self, asked: str) -> Wanted:
        path = unquote(urlsplit(self.path).path)
        data = self.state.objects[path.rpartition("/")[2]]
        start, _, last = asked.removeprefix("bytes=").partition("-")
        stop = min(int(last) + 1, len(data)) if last else len(data)
        return Wanted(path, int(start or 0), stop, bool(asked), data)

    def _upstream(self, method: str, headers: dict[str, str]) -> Answer:
        body = self.rfile.read(int(headers.get("Content-Length", 0)))
        if "AWS4" not in self.headers.get("Authorization", ""):  # which signs the host
            headers = {k: v for k, v in headers.items() if k.lower() != "host"}
        connection = http.client.HTTPConnection(*self.upstream, timeout=300)
        try:
            connection.request(method, self.path, body or None, headers)
            found = connection.getresponse()
            kept = {k: v for k, v in found.headers.items() if k.lower() not in _DROPPED}
            length = found.headers.get("Content-Length")
            head = int(length) if method == "HEAD" and length else None
            return Answer(found.status, kept, found.read(), head)
        finally:
            connection.close()

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        length = len(answer.body) if answer.length is None else answer.length
        if answer.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if answer.chunked:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(answer.body), answer.body))
            if answer.whole:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(answer.body)
        if not answer.whole:
            self.wfile.flush()
            self.close_connection = True


@contextlib.contextmanager
def tampering(
    endpoint: str,
    objects: Mapping[str, bytes],
    tamper: str | None = None,
    *,
    each: int = 1,
) -> Iterator[Tampering]:
    """A proxy before an HTTP endpoint, in threads of this process.

    Args:
        endpoint: of the store.
        objects: what objects hold, by the last component of their names.
        tamper: one of `KINDS`.
        each: one of this number of answers with an object's bytes is tampered with.
    """
    upstream = urlsplit(endpoint)
    state = Tampering("", objects, KINDS[tamper] if tamper else None, each)
    members: dict[str, Any] = {
        "upstream": (upstream.hostname, upstream.port or 80),
        "state": state,
    }
    with in_threads(_Handler, **members) as address:
        state.endpoint = address + upstream.path
        yield state
