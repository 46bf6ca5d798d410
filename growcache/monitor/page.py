"""The page: what is at `/`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


def routes(caches: Sequence[Path]) -> list[Route]:
    async def root(request: Request) -> Response:
        return PlainTextResponse("growcache: see status.json and history.json\n")

    return [Route("/", root)]
