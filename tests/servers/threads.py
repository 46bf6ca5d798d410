"""HTTP servers in threads of the process that asks for them."""

from __future__ import annotations

import contextlib
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

DATED: Mapping[str, str] = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


class Handler(BaseHTTPRequestHandler):
    """Answers requests, and says nothing of them.

    Attributes:
        always: headers of every answer; those that are given for one count more.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    always: ClassVar[Mapping[str, str]] = {}

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def answer(
        self, status: int, data: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer; to HEAD without its body."""
        self.send_response(status)
        length = {"Content-Length": str(len(data))}
        for name, value in {**self.always, **length, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def span(self, total: int) -> tuple[int, int, dict[str, str]]:
        """Return first and end of what is asked for, and the headers of a range; none of all."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return 0, total, {}
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, total)
        return start, stop, {"Content-Range": f"bytes {start}-{stop - 1}/{total}"}

    def answer_object(self, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send an object, or the range of it that is asked for."""
        start, stop, ranged = self.span(len(data))
        more = {**(headers or {}), **ranged}
        self.answer(206 if ranged else 200, data[start:stop], more)


class Server(ThreadingHTTPServer):
    """Its threads are daemons, so the process can end while they run."""

    daemon_threads = True

    def shut(self) -> None:
        """Listen no more."""
        self.server_close()


@contextlib.contextmanager
def in_threads(
    handler: type[BaseHTTPRequestHandler],
    *,
    server: type[Server] = Server,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    **members: Any,
) -> Iterator[str]:
    """The address of a server that ends with the block.

    Args:
        handler: of its requests.
        server: that listens.
        port: to listen on; 0: any that is free.
        tls: of a server whose address begins with https.
        members: of the handlers of this server alone.
    """
    made = server(("127.0.0.1", port), type("Handler", (handler,), members))
    if tls is not None:  # the handshake is the thread's that answers
        made.socket = tls.wrap_socket(
            made.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        made.shut()
        thread.join()
