"""The dashboard's server in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from growcache.monitor.http_server import Address, listen, url_of
from growcache.monitor.server import create_app


@contextmanager
def serving(
    caches: Sequence[Path], prefix: str = "", token: str | None = None
) -> Iterator[str]:
    """Serve the dashboard by a thread; yield its address."""
    app = create_app(caches, token=token, prefix=prefix)
    listening = listen(Address("127.0.0.1", 0), None)
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield url_of(listening, prefix)
    finally:
        app.state.end_events()
        server.should_exit = True
        thread.join(300)
