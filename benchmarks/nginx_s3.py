"""nginx as an S3 server that only reads: the one that takes the least of a shared machine.

Objects are files, sent by the kernel from the page cache; a gateway takes a core or more
to serve what a client on the other core reads, and then the gateway is what is measured.
nginx knows no listings: it passes those on to a small server in Python (this module as a
program), which finds the files when it is first asked and answers from that. Two
things are not real: signatures are not checked, and the ETag is nginx's, from the file's time and size.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.synthetic_s3 import Bucket, Piece, Recordings, serve

CONFIG = """
daemon off;
{user}
worker_processes 1;
pid {scratch}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    sendfile_max_chunk 2m;
    keepalive_requests 1000000000;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    server {{
        listen {address}:{port} reuseport;
        root {folder};
        location = / {{ return 204; }}
        location ~ ^/[^/]+/?$ {{ proxy_pass http://127.0.0.1:{listing_port}; }}
    }}
}}
"""


class Fact(NamedTuple):
    """A listing's row of a file, computed once because the server must cost little."""

    size: int
    etag: str
    modified: float
    written: str

    @classmethod
    def of(cls, path: Path) -> Fact:
        """Look at a file; the ETag is nginx's (its source: ngx_http_set_etag)."""
        found = path.stat()
        seconds = int(found.st_mtime)
        written = f"{datetime.fromtimestamp(seconds, UTC):%FT%T}.000Z"
        return cls(found.st_size, f'"{seconds:x}-{found.st_size:x}"', found.st_mtime, written)


@dataclass(frozen=True, slots=True)
class Files(Recordings):
    """The files of a bucket's folder as its objects.

    Attributes:
        keys: names within the folder, sorted.
        facts: of each, when they were looked at.
    """

    keys: list[str]
    facts: dict[str, Fact]

    @classmethod
    def found(cls, folder: Path) -> Files:
        """Look at the folder."""
        files = (path for path in folder.rglob("*") if path.is_file())
        facts = {str(path.relative_to(folder)): Fact.of(path) for path in files}
        return cls(len(facts), sorted(facts), facts)

    def __getitem__(self, number: Any) -> Any:
        return self.keys[number]

    def size(self, key: str) -> int:
        """See `Recordings`."""
        return self.facts[key].size

    def etag(self, key: str) -> str:
        """See `Recordings`."""
        return self.facts[key].etag

    def modified(self, key: str) -> float:
        """See `Recordings`."""
        return self.facts[key].modified

    def written(self, key: str) -> str:
        """See `Recordings`."""
        return self.facts[key].written


class Buckets:
    """Answers to listings: each folder is looked at once, when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, Bucket] = {}

    def answer(self, method: str, target: str, headers: dict[str, str]) -> list[Piece]:
        """Return the parts of a whole HTTP response."""
        name = target.lstrip("/").partition("?")[0].partition("/")[0]
        if name not in self._found:
            self._found[name] = Bucket(Files.found(self._folder / name), name)
        return self._found[name].answer(method, target, headers)


def nginx() -> str | None:
    """Return nginx's program; Debian's is not on the PATH of everybody."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


async def run(folder: Path, scratch: Path, port: int, listing_port: int, address: str) -> None:
    """Serve until told to end."""
    config = scratch / "nginx.conf"
    # Started by root it would give its rights away, and then not get at a temporary folder.
    user = "" if os.geteuid() else "user root;"
    places = {"folder": folder, "scratch": scratch, "port": port, "listing_port": listing_port}
    places["address"] = address
    config.write_text(CONFIG.format(user=user, **places))
    program = nginx() or sys.exit("no nginx: apt-get install nginx-light, or another --server")
    if ending := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.cancel)
    server = await asyncio.create_subprocess_exec(program, "-c", str(config))
    try:
        await serve(Buckets(folder), 0, listing_port)
    finally:
        server.terminate()
        await server.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--folder", "--scratch"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--port", "--listing-port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    given = parser.parse_args()
    with suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(
            run(given.folder, given.scratch, given.port, given.listing_port, given.address)
        )


if __name__ == "__main__":
    main()
