"""A web server of a folder, with ranges and ETags (and a way to go without either).

What is below ``/moved/`` is answered with the address it has without that.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import re
import ssl
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    etags: bool
    weak: bool
    ranges: bool
    asked: list[str]
    refuses: dict[str, list[int]]

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self, *, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if self.path.startswith("/moved/"):
            self._answer(302, b"", body, {"Location": self.path.removeprefix("/moved")})
            return
        path = self.root / unquote(urlsplit(self.path).path).lstrip("/")
        if refusals := self.refuses.get(self.path.strip("/")):
            status = refusals[0] if len(refusals) == 1 else refusals.pop(0)
            if status != 200:
                self._answer(status, b"no", body, {})
                return
        if path.is_dir():
            names = sorted(child.name + "/" * child.is_dir() for child in path.iterdir())
            links = "".join(f'<a href="{quote(n)}">{html.escape(n)}</a>\n' for n in names)
            links += '<a href="?C=M;O=A">Last modified</a> <a href="../">Parent</a>'  # Apache
            self._answer(200, links.encode(), body, {"Content-Type": "text/html"})
        elif not path.is_file():
            self._answer(404, b"no such file", body, {})
        else:
            self._file(path.read_bytes(), body)

    def _file(self, data: bytes, body: bool) -> None:
        headers = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        if self.ranges:
            headers["Accept-Ranges"] = "bytes"
        etag = "W/" * self.weak + f'"{hashlib.md5(data).hexdigest()}"'
        if self.etags:
            headers["ETag"] = etag
            asked = self.headers.get("If-Match", etag)
            if asked != etag or (self.weak and "If-Match" in self.headers):
                self._answer(412, b"", body, headers)
                return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None or not self.ranges:
            self._answer(200, data, body, headers)
        elif int(wanted[1]) >= len(data):
            self._answer(416, b"", body, headers)
        else:
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            self._answer(206, data[start:stop], body, headers)

    def _answer(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of those who do not trust its certificate."""
        if not isinstance(sys.exc_info()[1], ssl.SSLError | ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextlib.contextmanager
def web(
    root: Path,
    *,
    etags: bool = True,
    weak: bool = False,
    ranges: bool = True,
    refuses: dict[str, list[int]] | None = None,
    asked: list[str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """The address of a server of a folder, in a thread of this process.

    Args:
        root: the folder.
        etags: whether it tells versions.
        weak: whether those are weak ones, which satisfy no If-Match.
        ranges: whether it knows ranges; else all of a file is every answer.
        refuses: statuses of the answers for a path, one after the other, the last for good.
        asked: gets the requests.
        tls: of a server whose address begins with https.
    """
    members: dict[str, object] = {"root": root, "etags": etags, "weak": weak, "ranges": ranges}
    members |= {"refuses": refuses or {}, "asked": asked if asked is not None else []}
    handler = type("Handler", (_Handler,), members)
    server = _Server(("127.0.0.1", 0), handler)
    if tls is not None:  # the handshake is the thread's that answers
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
