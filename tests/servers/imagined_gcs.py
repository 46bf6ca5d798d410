"""A bucket of Google's as its XML API is documented: pages, where to begin, and conditions.

Made up by the tests: it shows that growcache asks as the documentation says, not that Google
answers so. See https://cloud.google.com/storage/docs/xml-api/get-bucket-list
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DATE = "2026-01-01T00:00:00.000Z"
PAGE = 1000


class ImaginedGcs:
    """What is in the bucket ``b``, and what was asked of it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.listings: list[dict[str, str]] = []
        self.refusal: tuple[int, bytes] | None = None
        self.endpoint = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: ImaginedGcs

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        if self.state.refusal:
            self._answer(*self.state.refusal)
        elif bucket != "b":
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif key:
            self._object(key)
        else:
            self._page({name: values[0] for name, values in parse_qs(address.query).items()})

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass

    def _page(self, query: dict[str, str]) -> None:
        self.state.listings.append(query)
        after = query.get("continuation-token") or query.get("start-after") or ""
        prefix = query.get("prefix", "")
        left = [k for k in sorted(self.state.objects) if k.startswith(prefix) and k > after]
        page = left[: min(PAGE, int(query.get("max-keys", PAGE)))]
        rows = "".join(self._row(key) for key in page)
        more = len(page) < len(left)
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        self._answer(
            200,
            "<ListBucketResult><Name>b</Name>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
            "</ListBucketResult>".encode(),
        )

    def _row(self, key: str) -> str:
        data = self.state.objects[key]
        return (
            f"<Contents><Key>{escape(key)}</Key><Generation>1</Generation>"
            f"<LastModified>{_DATE}</LastModified><ETag>{escape(_etag(data))}</ETag>"
            f"<Size>{len(data)}</Size></Contents>"
        )

    def _object(self, key: str) -> None:
        data = self.state.objects.get(key)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if self.headers.get("If-Match", _etag(data)) != _etag(data):
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(data))
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"} if wanted else {}
        self._answer(206 if wanted else 200, data[start:stop], {"ETag": _etag(data), **span})

    def _answer(self, status: int, data: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **(more or {})}
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextlib.contextmanager
def imagined_gcs() -> Iterator[ImaginedGcs]:
    """A running server, in threads of this process."""
    state = ImaginedGcs()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
