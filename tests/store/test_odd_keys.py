"""Keys that are odd but legal: listed as they are, and read back unchanged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import StoreError
from growcache.store.urls import is_unsupported_key
from tests.servers.web import web
from tests.store.places import MARKED, Place, listed, opened, read

PLAIN = ["a/1", "a/2"]
# Also legal as names of files, and therefore in every store.
FILES = [
    "sp ace/é ü.npy",
    "sp ace/ lead",
    "sp ace/trail ",
    "100%25/a+b&c=d.npy",
    "100%25/%",
    "100%25/a b%20c%2Fd",
    "til~e/(1),'2'.npy",
    'til~e/"quoted"',
    "hash/a#b.npy",
    "hash/#",
    "dot.s/..a",
    "dot.s/b..",
    "dot.s/...",
    "back\\slash",
    "star*[1]{a,b}",
    "日本/語.npy",
    "€",
    "semi;colon:@!$",
]
# Only object stores have these.
OBJECTS = ["a//b", "a/../c", "./d", "a/./e", "..", "tab\there", "x", "x/y", "x/y/z"]


def _of(*kinds: str) -> list[ParameterSet]:
    return [one for one in MARKED if str(one.values[0]).startswith(kinds)]


# A web server lists addresses, so it has a test of its own.
EVERYWHERE = pytest.mark.parametrize(
    "place", _of("moto", "ceph", "own-s3", "files", "memory"), indirect=True
)
IN_BUCKETS = pytest.mark.parametrize("place", _of("moto", "ceph", "own-s3"), indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with opened(request, request.param, tmp_path) as found:
        yield found


def check(place: Place, names: list[str]) -> None:
    for name in names:
        place.put(name, f"of {name}".encode())
    store = place.open("**")
    entries = listed(store)
    assert sorted({e.key for e in entries}) == sorted(place.key(name) for name in names)

    async def compare() -> None:
        for entry in entries:
            name = entry.key.removeprefix(place.key_prefix)
            assert await read(store, entry) == f"of {name}".encode()
            assert await read(store, entry, 1, 3) == b"f "
        await store.close()

    asyncio.run(compare())
    plain = [name for name in names if not set(name) & set("*?[")]  # else the URL is a glob
    named = [entry.key for entry in listed(place.open(*plain))]
    assert named == [place.key(name) for name in plain]


@EVERYWHERE
def test_odd_names(place: Place) -> None:
    check(place, [*PLAIN, *FILES])


@IN_BUCKETS
def test_keys_that_are_no_names_of_files(place: Place) -> None:
    if place.client == "obstore":
        for name in (*PLAIN, "a//b"):
            place.put(name, b"")
        with pytest.raises(StoreError, match=r"source\.client: auto or fsspec"):
            listed(place.open("**"))
        return
    check(place, [*PLAIN, *FILES, *OBJECTS])


@IN_BUCKETS
def test_a_key_beside_a_folder_of_its_name(place: Place) -> None:
    check(place, ["x", "x/y", "x.npy", "x.npy/z", "x-"])


def test_odd_addresses_of_a_web_server(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"of {name}".encode())
    with web(tmp_path) as address, contextlib.ExitStack() as stack:
        place = Place(address + "/", lambda *_: None, lambda _: None, {}, "auto")
        store = place.open("**")
        stack.callback(lambda: asyncio.run(store.close()))
        entries = listed(store)
        assert len(entries) == len(
            FILES
        )  # under their addresses, as the server's page has them

        async def contents() -> set[str]:
            return {(await read(store, entry)).decode() for entry in entries}

        assert asyncio.run(contents()) == {f"of {name}" for name in FILES}


@given(
    st.lists(st.sampled_from(["", ".", "..", "a", "..a", "a.", " "]), min_size=1, max_size=4)
)
def test_what_is_odd_is_what_obstore_refuses(parts: list[str]) -> None:
    from obstore.exceptions import BaseError
    from obstore.store import MemoryStore

    key = "/".join(parts)
    store = MemoryStore()
    try:
        store.put(key, b"1")
        (found,) = [meta["path"] for page in store.list() for meta in page]
    except (BaseError, OSError, ValueError):
        found = None
    assert is_unsupported_key(key) == (found != key)
