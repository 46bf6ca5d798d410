"""Places for objects, for each client and kind of store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.store.contract import Entry
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from tests.cloud import place as own
from tests.cloud.objects import open_objects
from tests.servers import Bucket, S3Server
from tests.servers.azure import Azure, AzureContainer
from tests.servers.ceph import missing
from tests.servers.gcs import GcsBucket
from tests.servers.sftp import Ssh
from tests.servers.web import web


@dataclass(frozen=True)
class Place:
    """A place where objects are put by other means than the store under test."""

    base: str
    put: Callable[[str, bytes], None]
    delete: Callable[[str], None]
    options: dict[str, Any]
    client: str = "auto"
    key_prefix: str = ""
    lists: bool = True
    timeout_seconds: float = 3
    ignores_if_match: bool = False

    @property
    def is_bucket(self) -> bool:
        return self.base.startswith(("s3", "gs", "gcs", "az", "abfs"))

    def open(self, *patterns: str, **settings: Any) -> RemoteStore:
        urls = [self.base + pattern for pattern in patterns]
        source = SourceConfig.model_validate(
            {
                "url": urls,
                "format": settings.pop("format", "npy"),
                "storage_options": self.options,
                "client": self.client,
            }
        )
        return open_store(
            source,
            timeout_seconds=settings.pop("timeout_seconds", self.timeout_seconds),
            **settings,
        )

    def key(self, name: str) -> str:
        return self.key_prefix + name


S3_PLACES = [
    f"{server}+{client}" for server in ("moto", "ceph") for client in ("obstore", "fsspec")
]
CLOUDS = ["gcs+auto", "gcs+fsspec", "azure+auto", "azure+fsspec"]
PLACES = [
    *S3_PLACES, "moto+auto", *CLOUDS, "files", "files+fsspec", "memory", "web", "web+fsspec",
    "sftp",
]  # fmt: skip
if own.kind():  # `make test-cloud`: the user's bucket, and nothing else
    PLACES = [f"{own.kind()}+auto", f"{own.kind()}+fsspec"]
# Those whose servers or clients `make test-slow` installs; and moto where Ceph covers the same,
# except for the client that most people have.
SLOW = ["gcs+fsspec", "azure+auto", "azure+fsspec"]
if not missing():
    SLOW += ["moto+obstore", "moto+fsspec"]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.ceph] * ("ceph" in name) + [pytest.mark.slow] * (name in SLOW)


MARKED = [pytest.param(name, marks=_marks(name)) for name in PLACES]


@contextlib.contextmanager
def opened(request: pytest.FixtureRequest, name: str, root: Path) -> Iterator[Place]:
    kind, _, client = name.partition("+")
    if kind in ("moto", "ceph"):
        server: S3Server = request.getfixturevalue(f"{kind}_server")
        bucket = Bucket.make(server)
        yield Place(bucket.url(""), bucket.put, bucket.delete, bucket.storage_options, client)
        bucket.remove()
    elif kind == own.kind():
        yield _own(client)
    elif kind == "memory":
        yield from _memory()
    elif kind == "gcs":
        yield _gcs(request.getfixturevalue("gcs_server"), client)
    elif kind == "azure":
        yield _azure(request.getfixturevalue("azure_server"), client)
    elif kind == "sftp":
        ssh: Ssh = request.getfixturevalue("ssh_server")
        yield Place(
            ssh.url(f"{root}/"), _write(root), _unlink(root), ssh.options, key_prefix=f"{root}/"
        )
    elif kind == "files":
        yield Place(f"{root}/", _write(root), _unlink(root), {}, client or "auto", f"{root}/")
    else:
        with web(root) as address:
            lists = client == "fsspec"
            yield Place(
                address + "/", _write(root), _unlink(root), {}, client or "auto", lists=lists
            )


def _gcs(endpoint: str, client: str) -> Place:
    bucket = GcsBucket.make(endpoint)
    options = {"endpoint_url": endpoint, "token": "anon"}
    ignores = client == "auto"
    return Place(
        f"gs://{bucket.name}/", bucket.put, bucket.delete, options, client,
        ignores_if_match=ignores,
    )  # fmt: skip


def _azure(server: Azure, client: str) -> Place:
    container = AzureContainer.make(server)
    options = {"connection_string": server.connection_string}
    options = options if client == "fsspec" else server.options
    return Place(f"az://{container.name}/", container.put, container.delete, options, client)


def _own(client: str) -> Place:
    folder, options = own.new_folder(), own.options()
    objects, prefix = open_objects(folder, options), own.key_of(folder)
    return Place(
        folder,
        lambda key, data: objects.put(prefix + key, data),
        lambda key: objects.delete(prefix + key),
        options,
        client,
        prefix,
        timeout_seconds=30,
        ignores_if_match=folder.startswith("gs") and "endpoint_url" in options,  # an emulator
    )


def _memory() -> Iterator[Place]:
    import fsspec

    fs = fsspec.filesystem("memory")
    yield Place(
        "memory://suite/",
        lambda key, data: fs.pipe_file(f"/suite/{key}", data),
        lambda key: fs.rm_file(f"/suite/{key}"),
        {},
        key_prefix="/suite/",
    )
    if fs.exists("/suite"):
        fs.rm("/suite", recursive=True)


def _write(root: Path) -> Callable[[str, bytes], None]:
    def put(key: str, data: bytes) -> None:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return put


def _unlink(root: Path) -> Callable[[str], None]:
    return lambda key: (root / key).unlink()


def listed(store: RemoteStore) -> list[Entry]:
    return [entry for page in store.pages() for entry in page]


def only(store: RemoteStore) -> Entry:
    (entry,) = listed(store)
    return entry


async def read(store: RemoteStore, entry: Entry, *limits: int) -> bytes:
    return bytes(memoryview(await store.read(entry, *limits)))


def read_once(store: RemoteStore, entry: Entry, *limits: int) -> bytes:
    async def once() -> bytes:
        try:
            return await read(store, entry, *limits)
        finally:
            await store.close()

    return asyncio.run(once())
