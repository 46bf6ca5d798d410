"""A web server of a folder, with ranges and ETags (and a way to go without either).

What is below ``/moved/`` is answered with the address it has without that.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import ssl
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from tests.servers.threads import Handler, Server, in_threads


class _Handler(Handler):
    root: Path
    etags: bool
    weak: bool
    ranges: bool
    asked: list[str]
    refuses: dict[str, list[int]]
    retry_after: str

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if self.path.startswith("/moved/"):
            self.answer(302, b"", {"Location": self.path.removeprefix("/moved")})
            return
        path = self.root / unquote(urlsplit(self.path).path).lstrip("/")
        if refusals := self.refuses.get(self.path.strip("/")):
            status = refusals[0] if len(refusals) == 1 else refusals.pop(0)
            if status != 200:
                self.answer(status, b"no", self._when_to_come_again())
                return
        if path.is_dir():
            names = sorted(child.name + "/" * child.is_dir() for child in path.iterdir())
            links = "".join(f'<a href="{quote(n)}">{html.escape(n)}</a>\n' for n in names)
            links += '<a href="?C=M;O=A">Last modified</a> <a href="../">Parent</a>'  # Apache
            self.answer(200, links.encode(), {"Content-Type": "text/html"})
        elif not path.is_file():
            self.answer(404, b"no such file")
        else:
            self._file(path.read_bytes())

    do_HEAD = do_GET

    def _when_to_come_again(self) -> dict[str, str]:
        after = self.retry_after
        if after.startswith("+"):  # as a date
            after = formatdate(time.time() + int(after), usegmt=True)
        return {"Retry-After": after} if after else {}

    def _file(self, data: bytes) -> None:
        headers = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        if self.ranges:
            headers["Accept-Ranges"] = "bytes"
        etag = "W/" * self.weak + f'"{hashlib.md5(data).hexdigest()}"'
        if self.etags:
            headers["ETag"] = etag
            asked = self.headers.get("If-Match", etag)
            if asked != etag or (self.weak and "If-Match" in self.headers):
                self.answer(412, b"", headers)
                return
        start, _, ranged = self.span(len(data))
        if not self.ranges:
            self.answer(200, data, headers)
        elif ranged and start >= len(data):
            self.answer(416, b"", headers)
        else:
            self.answer_object(data, headers)


class _Server(Server):
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
    retry_after: str = "",
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
        retry_after: what a refusal says of when to come again: seconds, or +seconds for a date.
        asked: gets the requests.
        tls: of a server whose address begins with https.
    """
    members: dict[str, Any] = {"root": root, "etags": etags, "weak": weak, "ranges": ranges}
    members |= {
        "retry_after": retry_after,
        "refuses": {} if refuses is None else refuses,
        "asked": asked if asked is not None else [],
    }
    with in_threads(_Handler, server=_Server, tls=tls, **members) as address:
        yield address
