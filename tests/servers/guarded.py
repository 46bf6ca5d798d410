"""An S3 bucket of a folder that refuses requests as a test says: by any error, for any time.

    with guarded(folder) as bucket:
        bucket.refuse(400, "ExpiredToken")   # every request
        bucket.refuse_key("a.npy", 403, "AccessDenied")
        bucket.let_in("KEY-2")               # only requests with this access key
        bucket.open()

Which access key a request names is read; its signature is not checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.servers.threads import DATED, Handler, Server, in_threads

_DATE = "2026-01-01T00:00:00.000Z"

Answer = tuple[int, str]


@dataclass
class GuardedBucket:
    """The bucket ``b`` of a server in threads of this process.

    Attributes:
        folder: whose files are the objects.
        endpoint: the server's address.
        answers: how many requests were answered as they wanted, and
        refusals: how many were not.
        sent: bytes of objects.
    """

    folder: Path
    endpoint: str = ""
    answers: int = 0
    refusals: int = 0
    sent: int = 0
    _everybody: Answer | None = None
    _of_keys: dict[str, Answer] = field(default_factory=dict)
    _delays: dict[str, float] = field(default_factory=dict)
    _known: set[str] | None = None

    def storage_options(self, key: str = "KEY-1") -> dict[str, Any]:
        """What opens it, with an access key."""
        return {"key": key, "secret": f"secret-of-{key}", "endpoint_url": self.endpoint}

    def refuse(self, status: int, code: str) -> None:
        """Answer every request so."""
        self._everybody = (status, code)

    def refuse_key(self, key: str, status: int, code: str, *, seconds: float = 0) -> None:
        """Answer every request for one object so, after some seconds."""
        self._of_keys[key] = (status, code)
        self._delays[key] = seconds

    def let_in(self, *access_keys: str, refusal: Answer = (403, "InvalidAccessKeyId")) -> None:
        """Answer those who have one of these keys, and refuse all others."""
        self._known, self._refusal = set(access_keys), refusal

    def open(self) -> None:
        """Let everybody in again, to every object."""
        self._everybody = self._known = None
        self._of_keys.clear()
        self._delays.clear()

    def verdict(self, key: str, access_key: str) -> Answer | None:
        """Return how a request is refused; None where it is not."""
        if self._everybody is not None:
            return self._everybody
        if self._known is not None and access_key not in self._known:
            return self._refusal
        time.sleep(self._delays.get(key, 0))
        return self._of_keys.get(key)


class _Handler(Handler):
    bucket: GuardedBucket

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        _, _, key = unquote(address.path).lstrip("/").partition("/")
        named = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        refusal = self.bucket.verdict(key, named[1] if named else "")
        if refusal is not None:
            self.bucket.refusals += 1
            status, code = refusal
            text = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
            self.answer(status, text.encode(), {"Content-Type": "application/xml"})
            return
        self.bucket.answers += 1
        if key:
            self._object(self.bucket.folder / key)
        else:
            self._page({name: one[0] for name, one in parse_qs(address.query).items()})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """Refuse to write."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.bucket.refusals += 1
        self.answer(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")

    def _page(self, query: dict[str, str]) -> None:
        after = query.get("start-after", "")
        files = sorted(path for path in self.bucket.folder.iterdir() if path.name > after)
        rows = "".join(
            f"<Contents><Key>{escape(path.name)}</Key><Size>{path.stat().st_size}</Size>"
            f"<ETag>{escape(_etag(path))}</ETag><LastModified>{_DATE}</LastModified></Contents>"
            for path in files
        )
        text = (
            f"<ListBucketResult><Name>b</Name><KeyCount>{len(files)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        )
        self.answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _object(self, path: Path) -> None:
        if not path.is_file():
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = {**DATED, "ETag": _etag(path), "Accept-Ranges": "bytes"}
        data = path.read_bytes()
        if self.command == "GET":
            start, stop, _ = self.span(len(data))
            self.bucket.sent += stop - start
        self.answer_object(data, headers)


class _Server(Server):
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; the connection is known until then."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def shut(self) -> None:
        """End all connections at once, as a server does that dies."""
        super().shut()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of those who break off, or do not trust its certificate."""


def _etag(path: Path) -> str:
    return f'"{hashlib.md5(path.name.encode()).hexdigest()}"'


@contextlib.contextmanager
def guarded(
    folder: Path, *, port: int = 0, tls: ssl.SSLContext | None = None
) -> Iterator[GuardedBucket]:
    """A bucket of the files of a folder; its server ends with the block.

    Args:
        folder: of the objects.
        port: to listen on; 0: any that is free.
        tls: of a server whose address begins with https.
    """
    bucket = GuardedBucket(folder)
    members: dict[str, Any] = {"server": _Server, "port": port, "tls": tls, "bucket": bucket}
    with in_threads(_Handler, **members) as bucket.endpoint:
        yield bucket
