"""What the first objects say about all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.config_source import SourceConfig
from growcache.errors import FormatError
from growcache.formats import open_format
from growcache.sampling.fill import GroupFiller, load_transform
from growcache.sampling.messages import Message, PartVisit
from growcache.sampling.schema_probe import (
    PROBE_BYTES,
    PROBE_OBJECTS,
    SchemaProbe,
    probed_together,
    settled_schema,
)
from growcache.sampling.sources import OpenSource, Sources
from growcache.schema import Array, Field, Schema
from growcache.store.contract import Entry
from growcache.store.opening import open_store


def _rows(n: int, dtype: str = "<f4") -> Schema:
    return Schema((Field("x", dtype, (n, 4)),))


RAGGED = Schema((Field("x", "<f4", (None, 4)),))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_a_schema_fits_most_samples(rows: list[int]) -> None:
    schemas = [_rows(n) for n in rows]
    settled = settled_schema(schemas)
    fit = sum(settled.allows(schema) for schema in schemas)
    assert fit >= 0.75 * len(schemas)
    assert settled.is_ragged == (fit == len(schemas) and len(set(rows)) > 1)


def test_an_odd_one_makes_nothing_ragged() -> None:
    assert settled_schema([_rows(5)] * 7 + [_rows(2)]) == _rows(5)
    assert settled_schema([_rows(5)] * 7 + [_rows(5, "<i2")]) == _rows(5)


def test_an_odd_one_among_samples_of_many_sizes_is_left_out() -> None:
    assert settled_schema([_rows(n) for n in range(1, 8)] + [_rows(1, "<i2")]) == RAGGED


def test_two_that_differ_in_size_are_ragged() -> None:
    assert settled_schema([_rows(5), _rows(6)]) == RAGGED


def test_of_what_is_fetched_together_one_visit_is_looked_at(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        noise = np.random.default_rng(0).random((2000, 500))
        file.create_dataset("x", data=noise, chunks=(100, 500))
    read: list[int] = []
    source = SourceConfig(url=(f"{tmp_path}/*.h5",), format="hdf5", options={"axis": 0})
    store = open_store(source, on_bytes=read.append)
    object_format = open_format("hdf5", {"axis": 0})
    sources = Sources([OpenSource(store, object_format)])
    prober = SchemaProbe(sources, GroupFiller(sources, None, 0, 4), 0, None)
    found = asyncio.run(prober.probe([*map(PartVisit, next(iter(store.pages())))]))
    assert found["measure"]["together"] == 100
    assert found["sample_bytes"] == 4000
    assert sum(read) < 1.2 * 100 * 4000


def test_what_cannot_be_one_schema_says_what_to_do() -> None:
    with pytest.raises(FormatError, match=r"sampling\.transform.*sampling\.schema"):
        settled_schema([_rows(5), _rows(5, "<i2")])


def test_large_objects_are_not_all_fetched_to_look_at_them() -> None:
    def objects(size: int) -> list[PartVisit]:
        return [PartVisit(Entry(str(i), size, None, None)) for i in range(16)]

    assert len(probed_together(objects(100), lambda _: True)) == PROBE_OBJECTS
    assert len(probed_together(objects(PROBE_BYTES // 2), lambda _: True)) == 3
    assert len(probed_together(objects(PROBE_BYTES + 1), lambda _: True)) == 1
    assert len(probed_together(objects(PROBE_BYTES + 1), lambda _: False)) == PROBE_OBJECTS


def probed(
    folder: Path, arrays: Sequence[Array], transform: str | None = None, **options: Any
) -> Message:
    """What is found out about objects with these arrays, in this order."""
    for number, array in enumerate(arrays):
        np.save(folder / f"{number:03d}.npy", array)
    store = open_store(SourceConfig(url=(f"{folder}/*.npy",)))
    objects = [PartVisit(entry) for page in store.pages() for entry in page]
    object_format = open_format("npy", options)
    code = load_transform(transform, {}, 0)
    sources = Sources([OpenSource(store, object_format)])
    filler = GroupFiller(sources, code, 0, 4)

    async def probe() -> Message:
        try:
            return await SchemaProbe(sources, filler, 0, None).probe(objects)
        finally:
            await store.close()

    return asyncio.run(probe())


def test_sizes_are_those_of_objects_that_fit(tmp_path: Path) -> None:
    odd = np.zeros((50, 3), np.int16)
    found = probed(tmp_path, [odd, *[np.zeros((50, 8), "<f4")] * 7], axis=0)
    assert str(Schema.from_json(found["schema"])) == "x: float32[8]"
    assert (found["measure"]["stride_bytes"], found["sample_bytes"]) == (32, 32)


def test_rows_of_objects_that_differ_in_shape_are_ragged(tmp_path: Path) -> None:
    found = probed(tmp_path, [np.zeros((9, n), "<f4") for n in (3, 4, 5, 6)], axis=0)
    assert str(Schema.from_json(found["schema"])) == "x: float32[?]"


def test_what_differs_too_much_names_two_objects(tmp_path: Path) -> None:
    found = probed(tmp_path, [np.zeros(2, "<f4"), np.zeros(2, "<f4"), np.zeros(2, "<i4")])
    assert "000.npy and " in found["mixed"]
    assert "002.npy: samples with" in found["mixed"]


def test_many_samples_of_few_objects_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuts.py").write_text(
        "def late(sample, origin):\n"
        "    return {'x': sample['x'][:origin.start % 3]} if origin.start > 40 else None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probed(tmp_path, [np.zeros((50, 8), "<f4")], "cuts:late", axis=0)
    assert str(Schema.from_json(found["schema"])) == "x: float32[?]"


def test_objects_without_samples_are_no_failures(tmp_path: Path) -> None:
    (tmp_path / "zz.npy").write_bytes(b"text")
    found = probed(tmp_path, [np.zeros((0, 8), "<f4")] * 3, axis=0)
    assert (len(found["errors"]), found["passed_over"]) == (4, 3)
    assert "zz.npy: expected an .npy file" in found["errors"][0]
    assert found["errors"][1].endswith(
        "000.npy: it holds no sample: expected at least 1 values along axis 0, found 0 (GC301)"
    )
