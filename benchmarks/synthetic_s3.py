"""A made-up S3 bucket of any size, far away: listings and objects computed from the key.

It stands in for a store nobody would fill for a benchmark (100,000 objects of 256 KiB are
25 GB). What is real: HTTP/1.1 with keep-alive, ListObjectsV2 in pages of 1,000 keys that
must be asked for one after the other, GET with ranges and If-Match, HEAD, ETags, and one
round trip of latency before the first byte of every answer. What is not: there is no
bandwidth limit, no TLS, no authentication, the latency is a constant, and connecting costs
no round trip. It measures how a client deals with round trips, not how fast it reads.

Run alone with ``python -m benchmarks.synthetic_s3 --objects 10000``; the first line on
stdout is its endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import sys
from bisect import bisect_left, bisect_right
from urllib.parse import parse_qs, unquote, urlsplit
from zlib import crc32

import numpy as np

BUCKET = "far"
PREFIX = "recordings/"
PAGE_KEYS = 1000
SHAPE = (64, 1024)  # float32: 256 KiB
Piece = bytes | memoryview
MODIFIED = "2026-01-01T00:00:00.000Z"


def array_of(key: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return what the object `key` holds: float32 of `SHAPE`, without NaN."""
    start = crc32(key.encode()) % _PER_OBJECT
    return _POOL[start : start + _PER_OBJECT].reshape(SHAPE)


def _pool(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
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


class Bucket:
    """The keys, and the answers to requests about them."""

    def __init__(self, objects: int) -> None:
        self.keys = [f"{PREFIX}{number:07d}.npy" for number in range(objects)]

    def answer(self, method: str, target: str, headers: dict[str, str]) -> list[Piece]:
        """Return the parts of a whole HTTP response."""
        url = urlsplit(target)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if bucket != BUCKET:
            return _response("404 Not Found", [_error("NoSuchBucket")])
        if not key:
            return self._listing({k: v[0] for k, v in parse_qs(url.query).items()})
        return self._object(method, key, headers)

    def _listing(self, query: dict[str, str]) -> list[Piece]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if delimiter == "/" and "/" not in prefix and PREFIX.startswith(prefix):
            return _response("200 OK", [_page([], None, common=PREFIX)])
        after = query.get("continuation-token") or query.get("start-after") or ""
        first = max(bisect_left(self.keys, prefix), bisect_right(self.keys, after))
        limit = min(PAGE_KEYS, int(query.get("max-keys", PAGE_KEYS)))
        page = [key for key in self.keys[first : first + limit] if key.startswith(prefix)]
        more = len(page) == limit and first + limit < len(self.keys)
        return _response("200 OK", [_page(page, page[-1] if more else None)])

    def _object(self, method: str, key: str, headers: dict[str, str]) -> list[Piece]:
        place = bisect_left(self.keys, key)
        if place == len(self.keys) or self.keys[place] != key:
            return _response("404 Not Found", [_error("NoSuchKey")])
        if headers.get("if-match", etag(key)) != etag(key):
            return _response("412 Precondition Failed", [_error("PreconditionFailed")])
        extra = {"ETag": etag(key), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if method == "HEAD":
            return _response("200 OK", [], extra, length=OBJECT_BYTES)
        body: list[Piece] = [_NPY_HEADER, array_of(key).data.cast("B")]
        if span := _range(headers.get("range", "")):
            start, stop = span
            part = b"".join(body)[start:stop]
            extra["Content-Range"] = f"bytes {start}-{stop - 1}/{OBJECT_BYTES}"
            return _response("206 Partial Content", [part], extra)
        return _response("200 OK", body, extra)


def etag(key: str) -> str:
    """Return the quoted ETag of an object."""
    return f'"{crc32(key.encode()):08x}"'


def _range(header: str) -> tuple[int, int] | None:
    """``bytes=3-9`` and ``bytes=-7`` as start and stop; None where the whole is meant."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if not match:
        return None
    if not match[1]:
        return OBJECT_BYTES - min(int(match[2]), OBJECT_BYTES), OBJECT_BYTES
    last = int(match[2]) if match[2] else OBJECT_BYTES - 1
    return int(match[1]), min(last + 1, OBJECT_BYTES)


def _page(keys: list[str], token: str | None, common: str = "") -> bytes:
    rows = "".join(
        f"<Contents><Key>{key}</Key><LastModified>{MODIFIED}</LastModified>"
        f"<ETag>{etag(key)}</ETag><Size>{OBJECT_BYTES}</Size></Contents>"
        for key in keys
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    folder = f"<CommonPrefixes><Prefix>{common}</Prefix></CommonPrefixes>" if common else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><KeyCount>{len(keys)}</KeyCount><MaxKeys>{PAGE_KEYS}</MaxKeys>"
        f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{more}{rows}{folder}"
        "</ListBucketResult>"
    ).encode()


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


class Connection(asyncio.Protocol):
    """One client's connection: each request is answered after the latency."""

    def __init__(self, bucket: Bucket, latency_seconds: float) -> None:
        self._bucket = bucket
        self._latency = latency_seconds
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back to the client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Cut requests out of the stream; the client sends no bodies."""
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            loop = asyncio.get_running_loop()
            loop.call_later(self._latency, self._answer, head.decode("latin-1"))

    def _answer(self, head: str) -> None:
        request, *lines = head.split("\r\n")
        method, target, _ = request.split(" ")
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        if not self._transport.is_closing():
            self._transport.writelines(self._bucket.answer(method, target, headers))


async def serve(objects: int, latency_ms: float, port: int) -> None:
    """Serve until cancelled; the endpoint is the first line on stdout."""
    bucket = Bucket(objects)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(bucket, latency_ms / 1000), "127.0.0.1", port
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--objects", type=int, default=10_000)
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    try:
        asyncio.run(serve(arguments.objects, arguments.latency_ms, arguments.port))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
