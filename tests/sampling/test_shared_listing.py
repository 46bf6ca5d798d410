"""A shared catalog: one service lists, the others read, and nothing about it ends a service."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import fsspec
import pytest

from growcache.cache.files import CacheLayout
from growcache.cache.locks import pid_namespace
from growcache.cache.metrics_file import read_metrics
from growcache.cache.status import read_status
from growcache.config_source import SourceConfig
from growcache.errors import CacheError, StoreError
from growcache.sampling.shared_listing import SharedListing, catalog_name
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from growcache.store.counts import number_in
from growcache.store.opening import open_store
from growcache.store.shared_catalog import (
    PartPacker,
    Pointer,
    PublishedListing,
    decode_pointer,
    encode_pointer,
)
from growcache.store.shared_folder import open_shared_folder
from growcache.store.store import RemoteStore
from tests.sampling.services import service, wait_until, write_config
from tests.servers import Bucket, S3Server
from tests.servers.guarded import guarded


class Counted:
    """A store that counts how often it is listed."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self.listings = 0
        self.between: Callable[[], None] = lambda: None  # called after the first page

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def pages(self) -> Iterator[list[Entry]]:
        self.listings += 1
        for page in self._store.pages():
            yield page
            self.between()


class Source:
    def __init__(self, root: Path) -> None:
        self.folder, self.catalog = root / "in", root / "shared" / "catalog"
        self.folder.mkdir()
        self.config = SourceConfig(
            url=(f"{self.folder}/*",), format="bytes", catalog=str(self.catalog)
        )
        self.pointer = self.catalog / catalog_name(self.config)
        self.stores: list[RemoteStore] = []
        self.open(self.config)

    def open(self, config: SourceConfig) -> RemoteStore:
        """List this source from now on."""
        self.config, self.store = config, open_store(config)
        self.stores.append(self.store)
        self.listed = Counted(self.store)
        return self.store

    def close(self) -> None:
        for store in self.stores:
            asyncio.run(store.close())

    def add(self, *names: str) -> None:
        for name in names:
            (self.folder / name).write_bytes(name.encode())

    def lists(self, *, refresh: bool = False, stalled_seconds: float = 30) -> list[Entry]:
        listing = self.opened(refresh=refresh, stalled_seconds=stalled_seconds)
        return [entry for page in listing.pages() for entry in page]

    def opened(self, *, refresh: bool = False, stalled_seconds: float = 30) -> SharedListing:
        return SharedListing(
            self.listed,  # type: ignore[arg-type]
            self.store,
            0.2,
            refresh=refresh,
            stalled_seconds=stalled_seconds,
        )

    def published(self) -> Pointer:
        return decode_pointer(self.pointer.read_bytes())

    def age(self, seconds: float) -> None:
        pointer = self.published()
        last = pointer.last
        old = PublishedListing(
            last.publisher, last.at - seconds, last.complete, last.parts, last.left_out
        )
        self.pointer.write_bytes(encode_pointer(Pointer((*pointer.listings[:-1], old))))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with closing(Source(tmp_path)) as found:
        found.add("a", "b", ".DS_Store")
        yield found


def names(entries: list[Entry]) -> list[str]:
    return [Path(entry.key).name for entry in entries]


def test_the_second_service_reads_what_the_first_listed(source: Source) -> None:
    first = source.lists()
    assert names(first) == ["a", "b"]
    second = source.opened()
    assert [entry for page in second.pages() for entry in page] == first
    assert source.listed.listings == 1
    assert second.left_out == Counter({".DS_Store": 1})
    assert "2 objects read from" in second.said


def test_a_refresh_lists_again_and_adds_what_is_new_or_has_another_version(
    source: Source,
) -> None:
    source.lists()
    source.add("c")
    os.utime(source.folder / "a", (1, 1))
    assert names(source.lists(refresh=True)) == ["a", "b"], "it was listed a moment ago"
    source.age(3600)
    source.listed.between = lambda: seen.append(source.published().last.complete)
    seen: list[bool] = []
    assert names(source.lists(refresh=True)) == ["a", "b", "c"]
    assert seen == [False], "others know of the new listing while it goes on"
    assert [one.entries for one in source.published().listings] == [2, 2]
    found = source.lists()
    assert source.listed.listings == 2
    assert names(found) == ["a", "c", "a", "b"], "the newest version of a key comes first"
    assert found[0].mtime == 1
    source.age(3600)
    source.lists(refresh=True)
    assert [one.entries for one in source.published().listings] == [2, 2, 0]


HERE, GONE = socket.gethostname(), 1 << 30


@pytest.mark.parametrize(
    ("publisher", "seen"),
    [
        (f"elsewhere:{GONE}:{pid_namespace()}", False),
        (f"{HERE}:{GONE}:{pid_namespace()}", True),
        (f"{HERE}:{GONE}:1", False),  # of another container of this pod
        (f"{HERE}:{GONE}", False),
    ],
)
def test_a_listing_that_was_left_is_read_as_far_as_it_came_and_then_made(
    source: Source, publisher: str, seen: bool
) -> None:
    """At once where the publisher was a process of this namespace, else when nothing new comes."""
    packer = PartPacker(10)
    packer.add([entry for page in source.store.pages() for entry in page][:1])
    part, packed = packer.finish()
    source.catalog.mkdir(parents=True)
    (source.catalog / part.name).write_bytes(packed)
    left = PublishedListing(publisher, 0.0, False, (part,))
    source.pointer.write_bytes(encode_pointer(Pointer((left,))))
    patience = 1000.0 if seen else 0.0
    assert names(source.lists(stalled_seconds=patience)) == ["a", "a", "b"]
    assert source.published().last.complete
    assert source.published().entries == 2


def test_one_that_comes_while_another_lists_reads_along(source: Source) -> None:
    found: list[list[Entry]] = []

    def look() -> None:
        reading = source.opened(stalled_seconds=0.0)
        assert not source.published().last.complete
        found.append(next(iter(reading.pages()), []))

    source.listed.between = look
    # The follower that gives up at once lists for itself: two publish, and neither is harmed.
    assert names(source.lists()) == ["a", "b"]
    assert source.published().last.complete
    assert names(source.lists()) == ["a", "b"]


@pytest.mark.parametrize("damage", ["pointer", "part", "gone", "foreign"])
def test_a_damaged_catalog_is_said_and_replaced(
    source: Source, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    source.lists()
    (part,) = source.catalog.glob("*.gz")
    if damage == "pointer":
        source.pointer.write_bytes(b"{")
    elif damage == "part":
        part.write_bytes(b"x")
    elif damage == "gone":
        part.unlink()
    else:
        packer = PartPacker(10)
        packer.add([Entry(f"{source.folder}/../secret", 1, None, 1.0)])
        other, packed = packer.finish()
        (source.catalog / other.name).write_bytes(packed)
        listing = PublishedListing("evil:1", 0.0, True, (other,))
        source.pointer.write_bytes(encode_pointer(Pointer((listing,))))
    assert names(source.lists()) == ["a", "b"]
    assert "it cannot be used" in caplog.text
    assert source.listed.listings == 2
    assert names(source.lists()) == ["a", "b"]
    assert source.listed.listings == 2


def test_where_nothing_can_be_written_the_store_is_listed(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.catalog.parent.write_bytes(b"a file where the folder would be")
    assert names(source.lists(stalled_seconds=0.0)) == ["a", "b"]
    assert "source.catalog" in caplog.text


def test_a_service_that_may_not_write_waits_for_one_that_may(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """And then lists by itself."""
    with guarded(source.folder) as bucket:
        config = SourceConfig(
            url=("s3://b/*",),
            format="bytes",
            catalog="s3://b/c",
            storage_options=bucket.storage_options(),
        )
        store = source.open(config)
        listing = SharedListing(store, store, 0.2, stalled_seconds=0.0)
        assert [e.key for page in listing.pages() for e in page] == ["a", "b"]
    assert "this service may not publish" in caplog.text
    assert "so this service lists" in caplog.text
    assert bucket.refusals
    assert not listing.said


def test_any_file_system_of_fsspec_holds_a_catalog(source: Source) -> None:
    url = f"memory://{source.folder.name}-{os.getpid()}/catalog"
    source.open(source.config.model_copy(update={"catalog": url}))
    assert names(source.lists()) == ["a", "b"]
    assert names(source.lists()) == ["a", "b"]
    assert source.listed.listings == 1


def test_two_services_that_start_together_do_not_wait_for_each_other(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for the first of its sources leaves the second to the service that lists the first."""
    other = source.opened()
    awaited = {other}
    listing = SharedListing(source.listed, source.store, 0.2, awaited=awaited)  # type: ignore[arg-type]

    def sleep(seconds: float) -> None:
        assert awaited == {listing, other}
        assert list(other.pages())

    monkeypatch.setattr(time, "sleep", sleep)
    assert names([entry for page in listing.pages() for entry in page]) == ["a", "b"]
    assert listing.said.startswith("2 objects read from")
    assert listing not in awaited


def test_an_error_of_fsspec_names_the_file_once() -> None:
    url = "http://127.0.0.1:9/c"
    source = SourceConfig(url=("http://127.0.0.1:9/x",), format="bytes", catalog=url)
    with pytest.raises(StoreError, match=f"^{url}/a.json: connection refused"):
        open_shared_folder(url, source, 1.0).write("a.json", b"")


def test_a_pointer_that_is_half_written_is_read_again(
    source: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by SFTP, where a file is not replaced at once."""
    folder = f"/{source.folder.name}-{os.getpid()}/half"
    source.open(source.config.model_copy(update={"catalog": f"memory:/{folder}"}))
    source.lists()
    files = fsspec.filesystem("memory")
    pointer = f"{folder}/{source.pointer.name}"
    whole = files.cat_file(pointer)
    files.pipe_file(pointer, whole[:20])
    monkeypatch.setattr(time, "sleep", lambda seconds: files.pipe_file(pointer, whole))
    assert names(source.lists()) == ["a", "b"]
    assert source.listed.listings == 1
    assert not caplog.text


def test_its_own_files_are_no_objects(source: Source) -> None:
    root = source.folder.parent
    inside = {"url": (f"{root}/**",), "catalog": f"{root}/shared"}
    (root / "shared").mkdir()
    (root / "shared" / "x.json").write_bytes(b"{}")
    store = source.open(source.config.model_copy(update=inside))
    listing = SharedListing(store, store, 1.0)
    assert names([entry for page in listing.pages() for entry in page]) == ["a", "b"]


def test_sources_that_list_alike_share_a_catalog() -> None:
    base = {"url": "s3://b/x/*.npy", "catalog": "s3://b/c"}

    def name(**more: object) -> str:
        return catalog_name(SourceConfig.model_validate(base | more))

    own = name()
    assert name(options={"window": 7}, storage_options={"key": "k"}) == own
    assert name(labels={"url": "l.csv", "key": "k", "columns": "c"}) == own
    assert own not in (
        name(url="s3://b/y/*.npy"),
        name(format="zarr"),
        name(storage_options={"endpoint_url": "http://h"}),
    )


@pytest.mark.parametrize(
    "more",
    [{"manifest": "keys.csv"}, {"catalog": "s3://b/*/c"}, {"dataset": "m:f", "url": None}],
)
def test_settings_that_exclude_each_other_are_refused(more: dict[str, object]) -> None:
    values = {"url": "s3://b/*.npy", "catalog": "s3://b/c"} | more
    with pytest.raises(ValueError, match="catalog"):
        SourceConfig.model_validate({k: v for k, v in values.items() if v is not None})


SERVICES = 4
OBJECTS = 1100


@pytest.mark.slow
def test_services_that_start_together_list_a_bucket_once(
    moto_server: S3Server, tmp_path: Path
) -> None:
    bucket = Bucket.make(moto_server)
    for number in range(OBJECTS):
        bucket.put(f"d/{number}", b"12345678")

    def config(number: int) -> Path:
        return write_config(
            tmp_path / f"{number}.yaml",
            bucket.url("d/*"),
            source={
                "format": "bytes",
                "storage_options": bucket.storage_options,
                "catalog": bucket.url(".growcache"),
            },
            sampling={"node": number, "nodes": SERVICES},
        )

    def counted(number: int, op: str) -> int:
        found = read_metrics(tmp_path / str(number))
        return 0 if found is None else int(number_in(found.counts, "requests", op, "ok"))

    caches = [tmp_path / str(number) for number in range(SERVICES)]
    with ExitStack() as stack:
        for number in range(SERVICES):
            stack.enter_context(service(config(number)))
        for cache in caches:
            wait_until(lambda cache=cache: _listed(cache))
        wait_until(lambda: sum(counted(number, "put") for number in range(SERVICES)) >= 3)
        lists = [counted(number, "list") for number in range(SERVICES)]
    assert sorted(lists)[:-1] == [0] * (SERVICES - 1)
    assert sum(lists) >= OBJECTS // 1000
    found = [_keys(cache) for cache in caches]
    assert [len(keys) for keys in found] == [OBJECTS] * SERVICES
    assert len({frozenset(keys) for keys in found}) == 1
    said = [read_status(cache).catalogs for cache in caches]
    assert sorted("read from" in words[0] for words in said) == [False, True, True, True]
    bucket.remove()


def _keys(cache: Path) -> list[str]:
    with Catalog.open(CacheLayout(cache).catalog, readonly=True) as catalog:
        return [entry.key for entry in catalog.entries(range(len(catalog)))]


def _listed(cache: Path) -> bool:
    try:
        return read_status(cache).listing_complete
    except (CacheError, OSError, ValueError):
        return False
