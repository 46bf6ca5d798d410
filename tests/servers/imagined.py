"""An S3 bucket that is computed: 10^5 tiny objects and a huge one, none of them anywhere."""

from __future__ import annotations

import bisect
import contextlib
import io
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np

TINY = 100_000
TINY_ROWS = 2
HUGE_BYTES = 5_000_000_000
ROW_BYTES = 16
_DATE = "2026-01-01T00:00:00.000Z"
_PAGE = 1000


def _header(rows: int) -> bytes:
    file = io.BytesIO()
    described = {"descr": "<i8", "fortran_order": False, "shape": (rows, 2)}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


HUGE_ROWS = (HUGE_BYTES - 128) // ROW_BYTES
KEYS = ["huge.npy", *(f"tiny/{number:06}.npy" for number in range(TINY))]


def size(key: str) -> int:
    """Bytes of an object."""
    rows = HUGE_ROWS if key == "huge.npy" else TINY_ROWS
    return len(_header(rows)) + rows * ROW_BYTES


def content(key: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an object: row r of the huge one is (r, r), of tiny n (n, -r)."""
    huge = key == "huge.npy"
    head = _header(HUGE_ROWS if huge else TINY_ROWS)
    first = max(0, start - len(head)) // ROW_BYTES
    last = max(0, stop - len(head) + ROW_BYTES - 1) // ROW_BYTES
    rows = np.arange(first, last, dtype="<i8")
    other = rows if huge else np.full(len(rows), int(key[5:11]), "<i8")
    data = np.stack([rows, rows] if huge else [other, -rows], axis=1).tobytes()
    base = len(head) + first * ROW_BYTES
    return head[start:stop] + data[max(0, start - base) : max(0, stop - base)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        _, _, key = unquote(address.path).lstrip("/").partition("/")
        if key:
            self._object(key)
        else:
            self._page({name: values[0] for name, values in parse_qs(address.query).items()})

    def log_message(self, *arguments: object) -> None:
        pass

    def _page(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after") or ""
        prefix = query.get("prefix", "")
        at = max(bisect.bisect_right(KEYS, after), bisect.bisect_left(KEYS, prefix))
        page = [key for key in KEYS[at : at + _PAGE] if key.startswith(prefix)]
        more = at + _PAGE < len(KEYS) and len(page) == _PAGE
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size(key)}</Size><ETag>&quot;e&quot;"
            f"</ETag><LastModified>{_DATE}</LastModified></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        self._answer(
            200,
            "<ListBucketResult><Name>b</Name>"
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{rows}</ListBucketResult>".encode(),
        )

    def _object(self, key: str) -> None:
        total = size(key)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, total)
        stop = min(stop, total)
        if stop - start > 1 << 24:
            self._answer(400, b"nobody should ask for so much at once")
            return
        data = content(key, start, stop)
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{total}"}
        self._answer(206 if wanted else 200, data, span if wanted else {})

    def _answer(self, status: int, data: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "ETag": '"e"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            **(more or {}),
        }
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def imagined() -> Iterator[dict[str, object]]:
    """The storage options of a server of the bucket ``b``, in threads of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        yield {"endpoint_url": address, "anon": True}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
