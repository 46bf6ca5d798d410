"""A bad link: a TCP proxy before any server, with bandwidth, latency and faults on demand.

In a test or benchmark::

    with slowlink(server.endpoint, latency_seconds=0.05) as link:
        ...  # use link.endpoint
        link.set(bytes_per_second=25e6, unavailable=0.1)

It knows just enough of HTTP/1 to see where a request begins. S3 signs the Host header, so
requests pass through unaltered and the server behind must not care for its own name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from tests.servers import stop

_ROOT = __file__.rsplit("/tests/", 1)[0]
_METHODS = (b"GET ", b"HEAD", b"PUT ", b"POST", b"DELE")
_CHUNK = 1 << 16
_BURST_SECONDS = 0.02
_CUT_SECONDS = 0.05  # between two looks at a link that is cut
_SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
)
_EXPIRED = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
)
_LENGTH = re.compile(rb"(?i)(\r\ncontent-length: *)(\d+)")


@dataclass(frozen=True)
class Faults:
    """What the link does to those who use it.

    Attributes:
        bytes_per_second: of answers, all connections together; 0: no limit.
        latency_seconds: before each request is passed on.
        slow: share of requests that are passed on
        slow_seconds: later than others.
        unavailable: share of requests that are answered SlowDown, with
        refusal: this status, and
        retry_after: this header, in seconds; 0: none.
        resets: share of requests whose answer ends in a TCP reset,
        stalls: or stands still for
        stall_seconds: so long,
        fault_after_bytes: bytes of the answer before that.
        expired: share of requests that are refused because the credentials have expired.
        truncated: share of requests of which a 206 has half of the bytes that it should have.
        bad_path: requests with this text in their path are answered 503; empty: none.
        cut: nothing passes in either direction, as if all packets were lost.
        seed: of the dice.
    """

    bytes_per_second: float = 0
    latency_seconds: float = 0
    slow: float = 0
    slow_seconds: float = 0
    unavailable: float = 0
    refusal: int = 503
    retry_after: int = 0
    resets: float = 0
    stalls: float = 0
    stall_seconds: float = 0
    fault_after_bytes: int = 0
    expired: float = 0
    truncated: float = 0
    bad_path: str = ""
    cut: bool = False
    seed: int = 0


@dataclass
class Counts:
    """What has passed."""

    connections: int = 0
    requests: int = 0
    bytes: int = 0
    slow: int = 0
    unavailable: int = 0
    resets: int = 0
    stalls: int = 0
    expired: int = 0
    truncated: int = 0


@dataclass(frozen=True)
class SlowLink:
    """A running proxy, as its user sees it."""

    endpoint: str
    admin: str

    def set(self, **faults: float | str) -> None:
        """Change some faults, keep the others; takes effect at once."""
        self._ask(json.dumps(faults).encode())

    def counts(self) -> Counts:
        """What has passed since it started."""
        return Counts(**self._ask(b""))

    def _ask(self, body: bytes) -> dict[str, int]:
        request = urllib.request.Request(self.admin, data=body, method="PUT")
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, int] = json.load(answer)
        return found


@contextlib.contextmanager
def slowlink(endpoint: str, **faults: float) -> Iterator[SlowLink]:
    """A proxy before an HTTP endpoint, in a process of its own."""
    upstream = urlsplit(endpoint)
    arguments = [f"{upstream.hostname}", f"{upstream.port or 80}", json.dumps(faults)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.servers.slowlink import main; main()", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        port, admin = process.stdout.readline().split()
        yield SlowLink(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}/")
    finally:
        stop(process)


class _Proxy:
    def __init__(self, host: str, port: int, faults: Faults) -> None:
        self.upstream = (host, port)
        self.faults = faults
        self.counts = Counts()
        self.dice = random.Random(faults.seed)
        self._free_at = 0.0

    def change(self, values: dict[str, Any]) -> None:
        self.faults = replace(self.faults, **values)
        if "seed" in values:
            self.dice = random.Random(self.faults.seed)

    @property
    def chunk(self) -> int:
        """Bytes to pass on at once: a slow link trickles, it does not stop and burst."""
        return min(_CHUNK, int(self.faults.bytes_per_second / 50) or _CHUNK)

    async def pay(self, count: int) -> None:
        """Wait until the shared link has carried that number of further bytes."""
        if not self.faults.bytes_per_second:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _BURST_SECONDS)
        self._free_at += count / self.faults.bytes_per_second
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)

    async def whole(self) -> None:
        """Wait until the link is not cut."""
        while self.faults.cut:
            await asyncio.sleep(_CUT_SECONDS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        connection = _Connection(self, reader, writer)
        with contextlib.suppress(ConnectionError, OSError):
            await connection.run()
        writer.close()

    async def administer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next(
            (
                int(line[15:])
                for line in head.split(b"\r\n")
                if line.startswith(b"content-length:")
            ),
            0,
        )
        if length:
            self.change(json.loads(await reader.readexactly(length)))
        body = json.dumps(asdict(self.counts)).encode()
        writer.write(_answer(b"200 OK", body))
        await writer.drain()
        writer.close()


class _Connection:
    """One client's connection and its twin to the server."""

    def __init__(
        self, proxy: _Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.proxy = proxy
        self.reader = reader
        self.writer = writer
        self.fault = ""
        self.sound_bytes = 0  # until the fault

    async def run(self) -> None:
        theirs, to_them = await asyncio.open_connection(*self.proxy.upstream, limit=1 << 20)
        halves = [
            asyncio.create_task(self.requests(to_them)),
            asyncio.create_task(self.answers(theirs)),
        ]
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            to_them.close()

    async def requests(self, to_them: asyncio.StreamWriter) -> None:
        while data := await self.reader.read(_CHUNK):
            if data[:4] in _METHODS and await self.refused(data.partition(b"\r\n")[0]):
                return
            await self.proxy.whole()
            to_them.write(data)
            await to_them.drain()

    async def refused(self, request: bytes) -> bool:
        """Meet a new request with this link's latency, and perhaps one of its faults."""
        proxy, faults = self.proxy, self.proxy.faults
        proxy.counts.requests += 1
        luck = proxy.dice.random()
        await asyncio.sleep(faults.latency_seconds)
        if proxy.dice.random() < faults.slow:
            proxy.counts.slow += 1
            await asyncio.sleep(faults.slow_seconds)
        bad = bool(faults.bad_path) and faults.bad_path.encode() in request
        if bad or luck < faults.unavailable:
            proxy.counts.unavailable += 1
            status = b"%d Slow Down" % (503 if bad else faults.refusal)
            return await self.answered(status, _SLOW_DOWN, faults.retry_after)
        luck -= faults.unavailable
        if luck < faults.expired:
            proxy.counts.expired += 1
            return await self.answered(b"403 Forbidden", _EXPIRED)
        luck -= faults.expired
        self.fault = ""
        for fault in ("reset", "stall", "truncate"):
            share = {
                "reset": faults.resets,
                "stall": faults.stalls,
                "truncate": faults.truncated,
            }[fault]
            if luck < share:
                self.fault = fault
                break
            luck -= share
        self.sound_bytes = faults.fault_after_bytes
        return False

    async def answered(self, status: bytes, body: bytes, retry_after: int = 0) -> bool:
        more = b"Retry-After: %d\r\n" % retry_after if retry_after else b""
        self.writer.write(_answer(status, body, more))
        await self.writer.drain()
        return True

    async def answers(self, theirs: asyncio.StreamReader) -> None:
        while data := await theirs.read(self.proxy.chunk):
            if self.fault == "truncate":
                await self.truncate(data, theirs)
                return
            if self.fault:
                self.sound_bytes -= len(data)
                if self.sound_bytes < 0 and await self.broken():
                    return
            await self.proxy.whole()
            await self.proxy.pay(len(data))
            self.proxy.counts.bytes += len(data)
            self.writer.write(data)
            await self.writer.drain()

    async def truncate(self, data: bytes, theirs: asyncio.StreamReader) -> None:
        """Pass on half of a 206 as if it were all, and end the connection; else all of it."""
        while b"\r\n\r\n" not in data and (more := await theirs.read(_CHUNK)):
            data += more
        head, end, body = data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if b" 206 " in head[:16] and length is not None and int(length[2]) > 1:
            self.proxy.counts.truncated += 1
            half = int(length[2]) // 2
            while len(body) < half and (more := await theirs.read(_CHUNK)):
                body += more
            head = _LENGTH.sub(b"\\g<1>%d" % half, head) + b"\r\nConnection: close"
            self.writer.write(head + end + body[:half])
        else:
            self.writer.write(data)
            while more := await theirs.read(_CHUNK):
                self.writer.write(more)
        await self.writer.drain()

    async def broken(self) -> bool:
        fault, self.fault = self.fault, ""
        if fault == "stall":
            self.proxy.counts.stalls += 1
            await asyncio.sleep(self.proxy.faults.stall_seconds)
            return False
        self.proxy.counts.resets += 1
        plug: socket.socket = self.writer.get_extra_info("socket")
        # Lingering for no time makes the kernel send RST in place of FIN.
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        return True


def _answer(status: bytes, body: bytes, more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n"
    return head % (status, len(body)) + more + b"Connection: close\r\n\r\n" + body


def main() -> None:
    """``HOST PORT FAULTS-AS-JSON``: print both ports, serve until standard input ends."""
    host, port, faults = sys.argv[1:4]
    asyncio.run(_serve(_Proxy(host, int(port), Faults(**json.loads(faults)))))


async def _serve(proxy: _Proxy) -> None:
    link = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
    admin = await asyncio.start_server(proxy.administer, "127.0.0.1", 0)
    ports = [server.sockets[0].getsockname()[1] for server in (link, admin)]
    sys.stdout.write(f"{ports[0]} {ports[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
