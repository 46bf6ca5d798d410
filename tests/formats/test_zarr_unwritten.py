"""Chunks that were never written, which no listing shows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from growcache.errors import ObjectChangedError
from growcache.formats import open_format
from growcache.formats.zarr import ZarrFormat
from growcache.formats.zarr_unwritten import ChunkCensus
from growcache.schema import Array
from growcache.store.contract import Entry, unwritten_entry
from tests.formats.held import Held, visited

pytest.importorskip("numcodecs")
zarr = pytest.importorskip("zarr")

SHAPE, CHUNKS = (70, 9), (8, 4)
VALUES = np.arange(1, 631, dtype="<i4").reshape(SHAPE)


def stored(version: int = 3, **settings: Any) -> dict[str, bytes]:
    held: dict[str, Any] = {}
    store = zarr.storage.MemoryStore(held)
    more = {"shape": SHAPE, "chunks": CHUNKS, "dtype": "<i4", "fill_value": -1, **settings}
    group = zarr.open_group(store, mode="w", zarr_format=version)
    group.create_array("0", **more)[:] = VALUES
    return {f"a.zarr/{key}": value.to_bytes() for key, value in held.items()}


def is_chunk(key: str) -> bool:
    return key.startswith("a.zarr/0/") and key[-1].isdigit()


def opened(**options: Any) -> ZarrFormat:
    found = open_format("zarr", options)
    assert isinstance(found, ZarrFormat)
    return found


def unwritten(
    object_format: ZarrFormat, objects: dict[str, bytes], keys: Iterable[str]
) -> list[Entry]:
    return list(counted(object_format, objects, keys).unwritten())


def counted(
    object_format: ZarrFormat, objects: dict[str, bytes], keys: Iterable[str]
) -> ChunkCensus:
    census = object_format.census()
    assert census is not None
    page = [Entry(key, len(objects[key]), '"1"', 1.0) for key in keys]
    for at in range(0, len(page), 7):

        def reader_of(entry: Entry) -> Held:
            return Held(objects[entry.key], entry.key, objects)

        asyncio.run(census.note(page[at : at + 7], reader_of))
    return census


NAMED: dict[str, dict[str, Any]] = {
    "3": {},
    "shards": {"shards": (16, 8)},
    "2": {"version": 2},
    "2 slashes": {"version": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
}
CUT: dict[str, dict[str, Any]] = {
    "rows": {"axis": 0},
    "windows": {"window": 20, "stride": 3},
    "windows far apart": {"window": 5, "stride": 19},
    "at random": {"window": 5, "stride": 19, "phase": "random"},
    "channels": {"axis": -1, "window": 2},
    "blocks": {"window": [10, 3]},
    "padded": {"window": [10, 3], "edge": "pad"},
}


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("cut", CUT)
def test_all_windows_come_whichever_chunks_were_written(named: str, cut: str) -> None:
    objects = stored(**NAMED[named])
    object_format = opened(**CUT[cut])
    chunks = sorted(filter(is_chunk, objects))
    rng = np.random.default_rng(len(named) + len(cut))
    written = [key for key in chunks if rng.random() < 0.6]
    kept = {key: data for key, data in objects.items() if key in written or not is_chunk(key)}
    missing = unwritten(object_format, kept, written)
    keys = [entry.key for entry in missing]
    assert len(set(keys)) == len(keys)
    owning = {key for key in chunks if owns_samples(object_format, Held(b"1", key, kept))}
    assert owning - set(written) <= set(keys) <= set(chunks) - set(written)
    assert all(entry == unwritten_entry(entry.key, 0) for entry in missing)

    def origins(keys: Iterable[str], of: dict[str, bytes]) -> list[tuple[int, int]]:
        held = [Held(of.get(key, b""), key, of) for key in keys]
        return [(start, stop) for one in held for _, start, stop in rows(object_format, one)]

    assert sorted(origins([*written, *keys], kept)) == sorted(origins(chunks, objects))


def owns_samples(object_format: ZarrFormat, held: Held) -> bool:
    return asyncio.run(object_format.measure(held)).samples > 0


def rows(object_format: ZarrFormat, held: Held) -> list[Any]:
    if not held.data:
        held.entry = unwritten_entry(held.entry.key, 0)
    return visited(object_format, held)


def test_values_that_were_never_written_are_the_fill_value() -> None:
    objects = stored(version=2)
    for key in ("a.zarr/0/2.0", "a.zarr/0/2.1", "a.zarr/0/3.1"):
        del objects[key]
    expected: Array = VALUES.copy()
    expected[16:24, :8] = -1
    expected[24:32, 4:8] = -1
    for key in ("a.zarr/0/1.0", "a.zarr/0/2.0", "a.zarr/0/3.0"):
        held = Held(objects.get(key, b""), key, objects)
        found = rows(opened(window=8), held)
        assert found
        for sample, start, stop in found:
            np.testing.assert_array_equal(sample["0"], expected[start:stop])


def test_a_chunk_that_was_written_after_the_listing_is_no_fill_value() -> None:
    objects = stored()
    held = Held(b"", "a.zarr/0/c/1/0", objects)
    with pytest.raises(ObjectChangedError, match="--refresh"):
        rows(opened(axis=0), held)


@pytest.mark.parametrize("claimed", [10**12, 3_000_000 * 8])
def test_an_array_that_claims_too_many_is_named(claimed: int) -> None:
    objects = stored(version=2)
    metadata = objects["a.zarr/0/.zarray"].decode().replace("70", str(claimed), 1).encode()
    objects |= {"b.zarr/.zarray": metadata, "b.zarr/0.0": objects["a.zarr/0/0.0"]}
    chunks = [key for key in objects if is_chunk(key) and key != "a.zarr/0/1.0"]
    census = counted(opened(axis=0), objects, ["b.zarr/0.0", *chunks])
    assert [entry.key for entry in census.unwritten()] == ["a.zarr/0/1.0"]
    assert list(census.left_out) == ["b.zarr/"]
    assert claimed // 8 - 1 <= census.left_out["b.zarr/"] <= claimed // 8
    assert opened(axis=0, unwritten="skip").census() is None


def test_what_is_no_chunk_of_an_array_is_not_counted() -> None:
    objects = stored()
    objects |= {"b/c/0/0": b"x", "notes.txt": b"x", "a.zarr/0/c/900/0": b"x", "b/7": b"x"}
    keys = [key for key in objects if key != "a.zarr/0/c/4/0"]
    found = unwritten(opened(axis=0), objects, keys)
    assert [entry.key for entry in found] == ["a.zarr/0/c/4/0"]
