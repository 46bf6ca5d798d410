"""The dashboard's web application. It answers GET requests from caches, and changes nothing."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from growcache.cache.history import history_columns, read_history
from growcache.cache.metrics_file import Metrics, read_metrics
from growcache.cache.status_model import Status
from growcache.errors import CacheError, ConfigError
from growcache.monitor import page
from growcache.monitor.caches import named_caches, status_readers
from growcache.monitor.guard import HEADERS, KNOWN, NO_STORE, Guard
from growcache.monitor.prometheus import Look, exposition

EVENT_SECONDS = 1.0
UNAVAILABLE = 503


class Views:
    """The answers about some caches, by name. The first one is the default."""

    def __init__(self, caches: Mapping[str, Path]) -> None:
        self._paths = caches
        self._status = status_readers(caches)
        self._looks: dict[str, Look] = {
            name: partial(_look, path, self._status[name]) for name, path in caches.items()
        }
        self.ending = asyncio.Event()

    def routes(self) -> list[Route]:
        return [
            Route("/metrics", self.metrics),
            Route("/status.json", self.status),
            Route("/caches.json", self.caches),
            Route("/history.json", self.history),
            Route("/events", self.events),
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
        ]

    def _name(self, request: Request) -> str:
        name = request.query_params.get("cache", next(iter(self._paths)))
        if name not in self._paths:
            raise HTTPException(404, f"no cache {name!r}; there is {', '.join(self._paths)}")
        return name

    async def metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, content_type = await run_in_threadpool(exposition, self._looks, accept)
        return Response(body, media_type=content_type)

    async def status(self, request: Request) -> Response:
        read = self._status[self._name(request)]
        return await _json(lambda: read().to_json())

    async def caches(self, request: Request) -> Response:
        return await _json(lambda: orjson.dumps(list(map(self._entry, self._paths))))

    def _entry(self, name: str) -> dict[str, Any]:
        entry = {"name": name, "path": str(self._paths[name])}
        try:
            return {**entry, "status": self._status[name]()}
        except CacheError as error:
            return {**entry, "status": None, "error": str(error)}

    async def history(self, request: Request) -> Response:
        path, since = self._paths[self._name(request)], number_of(request, "since", 0.0)
        return await _json(lambda: orjson.dumps(history_columns(read_history(path, since))))

    async def events(self, request: Request) -> Response:
        read = self._status[self._name(request)]
        return StreamingResponse(self._event_texts(read), media_type="text/event-stream")

    async def _event_texts(self, read: Callable[[], Status]) -> AsyncIterator[bytes]:
        while not self.ending.is_set():
            try:
                status = await run_in_threadpool(read)
                yield b"event: status\ndata: " + status.to_json() + b"\n\n"
            except CacheError as error:
                yield b"event: problem\ndata: " + orjson.dumps({"error": str(error)}) + b"\n\n"
            try:
                await asyncio.wait_for(self.ending.wait(), EVENT_SECONDS)
            except TimeoutError:
                continue

    async def healthz(self, request: Request) -> Response:
        return PlainTextResponse("this process lives\n")

    async def readyz(self, request: Request) -> Response:
        read, wanted = self._status[self._name(request)], number_of(request, "min_samples", 1)
        try:
            missing = missing_samples(await run_in_threadpool(read), wanted)
        except CacheError as error:
            missing = str(error)
        if not missing:
            return PlainTextResponse("ready\n")
        reason = f": {missing}" if request.scope[KNOWN] else ""
        return PlainTextResponse(f"not ready{reason}\n", UNAVAILABLE)


def _look(path: Path, read: Callable[[], Status]) -> tuple[Status, Metrics | None]:
    return read(), read_metrics(path)


def missing_samples(status: Status, min_samples: float) -> str:
    """Return why a loader with ``min_samples`` would still wait, in words, or "".

    >>> missing_samples(Status(samples=7, complete=True), 1000)
    ''
    >>> missing_samples(Status(samples=7, state="waiting", waiting_for="the store"), 1000)
    '7 of 1,000 samples are cached; the service waits for the store'
    """
    wanted = min_samples
    if status.complete:
        wanted = min(wanted, max(1, status.samples))
    elif status.population_samples is not None:
        wanted = min(wanted, max(1, int(status.population_samples)))
    if status.samples >= wanted:
        return ""
    text = f"{status.samples:,} of {wanted:,g} samples are cached"
    if status.state == "stopped":
        return f"{text}, and no service runs; start one: growcache run CONFIG"
    return f"{text}; the service waits for {status.waiting_for}" if status.waiting_for else text


def number_of(request: Request, name: str, default: float) -> float:
    """Return a number of the query, or HTTP 400 if it is not a number."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name} must be a number, found {text!r}")
    return value


async def _json(make: Callable[[], bytes]) -> Response:
    """Return the result of ``make``, called in a thread. Errors of a cache are JSON, too."""
    try:
        body, code = await run_in_threadpool(make), 200
    except CacheError as error:
        body, code = orjson.dumps({"error": str(error)}), UNAVAILABLE
    return Response(body, code, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = orjson.dumps({"error": error.detail})
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _defect(request: Request, error: Exception) -> Response:
    """Answer if an error is a defect of this program. The server logs it."""
    body = orjson.dumps({"error": f"internal error: {type(error).__name__}; see the log"})
    headers = {**HEADERS, "Cache-Control": NO_STORE}  # the guard is too far inside to add them
    return Response(body, 500, headers, media_type="application/json")


def create_app(
    caches: Sequence[Path],
    *,
    token: str | None = None,
    prefix: str = "",
    public_metrics: bool = False,
) -> Starlette:
    """Return the application that shows some caches.

    Args:
        caches: Their paths, which need not exist yet.
        token: Token that each request must have. None accepts requests only on the loopback.
        public_metrics: Whether the metrics need no token.
        prefix: Path with which all addresses start, such as ``/growcache``.
    """
    prefix = clean_prefix(prefix)
    views = Views(named_caches(caches))
    routes: list[BaseRoute] = [*views.routes(), *page.routes(caches)]
    if prefix:
        routes = [Route(prefix, _to_folder), Mount(prefix, routes=routes)]

    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Guard, token=token, prefix=prefix, public_metrics=public_metrics)
        ],
        exception_handlers={HTTPException: _http_error, Exception: _defect},
    )
    # A redirect would name the host and scheme that a proxy hides.
    app.router.redirect_slashes = False
    app.state.end_events = views.ending.set
    return app


def clean_prefix(prefix: str) -> str:
    """Return a prefix with a slash before it and none after it.

    >>> clean_prefix("x/y/"), clean_prefix("/"), clean_prefix("")
    ('/x/y', '', '')
    """
    bare = prefix.strip("/")
    if not re.fullmatch(r"[\w.~/-]*", bare, re.ASCII) or {".", ".."} & {*bare.split("/")}:
        raise ConfigError(
            f"--prefix must be a path such as /growcache, found {prefix!r}", code="GC802"
        )
    return f"/{bare}" if bare else ""


async def _to_folder(request: Request) -> Response:
    """Redirect from the prefix itself to the page, by a relative address."""
    last = request.url.path.rsplit("/", 1)[-1]
    return Response(status_code=307, headers={"Location": f"./{last}/"})
