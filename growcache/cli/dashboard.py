"""``growcache dashboard``, and the dashboard process of ``growcache run --http``."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from types import ModuleType

import typer

from growcache.cache.files import CacheLayout
from growcache.cli.terminal import print_to_stderr, signals_as_ctrl_c
from growcache.errors import CacheMissingError, MissingLibraryError
from growcache.usercode import child_environment

STOP_SECONDS = 5.0

log = logging.getLogger("growcache")


def shipped_file(name: str) -> str:
    """Return a packaged file for Prometheus or Grafana."""
    return resources.files("growcache.monitor").joinpath(name).read_text(encoding="utf-8")


def _http_server() -> ModuleType:
    try:
        from growcache.monitor import http_server
    except ImportError as error:
        raise MissingLibraryError(
            f"the dashboard needs {str(error.name).partition('.')[0]}; pip install 'growcache[metrics]'"
        ) from None
    return http_server


def show_dashboard(
    caches: Sequence[Path],
    http: str,
    *,
    token_file: Path | None,
    prefix: str,
    listen_fd: int | None,
) -> None:
    """Serve the dashboard of some caches, on a service's open socket ``listen_fd`` if given."""
    server = _http_server()
    token = server.read_token(token_file, os.environ)
    if listen_fd is not None:
        listening = socket.socket(fileno=listen_fd)
    else:
        listening = server.listen(server.Address.parse(http), token)
        _say_what_is_missing(caches)
        typer.echo(f"dashboard: {_shown_url(server, listening, prefix, token)}", err=True)
    with signals_as_ctrl_c():  # otherwise SIGTERM would look like a crash
        server.serve_dashboard(
            caches, listening, token=token, prefix=prefix, ends_with_input=listen_fd is not None
        )


def _say_what_is_missing(caches: Sequence[Path]) -> None:
    for path in caches:
        try:
            CacheLayout(path).require()
        except CacheMissingError as error:
            print_to_stderr(f"growcache: {error}; the dashboard shows it once it exists")


def _shown_url(
    server: ModuleType, listening: socket.socket, prefix: str, token: str | None
) -> str:
    url = str(server.url_of(listening, prefix))
    return url if token is None else f"{url} (with the token once: {url}?token=…)"


@contextlib.contextmanager
def dashboard_beside(cache: Path, http: str | None) -> Iterator[None]:
    """Run the dashboard of a cache as a child process during the block, if ``http`` is given."""
    if http is None:
        yield
        return
    from growcache.sampling.serve import end_child

    server = _http_server()
    token = server.read_token(None, os.environ)
    with server.listen(server.Address.parse(http), token) as listening:
        process = _start(cache, listening)
        typer.echo(f"dashboard: {_shown_url(server, listening, '', token)}", err=True)
    ending = threading.Event()
    threading.Thread(target=_watch, args=(process, cache, ending), daemon=True).start()
    try:
        yield
    finally:
        ending.set()
        end_child(process, STOP_SECONDS)


def _start(cache: Path, listening: socket.socket) -> subprocess.Popen[bytes]:
    descriptor = listening.fileno()
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "growcache",
            "dashboard",
            str(cache),
            "--listen-fd",
            str(descriptor),
        ],
        stdin=subprocess.PIPE,  # its end ends the dashboard, even if this process is killed
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        start_new_session=True,
        env=child_environment(),
    )


def _watch(process: subprocess.Popen[bytes], cache: Path, ending: threading.Event) -> None:
    code = process.wait()
    if not ending.is_set():
        log.warning(
            "dashboard ended (exit code %s); the service continues. Start another dashboard: "
            "growcache dashboard %s",
            *(code, cache),
        )
