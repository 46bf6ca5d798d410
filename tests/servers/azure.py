"""Azurite: Microsoft's own emulator of Azure's blobs, a program for Node."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.servers import free_port, listens, spawn, stop, wait_until

_NUMBERS = itertools.count()
ACCOUNT = "devstoreaccount1"
# Known to everybody: the emulator's.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Azure:
    """A running server."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        return {"account_name": ACCOUNT, "account_key": KEY, "endpoint_url": self.endpoint}

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={self.endpoint};"
        )


def missing() -> str:
    """Why there can be no server; empty where there can."""
    if _program() is None:
        return "Azurite is not installed (npm install --prefix .venv azurite)"
    return "" if find_spec("azure.storage.blob") else "adlfs is not installed"


def _program() -> str | None:
    installed = Path(sys.prefix) / "node_modules" / ".bin"
    return shutil.which("azurite-blob") or shutil.which("azurite-blob", path=str(installed))


@contextlib.contextmanager
def azurite() -> Iterator[Azure]:
    """A server in memory that ends with the block, or with this process."""
    port = free_port()
    options = [
        "--disableTelemetry",
        "--skipApiVersionCheck",
        "--inMemoryPersistence",
        "--silent",
    ]
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = spawn([_program() or "azurite-blob", *options, *where])
    try:
        wait_until(lambda: listens(port), "Azurite")
        yield Azure(f"http://127.0.0.1:{port}/{ACCOUNT}")
    finally:
        stop(process)


@dataclass(frozen=True)
class AzureContainer:
    """A container of a test's own, filled by Microsoft's client."""

    name: str
    client: Any

    @classmethod
    def make(cls, server: Azure) -> AzureContainer:
        from azure.storage.blob import BlobServiceClient

        name = f"test-{os.getpid()}-{next(_NUMBERS)}"
        service = BlobServiceClient.from_connection_string(server.connection_string)
        return cls(name, service.create_container(name))

    def put(self, key: str, data: bytes) -> None:
        self.client.upload_blob(key, data, overwrite=True)

    def delete(self, key: str) -> None:
        self.client.delete_blob(key)
