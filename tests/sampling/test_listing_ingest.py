"""The listing counts against the bound, and comes to its end none the less."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from growcache.cache.cache import Cache
from growcache.cache.files import allocated_tree
from growcache.cache.reader_lease import Lease
from growcache.config import Config
from growcache.errors import ConfigError
from growcache.sampling.listing_ingest import ListingIngest
from growcache.sampling.space_allocator import SpaceAllocator
from growcache.store.catalog import Catalog
from tests.cache.making import MAX_BYTES, add, need, opened

OBJECTS = 2500
SECONDS = 5.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Objects of whose names the catalog takes more than a full cache leaves free."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0").write_bytes(b"x")
    for number in range(1, OBJECTS):
        os.link(folder / "0", folder / f"{number}-{os.urandom(45).hex()}")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """Full, and without a reader."""
    with opened(tmp_path / "cache") as made:
        fill(made)
        yield made


def fill(cache: Cache) -> None:
    number = cache.totals().drawn_shards
    while cache.bytes_left_for_shards() >= need(number, 30):
        add(cache, number, 30)
        number += 1
    assert number > 4


class Service:
    """The part of one that lists."""

    def __init__(self, source: Path, cache: Cache, **bounds: object) -> None:
        values = {"path": cache.layout.root, "max_bytes": MAX_BYTES, **bounds}
        self.config = Config.model_validate(
            {"source": {"url": f"{source}/*", "format": "bytes"}, "cache": values}
        )
        self.cache = cache
        self.allocator = SpaceAllocator(self.config.cache, cache, evicts=True)
        self.catalog = Catalog.open(cache.layout.catalog)
        self.free = 0  # at most, for shards, while it was listed

    async def lists(
        self, *, refresh: bool = False, awaited: bool = False, allocator: bool = True
    ) -> bool:
        """List until the end, or until the listing waits; return whether it was the end."""
        woken = asyncio.Event()
        failed: list[BaseException] = []
        self.ingest = ListingIngest(
            self.config, self.cache, self.catalog, woken.set, failed.append, failed.append
        )
        self.ingest.start(None, refresh=refresh)
        try:
            while not self.ingest.listed:
                await asyncio.wait_for(woken.wait(), SECONDS)
                woken.clear()
                self.ingest.take(self.allocator if allocator else None, awaited=awaited)
                if self.ingest.pages:
                    return False
                assert self.cache.bytes_left() >= 0
                if not self.ingest.listed:
                    self.free = max(self.free, self.cache.bytes_left_for_shards())
        finally:
            self.ingest.stop()
            self.catalog.close()
        assert not failed
        return True


def test_a_listing_ends_though_the_cache_is_full_and_nobody_reads(
    source: Path, cache: Cache
) -> None:
    service = Service(source, cache)
    before = cache.totals().shards
    assert asyncio.run(service.lists())
    assert 2 < cache.totals().shards < before
    assert allocated_tree(cache.layout.root) <= MAX_BYTES
    assert service.free < need(0, 30), "shards take what was freed for the listing"
    assert cache.space.listing_ahead == 0
    with Catalog.open(cache.layout.catalog) as catalog:
        assert len(catalog) == OBJECTS


def test_who_reads_keeps_what_it_has_not_read_and_the_listing_waits(
    source: Path, cache: Cache
) -> None:
    shards = [candidate.number for candidate in cache.candidates()]
    with Lease.create(cache.layout.root, "train", []):
        cache.poll_leases(0.0)
        assert not asyncio.run(Service(source, cache).lists())
        assert [candidate.number for candidate in cache.candidates()] == shards
    cache.poll_leases(1.0)
    assert asyncio.run(Service(source, cache).lists())


def test_where_nothing_is_evicted_the_listing_waits(source: Path, cache: Cache) -> None:
    before = cache.totals().shards
    service = Service(source, cache, eviction="none")
    assert not asyncio.run(service.lists())
    assert cache.totals().shards == before
    assert (
        cache.space.listing_ahead == 0
    )  # a cache that is full draws no more, whatever is listed


def test_to_list_the_same_again_takes_no_room(source: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as cache:
        for number in range(4):  # before that it is listed slowly
            add(cache, number)
        service = Service(source, cache)
        service.allocator.evicts = False  # so that nothing is left free for the listing
        assert asyncio.run(service.lists())
        fill(cache)
        before = cache.totals().shards
        again = Service(source, cache)
        assert asyncio.run(again.lists(refresh=True))
        assert cache.totals().shards == before
        assert len(again.catalog) == OBJECTS


def test_a_page_that_comes_before_the_samplers_waits_for_them(
    source: Path, cache: Cache
) -> None:
    """Unless they wait for it: then no component would ever make room."""
    assert not asyncio.run(Service(source, cache).lists(allocator=False))
    with pytest.raises(ConfigError, match="the listing of"):
        asyncio.run(Service(source, cache).lists(allocator=False, awaited=True))
