"""Two web servers: one that sends its clients on, and one that notes what it was told."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Server:
    """A running server.

    Attributes:
        address: of it.
        files: what it holds, by path.
        pages: index pages, by path; else those of a folder name its files.
        moved: where it sends those who ask for a path, or for what is below it.
        needs: headers without which it answers 401.
        asked: method, path and headers of every request.
    """

    address: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Server

    def do_GET(self) -> None:
        state = self.state
        told = {name.lower(): value for name, value in self.headers.items()}
        state.asked.append((self.command, self.path, told))
        for below, place in state.moved.items():
            if self.path.startswith(below):
                self._answer(302, b"", {"Location": place + self.path.removeprefix(below)})
                return
        if any(told.get(name) != value for name, value in state.needs.items()):
            self._answer(401, b"no", {})
        elif self.path.endswith("/"):
            here = [path.removeprefix(self.path) for path in state.files]
            links = "".join(f'<a href="{name}">{name}</a>' for name in here)
            links = state.pages.get(self.path, links)
            self._answer(200, links.encode(), {"Content-Type": "text/html"})
        elif self.path not in state.files:
            self._answer(404, b"no", {})
        else:
            self._file(state.files[self.path], told.get("range", ""))

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass

    def _file(self, data: bytes, asked: str) -> None:
        if not asked:
            self._answer(200, data, {"ETag": '"e"'})
            return
        first, last = (int(at) for at in asked.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        span = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        self._answer(206, part, {"ETag": '"e"', "Content-Range": span})

    def _answer(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextlib.contextmanager
def serving(**members: Any) -> Iterator[Server]:
    """A server in threads of this process; see `Server` for its members."""
    state = Server(**members)
    handler = type("Handler", (_Handler,), {"state": state})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
