"""One contract, every client: the same checks for each store, with objects that other programs wrote."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.errors import ObjectChangedError, ObjectMissingError, StoreError
from growcache.formats import open_format
from growcache.formats.base import Visit
from growcache.store.contract import StoredObject
from tests.store.places import MARKED, Place, listed, only, opened, read, read_once


@pytest.fixture(params=MARKED)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with opened(request, request.param, tmp_path) as found:
        yield found


NAMES = ("a/1.npy", "a/2.npy", "a/b/3.npy", "a/b/4.txt", "a1.npy", "c/d/e/5.npy")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a/*.npy", {"a/1.npy", "a/2.npy"}),
        ("**/*.npy", set(NAMES) - {"a/b/4.txt"}),
        ("a/**", {n for n in NAMES if n.startswith("a/")}),
        ("a/", {n for n in NAMES if n.startswith("a/")}),
        ("a/**/*.npy", {"a/1.npy", "a/2.npy", "a/b/3.npy"}),
        ("*/[bd]/*", {"a/b/3.npy", "a/b/4.txt"}),
        ("a/?.npy", {"a/1.npy", "a/2.npy"}),
        ("c/*/*/5.npy", {"c/d/e/5.npy"}),
        ("a/9*", set()),
    ],
)
def test_lists_what_the_glob_means(place: Place, pattern: str, expected: set[str]) -> None:
    if not place.lists or (place.base.startswith("http") and "?" in pattern):
        pytest.skip("a web server's files are named one by one, and ? begins a query")
    for name in NAMES:
        place.put(name, name.encode())
    entries = listed(place.open(pattern))
    assert sorted(e.key for e in entries) == sorted(map(place.key, expected))
    assert all(e.size == len(e.key.removeprefix(place.key_prefix)) for e in entries)
    assert all(e.etag or e.mtime for e in entries)


def test_an_object_is_named_by_its_url(place: Place) -> None:
    place.put("a/x.npy", b"12345")
    place.put("a/x.npy.bak", b"1")
    entry = only(place.open("a/x.npy"))
    assert (entry.key, entry.size) == (place.key("a/x.npy"), 5)


def test_reads_whole_objects_and_ranges(place: Place) -> None:
    data = bytes(range(256)) * 1000
    place.put("a/x.npy", data)
    store = place.open("a/x.npy")
    entry = only(store)

    async def compare() -> None:
        assert await read(store, entry) == data
        assert await read(store, entry, 1000, 2000) == data[1000:2000]
        assert await read(store, entry, 255_000) == data[255_000:]
        assert await read(store, entry, 255_990, 300_000) == data[255_990:]
        assert await read(store, entry, 10, 10) == b""
        buffer = await store.read(entry)
        assert np.frombuffer(memoryview(buffer), "u1").nbytes == len(data)
        await store.close()

    asyncio.run(compare())


def test_empty_objects_are_listed_and_read(place: Place) -> None:
    place.put("a/empty", b"")
    store = place.open("a/empty")
    entry = only(store)
    assert entry.size == 0
    assert read_once(store, entry) == b""


def test_folder_markers_are_no_objects(place: Place) -> None:
    if not place.is_bucket:
        pytest.skip("file systems have folders")
    if place.client == "fsspec" and place.base.startswith(("az", "abfs")):
        pytest.skip("adlfs lists nothing in a folder that has a marker")
    for key, data in {"f/": b"", "f/g/": b"", "f/g/1": b"1", "f/h": b"", "f/h1": b"2"}.items():
        place.put(key, data)
    entries = listed(place.open("f/", format="bytes"))
    assert sorted(e.key for e in entries) == [place.key(n) for n in ("f/g/1", "f/h", "f/h1")]


def test_a_rewritten_object_is_not_read(place: Place) -> None:
    place.put("a/x.npy", b"old contents")
    store = place.open("a/x.npy")
    entry = only(store)
    place.put("a/x.npy", b"new contents")
    if place.ignores_if_match:
        pytest.skip("this emulator ignores If-Match; see test_clouds")
    if place.key_prefix.startswith("/") and Path(entry.key).exists():
        os.utime(entry.key, (1, 1))  # clocks of file systems tick too slowly for a test
    with pytest.raises(ObjectChangedError, match="rewritten"):
        read_once(store, entry)


def test_a_rewritten_object_is_not_read_by_range_either(place: Place) -> None:
    place.put("a/x.npy", b"old contents")
    store = place.open("a/x.npy")
    entry = only(store)
    if place.ignores_if_match:
        pytest.skip("this emulator ignores If-Match; see test_clouds")
    place.put("a/x.npy", b"new")
    with pytest.raises(ObjectChangedError, match="rewritten"):
        read_once(store, entry, 8, 12)


def test_a_deleted_object_is_missing(place: Place) -> None:
    place.put("a/x.npy", b"contents")
    store = place.open("a/x.npy")
    entry = only(store)
    place.delete("a/x.npy")
    # If-Match comes first with Azure: what is gone is not what was listed.
    words = r"a/x\.npy (does not exist|was rewritten)"
    azure = place.base.startswith(("az", "abfs"))
    with pytest.raises((ObjectMissingError, ObjectChangedError)[: 1 + azure], match=words):
        read_once(store, entry)


def test_a_url_of_no_object_ends_with_2(place: Place) -> None:
    place.put("a/y.npy", b"contents")
    with pytest.raises(StoreError, match=r"a/x\.npy does not exist") as caught:
        listed(place.open("a/x.npy"))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_the_format_bytes_reads_it(place: Place) -> None:
    place.put("a/x.npy", b"of any kind")
    store = place.open("a/x.npy")
    reader = StoredObject(store, only(store))

    async def sample() -> Any:
        visit = Visit(0, 1, 0, 0, None)
        ((found, start, stop),) = await open_format("bytes", {}).read(reader, visit)
        await store.close()
        return found, start, stop

    found, start, stop = asyncio.run(sample())
    assert b"of any kind" in found.values()
    assert start < stop


def test_several_urls_are_one_source(place: Place) -> None:
    for name in ("a/1", "b/1", "b/2"):
        place.put(name, name.encode())
    patterns = ("b/1", "a/*", "b/*") if place.lists else ("b/1", "a/1", "b/2", "b/1")
    store = place.open(*patterns)
    entries = listed(store)
    assert [(e.key, e.store) for e in entries] == [
        (place.key("b/1"), 0),
        (place.key("a/1"), 1),
        (place.key("b/2"), 2),
    ]

    async def compare() -> None:
        for entry in entries:
            assert await read(store, entry) == entry.key.removeprefix(place.key_prefix).encode()
        await store.close()

    asyncio.run(compare())


def test_reads_are_counted(place: Place) -> None:
    place.put("a/x", b"12345678")
    counted: list[int] = []
    store = place.open("a/x", concurrency=3, on_bytes=counted.append)
    entry = only(store)

    async def many() -> None:
        await asyncio.gather(*(store.read(entry, 0, 4) for _ in range(20)))
        await store.close()

    asyncio.run(many())
    assert counted == [4] * 20


def test_a_store_serves_one_loop_after_another(place: Place) -> None:
    place.put("a/x", b"1234")
    store = place.open("a/x", concurrency=1)
    entry = only(store)

    async def twice() -> list[bytes]:
        return list(await asyncio.gather(read(store, entry), read(store, entry)))

    assert asyncio.run(twice()) == asyncio.run(twice()) == [b"1234"] * 2
    asyncio.run(store.close())
