"""Real servers to test and measure against, each a process of its own."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

REGION = "us-east-1"
_NUMBERS = itertools.count()
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class S3Server:
    """An S3 endpoint and the keys that open it."""

    name: str
    endpoint: str
    key: str
    secret: str = field(repr=False)
    checks_credentials: bool

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint}

    def client(self) -> Any:
        """A boto3 client: what the tests put objects with, so no store is tested with itself."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}, max_pool_connections=32),
        )


@dataclass(frozen=True)
class Bucket:
    """A bucket of a test's own."""

    server: S3Server
    name: str
    client: Any

    @classmethod
    def make(cls, server: S3Server) -> Bucket:
        name = f"test-{os.getpid()}-{next(_NUMBERS)}"
        client = server.client()
        client.create_bucket(Bucket=name)
        return cls(server, name, client)

    @property
    def storage_options(self) -> dict[str, Any]:
        return self.server.storage_options

    def url(self, pattern: str) -> str:
        return f"s3://{self.name}/{pattern}"

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def remove(self) -> None:
        """Delete the bucket with all it holds."""
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name):
            if rows := [{"Key": row["Key"]} for row in page.get("Contents", ())]:
                self.client.delete_objects(Bucket=self.name, Delete={"Objects": rows})
        self.client.delete_bucket(Bucket=self.name)
        self.client.close()


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(ready: Callable[[], bool], what: str, seconds: float = 300) -> None:
    """Poll until ready; a server that does not come up fails the test that wanted it."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up within {seconds:g} s")
        time.sleep(0.05)


def die_with_parent() -> None:
    """Have the kernel kill this process with its parent; for between fork and exec."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    command: Sequence[str | Path], log: int | IO[bytes] = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a server out of the reach of Ctrl-C, which ends with this process all the same."""
    return subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def listens(port: int) -> bool:
    """Whether somebody does."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def stop(process: subprocess.Popen[Any], seconds: float = 5) -> None:
    """Ask, then insist, and reap."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
