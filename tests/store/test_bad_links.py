"""Reads and listings over a link that throttles, resets and stalls, by every client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.errors import TransientStoreError
from growcache.store.contract import Entry
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from tests.servers import Bucket
from tests.servers.slowlink import SlowLink

Link = Callable[..., SlowLink]
OBJECTS = 24
SIZE = 200_000
CLIENTS = pytest.mark.parametrize("client", ["obstore", "fsspec"])


@pytest.fixture
def filled(bucket: Bucket) -> Bucket:
    for number in range(OBJECTS):
        bucket.put(f"k{number:02}", content(number))
    return bucket


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def over(bucket: Bucket, link: SlowLink, client: str, **settings: Any) -> RemoteStore:
    options = bucket.storage_options | {"endpoint_url": link.endpoint}
    source = SourceConfig.model_validate(
        {"url": bucket.url("*"), "client": client, "storage_options": options}
    )
    return open_store(source, **settings)


def listed(store: RemoteStore) -> list[Entry]:
    return [entry for page in store.pages() for entry in page]


async def read_all(store: RemoteStore, entries: list[Entry]) -> list[bytes]:
    try:
        found = await asyncio.gather(*map(store.read, entries))
        return [bytes(memoryview(data)) for data in found]
    finally:
        await store.close()


@CLIENTS
@pytest.mark.parametrize(
    ("fault", "faults"),
    [
        ("unavailable", {"unavailable": 0.3}),
        ("resets", {"resets": 0.3, "fault_after_bytes": 70_000}),
        ("resets", {"resets": 0.3}),
        ("stalls", {"stalls": 0.1, "stall_seconds": 30, "fault_after_bytes": 70_000}),
    ],
)
def test_faults_pass_by(
    filled: Bucket, slowlink: Link, client: str, fault: str, faults: dict[str, float]
) -> None:
    link = slowlink(filled.server.endpoint)
    failures: list[BaseException] = []
    # fsspec's clients have no limit on a stalled read of their own; ours must hold for them.
    store = over(filled, link, client, timeout_seconds=8, on_retry=failures.append)
    entries = sorted(listed(store), key=attrgetter("key"))
    link.set(seed=1, **faults)
    assert asyncio.run(read_all(store, entries)) == [content(n) for n in range(OBJECTS)]
    assert getattr(link.counts(), fault) > 0
    # Not every one: HTTP clients mend a reused connection that turns out dead by themselves.
    assert failures


@CLIENTS
def test_a_listing_goes_on_after_faults(filled: Bucket, slowlink: Link, client: str) -> None:
    link = slowlink(filled.server.endpoint, unavailable=0.6, seed=3)
    entries = listed(over(filled, link, client, timeout_seconds=20))
    assert sorted(entry.key for entry in entries) == [f"k{n:02}" for n in range(OBJECTS)]
    assert link.counts().unavailable > 0


@CLIENTS
def test_a_store_that_stays_away_is_given_up(
    filled: Bucket, slowlink: Link, client: str
) -> None:
    link = slowlink(filled.server.endpoint)
    store = over(filled, link, client, timeout_seconds=1)
    entry = listed(store)[0]
    link.set(unavailable=1)
    started = time.monotonic()
    with pytest.raises(TransientStoreError, match=r"503.*given up after"):
        asyncio.run(read_all(store, [entry]))
    assert time.monotonic() - started < 20


@CLIENTS
def test_a_stalled_store_is_given_up(filled: Bucket, slowlink: Link, client: str) -> None:
    link = slowlink(filled.server.endpoint)
    store = over(filled, link, client, timeout_seconds=1)
    entry = listed(store)[0]
    link.set(stalls=1, stall_seconds=60, fault_after_bytes=1000)
    started = time.monotonic()
    with pytest.raises(TransientStoreError, match="given up after"):
        asyncio.run(read_all(store, [entry]))
    assert time.monotonic() - started < 30  # the stall takes 60


def test_a_slow_object_may_take_its_time(filled: Bucket, slowlink: Link) -> None:
    link = slowlink(filled.server.endpoint)
    store = over(filled, link, "obstore", timeout_seconds=1)
    entry = listed(store)[0]
    link.set(bytes_per_second=SIZE / 2)
    started = time.monotonic()
    assert asyncio.run(read_all(store, [entry])) == [content(0)]
    assert time.monotonic() - started > 1.2


def test_the_link_is_as_slow_as_it_says(filled: Bucket, slowlink: Link) -> None:
    link = slowlink(filled.server.endpoint)
    store = over(filled, link, "obstore")
    entries = listed(store)
    link.set(bytes_per_second=4e6, latency_seconds=0.1)
    started = time.monotonic()
    asyncio.run(read_all(store, entries))
    expected = OBJECTS * SIZE / 4e6
    assert 0.9 * expected < time.monotonic() - started < 10 * expected + 5
    assert link.counts().bytes >= OBJECTS * SIZE
