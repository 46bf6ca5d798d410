"""An S3 bucket of a folder, in threads of this process, of which single keys can fail."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.servers.threads import DATED, Handler, in_threads

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


class _Handler(Handler):
    bucket: Bucket
    ended: threading.Event

    def do_GET(self) -> None:
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
            self.answer(fault, b"<Error><Code>Fault</Code></Error>")
        elif not path.is_file():
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._object(path.read_bytes())

    do_HEAD = do_GET

    def _object(self, data: bytes) -> None:
        etag = _etag(data)
        if self.headers.get("If-Match", etag) != etag:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.answer_object(data, {**DATED, "ETag": etag})

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
        self.answer(
            200,
            "<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>"
            f"{rows}</ListBucketResult>".encode(),
        )


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[Bucket]:
    """A server of the bucket ``b``."""
    found, ended = Bucket(folder), threading.Event()
    with in_threads(_Handler, bucket=found, ended=ended) as address:
        found.options = {"endpoint_url": address, "anon": True}
        try:
            yield found
        finally:
            ended.set()
