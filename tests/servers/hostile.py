"""An S3 endpoint that answers listings and objects with whatever it is given."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np

from tests.servers.threads import DATED, Handler, in_threads

XML = {"Content-Type": "application/xml"}
DATE = "2026-01-01T00:00:00.000Z"


def content(key: str) -> bytes:
    """What the object of a key holds: an array that tells the key."""
    file = io.BytesIO()
    np.save(file, np.frombuffer(key.encode().ljust(16, b"\1")[:16], "u1"))
    return file.getvalue()


SIZE = len(content(""))


def row(key: str, size: object = SIZE, etag: str = '"e"', *, raw: bool = False) -> str:
    """An entry of a listing; a raw key is XML as it stands."""
    named = key if raw else escape(key)
    return (
        f"<Contents><Key>{named}</Key><Size>{size}</Size><ETag>{escape(etag)}</ETag>"
        f"<LastModified>{DATE}</LastModified></Contents>"
    )


def listing(*rows: str, token: str = "", head: str = "") -> bytes:
    """A page of a listing; behind a token there is another."""
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    truncated = "true" if token else "false"
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>{head}<ListBucketResult><Name>b</Name>'
        f"<KeyCount>{len(rows)}</KeyCount><IsTruncated>{truncated}</IsTruncated>{more}"
        f"{''.join(rows)}</ListBucketResult>"
    ).encode()


@dataclass(frozen=True)
class Said:
    """An answer.

    Attributes:
        body: of it.
        status: of HTTP.
        headers: besides the length.
        raw: bytes that are sent instead of all that, before the connection is closed.
    """

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None


Listing = Callable[[dict[str, str]], Said]
Object = Callable[[str, bytes], Said | None]


class _Handler(Handler):
    answers_listing: Listing
    answers_object: Object

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        _, _, key = unquote(address.path).lstrip("/").partition("/")
        if not key:
            query = {name: values[0] for name, values in parse_qs(address.query).items()}
            self._send(type(self).answers_listing(query))
            return
        data = content(key)
        if said := type(self).answers_object(key, data):
            self._send(said)
        else:
            self.answer_object(data, {**XML, **DATED, "ETag": '"e"'})

    do_HEAD = do_GET

    def _send(self, said: Said) -> None:
        if said.raw is not None:
            self.wfile.write(said.raw)
            self.wfile.flush()
            self.close_connection = True
            return
        self.answer(said.status, said.body, {**XML, **said.headers})


def _usual(key: str, data: bytes) -> Said | None:
    return None


@contextlib.contextmanager
def hostile(pages: Listing, objects: Object = _usual) -> Iterator[dict[str, Any]]:
    """The storage options of a server of the bucket ``b``, in threads of this process.

    Args:
        pages: answers a listing's query.
        objects: answers a key, whose content is given; None: as a server should.
    """
    members: dict[str, Any] = {
        "answers_listing": staticmethod(pages),
        "answers_object": staticmethod(objects),
    }
    with in_threads(_Handler, **members) as address:
        yield {
            "endpoint_url": address,
            "key": "k",
            "secret": "s",
            "client_kwargs": {"region_name": "us-east-1"},
        }
