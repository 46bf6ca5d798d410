"""An S3 store that misbehaves on demand: it is slow in places, refuses, throttles, breaks off, goes away.

The objects are those of benchmarks/synthetic_s3.py with a size of one's choice, so listing and reading cost little.
In a benchmark::

    with bad_store(objects=20_000, object_bytes=65_536, latency_seconds=0.044) as store:
        store.set(slow=[(0.02, 8.0)])     # takes effect at once; what is not named stays
        ...                               # use store.endpoint, store.url and store.storage_options
        store.counts().refused
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

from benchmarks.synthetic_s3 import BUCKET, PREFIX, Bucket, Piece, Recordings

CONTROL = "/.trouble"  # GET: the counts; PUT: change the troubles
CHUNK_BYTES = 1 << 16
REFUSAL = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


@dataclass(frozen=True, slots=True)
class Troubles:
    """Troubles of requests for objects; for listings, only the latency and `away` apply.

    Attributes:
        latency_seconds: before the first byte of every answer.
        slow: pairs of a share of the requests and the seconds that those take longer.
        takes: requests that are served at a time; further ones are refused with 503. 0: any number.
        refuses: share of the requests that are refused with 503.
        retry_after: the header of a refusal, in seconds; 0: none.
        bytes_per_second: of all answers together; 0: no limit.
        connection_bytes_per_second: of each connection; 0: no limit.
        breaks: share of the answers that end in a reset after half of the bytes.
        stalls: share of the answers that stop for good after half of the bytes.
        away: "reset" breaks every connection, "silent" answers nothing until it is over; "": neither.
    """

    latency_seconds: float = 0.0
    slow: Sequence[Sequence[float]] = ()
    takes: int = 0
    refuses: float = 0.0
    retry_after: float = 0.0
    bytes_per_second: float = 0.0
    connection_bytes_per_second: float = 0.0
    breaks: float = 0.0
    stalls: float = 0.0
    away: str = ""


@dataclass(slots=True)
class Counts:
    """Of requests for objects since the start."""

    requests: int = 0
    served: int = 0  # whole answers
    refused: int = 0
    slow: int = 0
    broken: int = 0
    stalled: int = 0
    bytes: int = 0  # of all answers, listings included
    payload: int = 0  # bytes of objects, without the heads of answers
    most_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class BadStore:
    """A running store."""

    endpoint: str

    @property
    def url(self) -> str:
        """The pattern of all objects."""
        return f"s3://{BUCKET}/{PREFIX}*.npy"

    @property
    def storage_options(self) -> dict[str, str]:
        """The storage options with which a config reaches it."""
        return {"endpoint_url": self.endpoint, "key": "a", "secret": "b"}

    def set(self, **troubles: Any) -> None:
        """Change some troubles; the others stay."""
        self._ask(json.dumps(troubles).encode())

    def counts(self) -> Counts:
        """Return what happened since the start."""
        return Counts(**self._ask(None))

    def _ask(self, body: bytes | None) -> dict[str, int]:
        request = urllib.request.Request(
            self.endpoint + CONTROL, data=body, method="PUT" if body else "GET"
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, int] = json.load(answer)
        return found


@contextlib.contextmanager
def bad_store(objects: int, object_bytes: int = 65_536, **troubles: Any) -> Iterator[BadStore]:
    """Run the store in a process of its own."""
    settings = json.dumps(troubles)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks.bad_store",
            str(objects),
            str(object_bytes),
            settings,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield BadStore(process.stdout.readline().strip())
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@dataclass(frozen=True, slots=True)
class Arrays(Recordings):
    """Arrays of float32 of one size."""

    object_bytes: int

    def size(self, key: str) -> int:
        """See `Recordings`."""
        return len(_header(self.object_bytes)) + self.object_bytes

    def body(self, key: str) -> list[Piece]:
        """See `Recordings`."""
        return [_header(self.object_bytes), _pool(self.object_bytes)]


_HEADERS: dict[int, bytes] = {}
_POOLS: dict[int, memoryview] = {}


def _header(nbytes: int) -> bytes:
    if nbytes not in _HEADERS:
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({nbytes // 4},), }}"
        text += " " * (-(len(text) + 11) % 64) + "\n"
        _HEADERS[nbytes] = (
            b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
        )
    return _HEADERS[nbytes]


def _pool(nbytes: int) -> memoryview:
    if nbytes not in _POOLS:
        values = np.random.default_rng(0).random(nbytes // 4, dtype=np.float32)
        _POOLS[nbytes] = values.data.cast("B")
    return _POOLS[nbytes]


class Chance:
    """Hits a share of its calls at random places, and evenly, so that short runs compare.

    >>> chance = Chance(random.Random(0))
    >>> sum(chance.hits("slow", 0.02) for _ in range(500))
    10
    """

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._left: dict[tuple[str, float], list[bool]] = {}

    def hits(self, what: str, share: float) -> bool:
        """Return whether this call is one of the share."""
        if share <= 0:
            return False
        left = self._left.setdefault((what, share), [])
        if not left:
            count = max(1, round(1 / share))
            left += [False] * (count - 1) + [True]
            self._dice.shuffle(left)
        return left.pop()


class Gate:
    """The bandwidth that some answers share."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def pay(self, nbytes: int, bytes_per_second: float) -> None:
        """Wait until the link has carried that many further bytes; 0 per second: no limit."""
        if not bytes_per_second:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + nbytes / bytes_per_second
        await asyncio.sleep(self._free_at - now)


class Service:
    """The state that all connections share."""

    def __init__(self, bucket: Bucket, troubles: Troubles) -> None:
        self.bucket = bucket
        self.troubles = troubles
        self.counts = Counts()
        self.chance = Chance(random.Random(0))
        self.link = Gate()
        self.in_flight = 0
        self.back = asyncio.Event()

    def change(self, values: dict[str, Any]) -> None:
        """Adopt some troubles."""
        known = {field.name for field in fields(Troubles)}
        if unknown := values.keys() - known:
            raise ValueError(f"unknown troubles: {sorted(unknown)}; known are {sorted(known)}")
        self.troubles = replace(self.troubles, **values)
        if not self.troubles.away:
            self.back.set()
            self.back = asyncio.Event()


class Connection(asyncio.Protocol):
    """One client's connection; requests on it come one after the other."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._received = b""
        self._link = Gate()
        self._answers: set[asyncio.Task[None]] = set()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back to the client."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        """Give up the answers under way."""
        for answer in self._answers:
            answer.cancel()

    def pause_writing(self) -> None:
        """Hold back what is to be sent."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Go on sending."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Cut requests out of the stream."""
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, rest = self._received.partition(b"\r\n\r\n")
            request, *lines = head.decode("latin-1").split("\r\n")
            pairs = (line.partition(":") for line in lines)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                return
            body, self._received = rest[:length], rest[length:]
            method, target, _ = request.split(" ")
            if target == CONTROL:
                self._control(body)
                continue
            task = asyncio.ensure_future(self._answer(method, target, headers))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    def _control(self, body: bytes) -> None:
        if body:
            self._service.change(json.loads(body))
        said = json.dumps(asdict(self._service.counts)).encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said
        )

    async def _answer(self, method: str, target: str, headers: dict[str, str]) -> None:
        service = self._service
        while service.troubles.away:
            if service.troubles.away == "reset":
                self._transport.abort()
                return
            await service.back.wait()
        is_object = method == "GET" and target.partition("?")[0].endswith(".npy")
        if not is_object:
            await asyncio.sleep(service.troubles.latency_seconds)
            await self._send(service.bucket.answer(method, target, headers))
        elif self._is_refused():
            await self._refuse()
        else:
            await self._serve(method, target, headers)

    def _is_refused(self) -> bool:
        service = self._service
        service.counts.requests += 1
        too_many = 0 < service.troubles.takes <= service.in_flight
        return too_many or service.chance.hits("refuses", service.troubles.refuses)

    async def _refuse(self) -> None:
        service = self._service
        service.counts.refused += 1
        after = service.troubles.retry_after
        more = b"Retry-After: %d\r\n" % round(after) if after else b""
        await asyncio.sleep(service.troubles.latency_seconds)
        head = b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n%b\r\n" % (len(REFUSAL), more)
        await self._send([head + REFUSAL])

    async def _serve(self, method: str, target: str, headers: dict[str, str]) -> None:
        service, counts = self._service, self._service.counts
        service.in_flight += 1
        counts.most_in_flight = max(counts.most_in_flight, service.in_flight)
        try:
            await asyncio.sleep(service.troubles.latency_seconds + self._extra_seconds())
            answer = service.bucket.answer(method, target, headers)
            if service.chance.hits("breaks", service.troubles.breaks):
                counts.broken += 1
                counts.payload += _payload_bytes(answer) // 2
                await self._send(_half(answer))
                self._transport.abort()
            elif service.chance.hits("stalls", service.troubles.stalls):
                counts.stalled += 1
                await self._send(_half(answer))
                await asyncio.Event().wait()
            else:
                await self._send(answer)
                counts.served += 1
                counts.payload += _payload_bytes(answer)
        finally:
            service.in_flight -= 1

    def _extra_seconds(self) -> float:
        service, extra = self._service, 0.0
        for number, (share, seconds) in enumerate(service.troubles.slow):
            if service.chance.hits(f"slow {number}", share):
                service.counts.slow += 1
                extra += seconds
        return extra

    async def _send(self, pieces: list[Piece]) -> None:
        service, troubles = self._service, self._service.troubles
        limited = troubles.bytes_per_second or troubles.connection_bytes_per_second
        for piece in _chunks(pieces) if limited else pieces:
            await self._writable.wait()
            await service.link.pay(len(piece), troubles.bytes_per_second)
            await self._link.pay(len(piece), troubles.connection_bytes_per_second)
            while service.troubles.away:
                if service.troubles.away == "reset":
                    self._transport.abort()
                    return
                await service.back.wait()
            service.counts.bytes += len(piece)
            if not self._transport.is_closing():
                self._transport.write(piece)


def _payload_bytes(answer: list[Piece]) -> int:
    return sum(map(len, answer[1:]))


def _half(pieces: list[Piece]) -> list[Piece]:
    whole = b"".join(pieces)
    return [whole[: len(whole) // 2]]


def _chunks(pieces: list[Piece]) -> list[Piece]:
    return [p[at : at + CHUNK_BYTES] for p in pieces for at in range(0, len(p), CHUNK_BYTES)]


async def serve(service: Service) -> None:
    """Serve until cancelled; the endpoint is the first line on stdout."""
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(service), "127.0.0.1", 0
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


def run_store(objects: int, object_bytes: int, troubles: Troubles) -> None:
    async def begin() -> None:
        await serve(Service(Bucket(Arrays(objects, object_bytes)), troubles))

    uvloop.run(begin())


if __name__ == "__main__":
    run_store(int(sys.argv[1]), int(sys.argv[2]), Troubles(**json.loads(sys.argv[3])))
