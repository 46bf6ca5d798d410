"""The routes of the page: its files, and JSON for the page only.

Each is a GET that changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from growcache.cache.history import read_history
from growcache.cache.index.inspection import IndexColumns, read_holes, read_shard_columns
from growcache.cache.metrics_file import read_metrics
from growcache.cache.status import read_status
from growcache.errors import CacheError, CacheMissingError
from growcache.loading.waiting import shown_generation
from growcache.monitor.caches import FreshValue, named_caches
from growcache.monitor.gallery import gallery_of
from growcache.monitor.hole_reasons import group_holes
from growcache.monitor.metric_tables import metric_tables
from growcache.monitor.shard_map import map_of
from growcache.monitor.verdicts import (
    RECENT_SECONDS,
    Answers,
    answer_questions,
    answers_without_cache,
    recent_changes,
)
from growcache.usercode import printable

T = TypeVar("T")
Handler: TypeAlias = Callable[[Request], Response]

WEB = Path(__file__).parent / "web"
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
REVALIDATED = {"Cache-Control": "no-cache"}
DEFAULT_SAMPLES = 12
MOST_DIGITS = 15


def routes(caches: Sequence[Path]) -> list[Route]:
    """Return the routes of a page that shows some caches. The first one is the default."""
    named = named_caches(caches)
    answers = _fresh(named, read_answers)
    shards = _fresh(named, read_shards)
    maps = {name: FreshValue(partial(_read_map, found)) for name, found in shards.items()}

    def cache_of(request: Request) -> str:
        name = request.query_params.get("cache", next(iter(named)))
        if name not in named:
            raise HTTPException(404, f"no cache {name!r}; there is {', '.join(named)}")
        return name

    def json_of(read: Callable[[str, Request], Any]) -> Handler:
        return lambda request: json_response(lambda: read(cache_of(request), request))

    def samples(name: str, request: Request) -> Any:
        count = number_in(request, "count") or DEFAULT_SAMPLES
        turn, shard = number_in(request, "turn") or 0, number_in(request, "shard")
        return gallery_of(*shards[name].get(), count=count, turn=turn, shard=shard)

    return [
        Route("/", web_file("index.html")),
        *(
            Route(f"/web/{path.name}", web_file(path.name, **REVALIDATED))
            for path in sorted(WEB.iterdir())
        ),
        Route("/answers.json", json_of(lambda name, _: answers[name].get())),
        Route("/shards.json", json_of(lambda name, _: maps[name].get())),
        Route("/holes.json", json_of(lambda name, _: read_hole_groups(named[name]))),
        Route("/tables.json", json_of(lambda name, _: read_tables(named[name]))),
        Route("/samples.json", json_of(samples)),
    ]


def _fresh(named: dict[str, Path], read: Callable[[Path], T]) -> dict[str, FreshValue[T]]:
    return {name: FreshValue(lambda path=path: read(path)) for name, path in named.items()}  # type: ignore[misc]


def read_shards(cache: Path) -> tuple[Path, IndexColumns]:
    """Return the shards of the generation that new loaders read.

    Raises the errors of `read_index`.
    """
    root = shown_generation(cache)
    return root, read_shard_columns(root)


def _read_map(shards: FreshValue[tuple[Path, IndexColumns]]) -> dict[str, Any]:
    """Return the map. It takes a second with a hundred leases on a hundred thousand shards."""
    return map_of(*shards.get())


def read_answers(cache: Path) -> dict[str, Any]:
    """Return the answers about a cache, in words. Raises the errors of `read_index`."""
    try:
        status = read_status(cache)
    except CacheMissingError:
        return _as_json(answers_without_cache(str(cache)))
    recent = recent_changes(read_history(cache, time.time() - 2 * RECENT_SECONDS), status)
    return _as_json(answer_questions(status, recent))


def _as_json(answers: Answers) -> dict[str, dict[str, str]]:
    return {
        name: {part: printable(text) for part, text in answer.items()}
        for name, answer in asdict(answers).items()
    }


def read_tables(cache: Path) -> dict[str, Any]:
    """Return tables of the service's counters. Raises the errors of `read_index`."""
    return metric_tables(read_metrics(shown_generation(cache)))


def read_hole_groups(cache: Path) -> dict[str, Any]:
    """Return the latest holes by reason, and the number of all.

    Raises the errors of `read_index`.
    """
    total, holes = read_holes(shown_generation(cache))
    groups = [asdict(group) for group in group_holes(holes)]
    return {"total": total, "noted": len(holes), "groups": groups}


def number_in(request: Request, name: str) -> int | None:
    """Return a number of the query, from 0 on, or None without one."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise HTTPException(
            400, f"{name} must be a number of at most {MOST_DIGITS} digits, found {text!r}"
        )
    return int(text)


def json_response(read: Callable[[], Any]) -> Response:
    """Return the result of ``read``. If a cache cannot be read, the error is JSON, too."""
    try:
        body, code = orjson.dumps(read()), 200
    except CacheError as error:
        body, code = orjson.dumps({"error": str(error)}), 503
    return Response(body, code, media_type="application/json")


def web_file(name: str, **headers: str) -> Handler:
    path = WEB / name

    def handler(request: Request) -> Response:
        media_type = MEDIA_TYPES.get(path.suffix, "application/octet-stream")
        return Response(path.read_bytes(), media_type=media_type, headers=headers)

    return handler
