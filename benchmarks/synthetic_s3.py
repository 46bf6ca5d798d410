"""A made-up S3 bucket of any size, far away: listings and objects computed from the key.

It stands in for a store that is too large to be filled for a benchmark (100,000 objects of 256 KiB are
25 GB). The server is real in these respects: HTTP/1.1 with keep-alive, ListObjectsV2 in pages of
1,000 keys that a client must request one after the other, GET with ranges and If-Match, HEAD, ETags,
and one round trip of latency before the first byte of every answer. It keeps objects that are put,
but does not list them. It has no bandwidth limit, TLS or authentication; the latency is a constant,
and connecting costs no round trip. It measures how a client deals with round trips, not how fast
it reads.

Run alone with ``python -m benchmarks.synthetic_s3 --objects 10000``; the first line on
stdout is its endpoint. With ``--folders`` the objects are as those of a folder of images:
evenly in that number of sub-folders, of sizes and times that look random, their ETags MD5 sums.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import md5
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit
from zlib import adler32, crc32

import numpy as np

REQUESTS = ".requests"  # a key that tells how many pages were asked for
BUCKET = "far"
PREFIX = "recordings/"
IMAGES = "images/"
PAGE_KEYS = 1000
SHAPE = (64, 1024)  # float32: 256 KiB
IMAGE_BYTES = (60_000, 160_000)
IMAGES_SINCE = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
UPLOAD_SECONDS = 864_000
Piece = bytes | memoryview
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def array_of(key: str) -> Array:
    """Return what the object `key` holds: float32 of `SHAPE`, without NaN."""
    start = crc32(key.encode()) % _PER_OBJECT
    return _POOL[start : start + _PER_OBJECT].reshape(SHAPE)


def _pool(count: int) -> Array:
    # Objects are overlapping slices of one random block: no time goes into making them.
    return np.random.default_rng(0).random(count, dtype=np.float32)


def _header() -> bytes:
    whole = io.BytesIO()
    np.save(whole, np.zeros(SHAPE, np.float32))
    return whole.getvalue()[: -np.zeros(SHAPE, np.float32).nbytes]


_PER_OBJECT = int(np.prod(SHAPE))
_POOL = _pool(2 * _PER_OBJECT)
_NPY_HEADER = _header()
OBJECT_BYTES = len(_NPY_HEADER) + 4 * _PER_OBJECT


@dataclass(frozen=True, slots=True)
class Recordings(Sequence[str]):
    """The keys of arrays of one size in one folder, and what the objects are; none is kept."""

    objects: int

    def __len__(self) -> int:
        return self.objects

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(self.objects))]
        return f"{PREFIX}{number:09d}.npy"

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return OBJECT_BYTES

    def etag(self, key: str) -> str:
        """Return the quoted ETag of an object."""
        return f'"{crc32(key.encode()):08x}"'

    def modified(self, key: str) -> float:
        """Return when it was written, as a time of the epoch."""
        return IMAGES_SINCE

    def written(self, key: str) -> str:
        """Return the same as a listing says it."""
        return _written(self.modified(key))

    def body(self, key: str) -> list[Piece]:
        """Return what it holds."""
        return [_NPY_HEADER, array_of(key).data.cast("B")]


@dataclass(frozen=True, slots=True)
class Images(Recordings):
    """A folder of images: even sub-folders, random sizes and times, MD5 sums as ETags."""

    folders: int

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(self.objects))]
        each = -(-self.objects // self.folders)
        return f"{IMAGES}class{number // each:05d}/img_{number:09d}.jpg"

    def size(self, key: str) -> int:
        """See `Recordings`."""
        return IMAGE_BYTES[0] + crc32(key.encode()) % (IMAGE_BYTES[1] - IMAGE_BYTES[0])

    def etag(self, key: str) -> str:
        """See `Recordings`."""
        return f'"{md5(key.encode(), usedforsecurity=False).hexdigest()}"'

    def modified(self, key: str) -> float:
        """See `Recordings`."""
        return IMAGES_SINCE + adler32(key.encode()) * 2_654_435_761 % UPLOAD_SECONDS

    def body(self, key: str) -> list[Piece]:
        """See `Recordings`."""
        return [_POOL.data.cast("B")[: self.size(key)]]


class Answering(Protocol):
    """Whatever answers requests."""

    def answer(self, method: str, target: str, headers: dict[str, str]) -> list[Piece]:
        """Return the parts of a whole HTTP response."""


class Bucket:
    """The answers to requests about the keys."""

    def __init__(self, keys: Recordings, name: str = BUCKET) -> None:
        self.keys = keys
        self.name = name
        self.folder = keys[0].partition("/")[0] + "/" if keys else ""
        self.listed = 0  # requests for a page
        self.kept: dict[str, bytes] = {}  # what was put

    def keep(self, target: str, headers: dict[str, str], body: bytes) -> list[Piece]:
        """Take what is put; ``If-None-Match: *`` refuses what is there."""
        key = unquote(urlsplit(target).path).lstrip("/").partition("/")[2]
        if key in self.kept and headers.get("if-none-match") == "*":
            return _response("412 Precondition Failed", [_error("PreconditionFailed")])
        self.kept[key] = body
        return _response("200 OK", [], {"ETag": f'"{md5(body).hexdigest()}"'})

    def answer(self, method: str, target: str, headers: dict[str, str]) -> list[Piece]:
        """Return the parts of a whole HTTP response."""
        url = urlsplit(target)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if bucket != self.name:
            return _response("404 Not Found", [_error("NoSuchBucket")])
        if key == REQUESTS:
            return _response("200 OK", [str(self.listed).encode()])
        if not key:
            return self._listing({k: v[0] for k, v in parse_qs(url.query).items()})
        if (body := self.kept.get(key)) is not None:
            extra = {
                "ETag": f'"{md5(body).hexdigest()}"',
                "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            }
            return _response("200 OK", [body], extra)
        return self._object(method, key, headers)

    def _listing(self, query: dict[str, str]) -> list[Piece]:
        self.listed += 1
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if delimiter == "/" and "/" not in prefix and self.folder.startswith(prefix):
            return _response("200 OK", [self._page([], None, common=self.folder)])
        after = query.get("continuation-token") or query.get("start-after") or ""
        first = max(bisect_left(self.keys, prefix), bisect_right(self.keys, after))
        limit = min(PAGE_KEYS, int(query.get("max-keys", PAGE_KEYS)))
        page = [key for key in self.keys[first : first + limit] if key.startswith(prefix)]
        more = len(page) == limit and first + limit < len(self.keys)
        return _response("200 OK", [self._page(page, page[-1] if more else None)])

    def _object(self, method: str, key: str, headers: dict[str, str]) -> list[Piece]:
        place = bisect_left(self.keys, key)
        if place == len(self.keys) or self.keys[place] != key:
            return _response("404 Not Found", [_error("NoSuchKey")])
        etag, size = self.keys.etag(key), self.keys.size(key)
        if headers.get("if-match", etag) != etag:
            return _response("412 Precondition Failed", [_error("PreconditionFailed")])
        modified = datetime.fromtimestamp(self.keys.modified(key), UTC)
        extra = {"ETag": etag, "Last-Modified": f"{modified:%a, %d %b %Y %H:%M:%S} GMT"}
        if method == "HEAD":
            return _response("200 OK", [], extra, length=size)
        body = self.keys.body(key)
        if span := _range(headers.get("range", ""), size):
            start, stop = span
            part = b"".join(body)[start:stop]
            extra["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            return _response("206 Partial Content", [part], extra)
        return _response("200 OK", body, extra)

    def _page(self, keys: list[str], token: str | None, common: str = "") -> bytes:
        about = self.keys
        rows = "".join(
            f"<Contents><Key>{key}</Key><LastModified>{about.written(key)}"
            f"</LastModified><ETag>{about.etag(key)}</ETag><Size>{about.size(key)}</Size>"
            "</Contents>"
            for key in keys
        )
        more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        folder = f"<CommonPrefixes><Prefix>{common}</Prefix></CommonPrefixes>" if common else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self.name}</Name><KeyCount>{len(keys)}</KeyCount><MaxKeys>{PAGE_KEYS}</MaxKeys>"
            f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{more}{rows}{folder}"
            "</ListBucketResult>"
        ).encode()


def _written(at: float) -> str:
    # By hand, and of tables: the server shall not take the time of those who are measured.
    days, seconds = divmod(int(at - IMAGES_SINCE), 86_400)
    return f"2026-01-{days + 1:02}T{_TIMES[seconds]}.000Z"


_TIMES = [f"{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}" for s in range(86_400)]


def _range(header: str, size: int) -> tuple[int, int] | None:
    """``bytes=3-9`` and ``bytes=-7`` as start and stop; None where the whole is meant."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if not match:
        return None
    if not match[1]:
        return size - min(int(match[2]), size), size
    last = int(match[2]) if match[2] else size - 1
    return int(match[1]), min(last + 1, size)


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _response(
    status: str,
    body: list[Piece],
    extra: dict[str, str] | None = None,
    length: int | None = None,
) -> list[Piece]:
    size = sum(len(part) for part in body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}"]
    lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
    return [("\r\n".join(lines) + "\r\n\r\n").encode(), *body]


_BODY_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


class Connection(asyncio.Protocol):
    """One client's connection: each request is answered after the latency."""

    def __init__(self, bucket: Answering, latency_seconds: float) -> None:
        self._bucket = bucket
        self._latency = latency_seconds
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back to the client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Cut requests out of the stream."""
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, rest = self._received.partition(b"\r\n\r\n")
            length = _BODY_LENGTH.search(head)
            size = int(length[1]) if length else 0
            if len(rest) < size:
                return
            body, self._received = rest[:size], rest[size:]
            loop = asyncio.get_running_loop()
            loop.call_later(self._latency, self._answer, head.decode("latin-1"), body)

    def _answer(self, head: str, body: bytes) -> None:
        request, *lines = head.split("\r\n")
        method, target, _ = request.split(" ")
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        if self._transport.is_closing():
            return
        if method == "PUT" and isinstance(self._bucket, Bucket):
            self._transport.writelines(self._bucket.keep(target, headers, body))
        else:
            self._transport.writelines(self._bucket.answer(method, target, headers))


async def serve(bucket: Answering, latency_ms: float, port: int) -> None:
    """Serve until cancelled; the endpoint is the first line on stdout."""
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(bucket, latency_ms / 1000), "127.0.0.1", port
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--objects", type=int, default=10_000)
    parser.add_argument("--folders", type=int, default=0)
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    count, folders = arguments.objects, arguments.folders
    keys = Images(count, folders) if folders else Recordings(count)
    try:
        asyncio.run(serve(Bucket(keys), arguments.latency_ms, arguments.port))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
