"""Web servers as they are: certificates, no ranges, redirects, weak versions."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from growcache.config_source import SourceConfig
from growcache.errors import ObjectChangedError
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from tests.servers.web import web
from tests.store.places import only, read_once

DATA = bytes(range(256)) * 40
# By obstore, by fsspec, and as files of an index page, which is fsspec's.
KINDS = pytest.mark.parametrize(
    ("client", "pattern"), [("obstore", "x.npy"), ("fsspec", "x.npy"), ("auto", "*.npy")]
)
PROGRAM = """
import asyncio, sys
from growcache.config import SourceConfig
from growcache.errors import StoreError
from growcache.store.opening import open_store

async def read(store, entry):
    return len(await store.read(entry)), len(await store.read(entry, 5, 9))

for client, url in zip(sys.argv[1::2], sys.argv[2::2]):
    store = open_store(SourceConfig(url=(url,), client=client), timeout_seconds=1)
    try:
        ((entry,),) = filter(None, store.pages())
        print(*asyncio.run(read(store, entry)))
    except StoreError as error:
        print(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.npy").write_bytes(DATA)
    return tmp_path


def opened(url: str, client: str, timeout_seconds: float = 2) -> RemoteStore:
    source = SourceConfig.model_validate({"url": url, "client": client})
    return open_store(source, timeout_seconds=timeout_seconds)


@KINDS
def test_a_server_without_ranges(
    folder: Path, client: str, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It sends all of the file, and the range is cut out of it."""
    with web(folder, ranges=False) as address:
        url = f"{address}/{pattern}"
        entry = only(opened(url, client))
        assert read_once(opened(url, client), entry) == DATA
        assert read_once(opened(url, client), entry, 300, 310) == DATA[300:310]
        (folder / "x.npy").write_bytes(DATA[::-1])
        with pytest.raises(ObjectChangedError, match="rewritten"):
            read_once(opened(url, client), entry, 300, 310)
    assert caplog.text.count(f"{address} does not support ranges") == 1


@KINDS
def test_redirects_are_followed(folder: Path, client: str, pattern: str) -> None:
    asked: list[str] = []
    with web(folder, asked=asked) as address:
        url = f"{address}/moved/{pattern}"
        entry = only(opened(url, client))
        assert read_once(opened(url, client), entry, 300, 310) == DATA[300:310]
    assert any(line.startswith("GET /x.npy bytes=300-309") for line in asked)


@KINDS
@pytest.mark.parametrize("weak", [True, False])
def test_versions_weak_and_strong(folder: Path, client: str, pattern: str, weak: bool) -> None:
    with web(folder, weak=weak) as address:
        url = f"{address}/{pattern}"
        entry = only(opened(url, client))
        assert str(entry.etag).startswith("W/") == weak
        assert read_once(opened(url, client), entry, 300, 310) == DATA[300:310]
        (folder / "x.npy").write_bytes(DATA[::-1])
        with pytest.raises(ObjectChangedError, match="rewritten"):
            read_once(opened(url, client), entry, 300, 310)


@pytest.mark.parametrize("said", ["1", pytest.param("+3", marks=pytest.mark.slow)])
def test_a_server_is_not_asked_again_before_it_says(folder: Path, said: str) -> None:
    """In seconds, or by a date. Without that the read comes again after 0.2 s at the latest."""
    refuses: dict[str, list[int]] = {}
    with web(folder, refuses=refuses, retry_after=said) as address:
        store = opened(f"{address}/*.npy", "auto", timeout_seconds=30)
        entry = only(store)
        refuses["x.npy"] = [503, 200]
        began = time.monotonic()
        assert read_once(store, entry) == DATA
        waited = time.monotonic() - began
    assert waited >= float(said) - said.startswith("+")  # a date has whole seconds
    assert refuses["x.npy"] == [200]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, str]:
    trustme = pytest.importorskip("trustme")
    made = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.issue_cert("127.0.0.1").configure_cert(context)
    path = tmp_path_factory.mktemp("authority") / "ca.pem"
    made.cert_pem.write_to_path(str(path))
    return context, str(path)


def said(*kinds: str, **more: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SSL_CERT")} | more
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *kinds],
        capture_output=True,
        text=True,
        timeout=40,
        env=environment,
        check=False,
        cwd=__file__.rsplit("/tests/", 1)[0],
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_certificate_of_ones_own(folder: Path, authority: tuple[ssl.SSLContext, str]) -> None:
    context, path = authority
    with web(folder, tls=context) as address:
        key, listing = f"{address}/x.npy", f"{address}/*.npy"
        kinds = ("obstore", key, "fsspec", key, "auto", listing)
        assert said(*kinds, SSL_CERT_FILE=path) == [f"{len(DATA)} 4"] * 3
        refused = said(*kinds)
    assert len(refused) == 3
    for line in refused:
        assert "certificate is not trusted" in line
        assert "SSL_CERT_FILE" in line
