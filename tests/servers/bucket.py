"""An S3 bucket of a folder, in threads of this process, of which single keys can fail."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DATE = "2026-01-01T00:00:00.000Z"
HANGS = 0  # a fault: no answer at all


@dataclass
class Bucket:
    """What is served, and how it fails; tests change it while it is served.

    Attributes:
        folder: of the objects; a key is a path in it.
        faults: the status that a key is answered with instead of its bytes, or `HANGS`.
        asked: how often which key was asked for, faults included.
        options: ``source.storage_options`` for it.
    """

    folder: Path
    faults: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bucket: Bucket
    ended: threading.Event

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self, *, body: bool) -> None:
        address = urlsplit(self.path)
        key = unquote(address.path).lstrip("/").partition("/")[2]
        if not key:
            self._page({name: values[0] for name, values in parse_qs(address.query).items()})
            return
        self.bucket.asked[key] = self.bucket.asked.get(key, 0) + 1
        fault = self.bucket.faults.get(key)
        path = self.bucket.folder / key
        if fault == HANGS:
            self.ended.wait()
            self.close_connection = True
        elif fault is not None:
            self._answer(fault, b"<Error><Code>Fault</Code></Error>", body=body)
        elif not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", body=body)
        else:
            self._object(path.read_bytes(), body=body)

    def _object(self, data: bytes, *, body: bool) -> None:
        etag = _etag(data)
        if self.headers.get("If-Match", etag) != etag:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", body=body)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(data))
        stop = min(stop, len(data))
        more = {"ETag": etag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if wanted:
            more["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._answer(206 if wanted else 200, data[start:stop], more, body=body)

    def _page(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after") or ""
        prefix = query.get("prefix", "")
        folder = self.bucket.folder
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        keys = [str(path.relative_to(folder)) for path in paths]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{(folder / key).stat().st_size}</Size>"
            f"<ETag>{escape(_etag((folder / key).read_bytes()))}</ETag>"
            f"<LastModified>{_DATE}</LastModified></Contents>"
            for key in keys
            if key > after and key.startswith(prefix)
        )
        self._answer(
            200,
            "<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>"
            f"{rows}</ListBucketResult>".encode(),
        )

    def _answer(
        self, status: int, data: bytes, more: dict[str, str] | None = None, *, body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {**(more or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[Bucket]:
    """A server of the bucket ``b``."""
    found, ended = Bucket(folder), threading.Event()
    handler = type("Handler", (_Handler,), {"bucket": found, "ended": ended})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    found.options = {
        "endpoint_url": f"http://127.0.0.1:{server.server_address[1]}",
        "anon": True,
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
