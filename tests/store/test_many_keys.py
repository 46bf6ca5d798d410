"""Listings of 10^5 keys by real servers, and again when some of them have changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from growcache.store.opening import open_store
from tests.servers import Bucket, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FOLDERS = 250
KEYS = {"moto": 10_000, "ceph": 100_000}


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.ceph)])
def filled(request: pytest.FixtureRequest) -> Bucket:
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    bucket = Bucket.make(server)  # deleting them would take as long; the server's end does it
    put(bucket, names(KEYS[request.param]), b"1")
    return bucket


def names(count: int, first: int = 0) -> list[str]:
    return [f"im ages/{n % FOLDERS:03}/img+{n:06}.jpg" for n in range(first, first + count)]


def put(bucket: Bucket, keys: list[str], data: bytes) -> None:
    import obstore
    from obstore.store import S3Store

    options = bucket.storage_options
    store = S3Store(
        bucket.name,
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region="us-east-1",
        client_options={"allow_http": True},
    )

    async def all_of_them() -> None:
        left = iter(keys)

        async def some() -> None:
            for key in left:
                await obstore.put_async(store, key, data)

        await asyncio.gather(*(some() for _ in range(16)))

    asyncio.run(all_of_them())


def listed(bucket: Bucket, pattern: str, client: Any = "auto") -> list[Entry]:
    source = SourceConfig(
        url=(bucket.url(pattern),), storage_options=bucket.storage_options, client=client
    )
    return [entry for page in open_store(source).pages() for entry in page]


def test_all_keys_are_listed_once_and_again(filled: Bucket, tmp_path: Path) -> None:
    count = KEYS[filled.server.name]
    expected = names(count)
    found = listed(filled, "im ages/")
    assert sorted(entry.key for entry in found) == sorted(expected)
    assert listed(filled, "im ages/") == found
    assert {*listed(filled, "im ages/", "fsspec")} == {*found}
    assert len(listed(filled, "im ages/*7/*99.jpg")) == len(
        [key for key in expected if key.endswith("99.jpg") and key.split("/")[1][-1] == "7"]
    )
    put(filled, names(600, count), b"new")
    put(filled, expected[:50], b"changed")
    for key in expected[50:100]:
        filled.delete(key)
    with Catalog.open(tmp_path / "catalog.bin") as catalog:
        assert catalog.append(found) == count
        catalog.complete = True
        before = catalog.digest(count)
        again = listed(filled, "im ages/")
        assert len(again) == count + 550
        assert catalog.append(again) == 600
        assert catalog.digest(count) == before
        assert {*catalog.entries(range(count, count + 600))} <= {*again}
        assert catalog.entries(range(count)) == found
