"""What every object format must do, whatever it decodes."""

from __future__ import annotations

import asyncio
import gzip
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.errors import (
    AccessError,
    GrowcacheError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.formats import FORMATS, open_format
from growcache.formats.base import ObjectFormat
from growcache.schema import Schema
from tests.formats import lmdb_built, test_tar, test_tfrecord
from tests.formats.held import Held, Row, visited
from tests.formats.test_images import encoded

MODULE = """
import io
import numpy as np

def decode(data):
    return {"x": np.load(io.BytesIO(data)).sum(), "text": "é"}

def value(data, key):
    return {"x": np.frombuffer(data, "u1").sum(), "key": key}

def record(data):
    return {"n": len(data)}

def read(object, rng):
    with object.open() as file:
        values = np.load(file)
    for row in values:
        yield {"x": row, "note": object.key, "noise": rng.random(2)}

def sample(store, rng):
    with store.open("beside") as file:
        return {"x": rng.permutation(np.load(file))[0]}
"""
MODULE_NAME = "conforming_user_formats"


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(60, dtype=">i4").reshape(12, 5))
    return file.getvalue()


def hdf5() -> bytes:
    h5py = pytest.importorskip("h5py")
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        values = np.arange(60, dtype=">i4").reshape(12, 5)
        opened.create_dataset("x", data=values, chunks=(4, 3), compression="gzip", shuffle=True)
        opened.create_dataset("note", data=[f"é{n}" for n in range(12)], chunks=(5,))
    return file.getvalue()


def json_lines() -> bytes:
    return b"".join(b'{"n": %d, "x": [0.5, %d], "t": "a"}\r\n' % (n, n) for n in range(12))


def parquet() -> bytes:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    columns = {"x": np.arange(12, dtype="f4"), "note": [f"é{n}" for n in range(12)]}
    pq.write_table(pa.table(columns), file, row_group_size=5)
    return file.getvalue()


def zarr_chunk() -> bytes:
    return gzip.compress(np.arange(60, dtype=">i4").tobytes(), mtime=0)


ZARR = {
    "folder/k/zarr.json": b"""{"zarr_format": 3, "node_type": "array", "shape": [12, 5],
    "data_type": "int32", "fill_value": 0, "chunk_key_encoding": {"name": "default"},
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [12, 5]}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "gzip"}]}"""
}


def records() -> bytes:
    return test_tfrecord.file(
        [test_tfrecord.example({"n": n, "x": [0.5, 1.0], "b": b"a" * n}) for n in range(12)]
    )


def archive() -> bytes:
    files = [(f"d/{n}.{ext}", b"%d" % n) for n in range(12) for ext in ("cls", "json", "bin")]
    return test_tar.archive([("d", b"no sample"), *files])


@dataclass(frozen=True)
class Case:
    """A format, and an object that it reads."""

    form: str
    options: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], bytes] = npy
    key: str = "folder/k"
    others: dict[str, bytes] = field(default_factory=dict)

    def open(self) -> ObjectFormat:
        return open_format(self.form, self.options)

    def held(self, **more: Any) -> Held:
        return self.of(self.data(), **more)

    def of(self, data: bytes, **more: Any) -> Held:
        return Held(data, self.key, {"beside": data, **self.others}, **more)


def npz(save: Callable[..., None] = np.savez) -> bytes:
    file = io.BytesIO()
    save(file, x=np.arange(60, dtype=">i4").reshape(12, 5), y=np.arange(12.0))
    return file.getvalue()


RAW = {"dtype": "<i2", "shape": [5]}
CASES = {
    "npy": Case("npy"),
    "npy rows": Case("npy", {"axis": 0}),
    "npy windows": Case("npy", {"window": 3, "stride": 2, "phase": "random"}),
    "raw": Case("raw", RAW),
    "raw windows": Case("raw", {**RAW, "window": 4, "edge": "pad"}),
    "bytes": Case("bytes"),
    "bytes decoded": Case("bytes", {"decode": f"{MODULE_NAME}:decode"}),
    "image": Case("image", {}, lambda: encoded("PNG")),
    "image decoded": Case("image", {"decode": True}, lambda: encoded("JPEG", (40, 30))),
    "image webp": Case(
        "image", {"decode": True, "classes": ["folder"]}, lambda: encoded("WEBP")
    ),
    "hdf5": Case("hdf5", {"datasets": "x"}, hdf5),
    "hdf5 rows": Case("hdf5", {"datasets": ["x", "note"], "axis": 0}, hdf5),
    "hdf5 windows": Case(
        "hdf5", {"datasets": "x", "window": 3, "stride": 2, "phase": "random"}, hdf5
    ),
    "lmdb": Case("lmdb", {"key": "bytes"}, lmdb_built.small),
    "lmdb decoded": Case("lmdb", {"decode": f"{MODULE_NAME}:value"}, lmdb_built.small),
    "jsonl": Case("jsonl", {}, json_lines),
    "jsonl raw": Case("jsonl", {"raw": True}, json_lines),
    "jsonl compressed": Case(
        "jsonl", {"compression": "gzip"}, lambda: gzip.compress(json_lines(), mtime=0)
    ),
    "parquet": Case("parquet", {}, parquet),
    "npz": Case("npz", {}, npz),
    "npz fields": Case("npz", {"fields": ["y"]}, lambda: npz(np.savez_compressed)),
    "npz rows": Case("npz", {"axis": 0}, npz),
    "npz windows": Case("npz", {"window": 3, "stride": 2, "phase": "random"}, npz),
    "npz rows, whole": Case(
        "npz", {"axis": 0, "read": "whole"}, lambda: npz(np.savez_compressed)
    ),
    "zarr": Case("zarr", {"axis": 0}, zarr_chunk, "folder/k/c/0/0", ZARR),
    "zarr windows": Case(
        "zarr",
        {"window": 3, "stride": 2, "phase": "random"},
        zarr_chunk,
        "folder/k/c/0/0",
        ZARR,
    ),
    "tar": Case("tar", {}, archive),
    "tar index": Case("tar", {"fields": ["cls"], "index": True}, archive),
    "tar compressed": Case(
        "tar", {"compression": "gzip"}, lambda: gzip.compress(archive(), mtime=0)
    ),
    "tar decoded": Case("tar", {"decode": f"{MODULE_NAME}:record"}, archive),
    "tfrecord": Case("tfrecord", {}, records),
    "tfrecord index": Case("tfrecord", {"decode": "none", "index": True}, records),
    "tfrecord compressed": Case(
        "tfrecord", {"compression": "gzip"}, lambda: gzip.compress(records(), mtime=0)
    ),
    "tfrecord decoded": Case("tfrecord", {"decode": f"{MODULE_NAME}:record"}, records),
    "user read": Case(f"{MODULE_NAME}:read"),
    "user sample": Case(f"{MODULE_NAME}:sample"),
}


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("user")
    (folder / f"{MODULE_NAME}.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop(MODULE_NAME, None)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def parts_of(form: ObjectFormat, held: Held) -> int:
    return 1 if form.listed else asyncio.run(form.measure(held)).samples


def same(ones: list[Row], others: list[Row]) -> bool:
    return [row[1:] for row in ones] == [row[1:] for row in others] and all(
        one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)
        for (one, *_), (other, *_) in zip(ones, others, strict=True)
    )


def test_every_format_is_here() -> None:
    assert {case.form for case in CASES.values() if ":" not in case.form} == set(FORMATS)


def test_a_visit_is_a_function_of_its_place(case: Case) -> None:
    form, held = case.open(), case.held()
    parts = parts_of(form, held)
    for round in (0, 3):
        first = visited(form, held, 0, parts, round=round, seed=1)
        assert first
        assert same(first, visited(form, held, 0, parts, round=round, seed=1))
        assert same(first, visited(case.open(), case.held(), 0, parts, round=round, seed=1))


def test_samples_are_what_can_be_cached_and_origins_are_ranges(case: Case) -> None:
    form, held = case.open(), case.held()
    found = visited(form, held, 0, parts_of(form, held))
    schemas = {str(Schema.of(sample)) for sample, _, _ in found}
    assert len(schemas) == 1
    for sample, start, stop in found:
        assert 0 <= start < stop
        for value in sample.values():
            if isinstance(value, np.ndarray):
                assert value.dtype == value.dtype.newbyteorder("<")
                assert value.flags.c_contiguous
            else:
                assert isinstance(value, bytes | str | np.generic)


def test_the_parts_of_an_object_are_its_samples(case: Case) -> None:
    form, held = case.open(), case.held()
    if not form.listed:
        ends = [
            start for part in range(3) for _, start, _ in visited(form, held, part, 1 << 40)
        ]
        assert ends == [0, 1, 2]
        return
    whole = visited(form, held)
    assert asyncio.run(form.measure(held)).samples == len(whole)
    for parts in (2, 3, 7) if form.ranged else ():
        pieces = [row for part in range(parts) for row in visited(form, held, part, parts)]
        assert same(whole, pieces)


def test_some_of_an_object_are_some_of_its_samples(case: Case) -> None:
    form, held = case.open(), case.held()
    if not form.listed:
        return
    whole = {row[1:]: row for row in visited(form, held)}
    some = visited(form, held, take=2)
    assert len(some) == min(2, len(whole))
    if form.ranged:
        assert same(some, [whole[row[1:]] for row in some])


@pytest.mark.parametrize(
    "failure",
    [TransientStoreError("503"), ObjectMissingError("gone"), ObjectChangedError("new"),
     AccessError("no")],
)  # fmt: skip
def test_a_store_that_fails(case: Case, failure: StoreError) -> None:
    form = case.open()
    if not form.listed:
        return  # what it reads are other objects; see test_user_formats
    with pytest.raises(GrowcacheError) as caught:
        visited(form, case.held(failures=[failure]))
    assert isinstance(failure, TransientStoreError) == isinstance(
        caught.value, TransientStoreError
    )
    assert str(failure) in str(caught.value)
    assert same(visited(form, case.held()), visited(case.open(), case.held()))  # no harm done


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_object_is_a_hole_or_a_sample_and_nothing_else(
    case: Case, data: st.DataObject
) -> None:
    sound = case.data()
    cut = data.draw(st.one_of(st.just(len(sound)), st.integers(0, len(sound))))
    damaged = bytearray(sound[:cut])
    for at in data.draw(st.lists(st.integers(0, max(0, cut - 1)), max_size=4)):
        if damaged:
            damaged[at] ^= data.draw(st.integers(1, 255))
    form = case.open()
    held = case.of(bytes(damaged))
    refused = ""
    try:
        found = visited(form, held, 0, 1 if form.listed else 1 << 40)
        for sample, _, _ in found:
            Schema.of(sample)
    except GrowcacheError as error:
        refused = str(error)
    assert "\n" not in refused


def test_what_is_no_object_of_the_format(tmp_path: Path) -> None:
    for name, case in CASES.items():
        for text in (b"", b"<Error><Code>NoSuchKey</Code></Error>", bytes(200)):
            form = case.open()
            held = case.of(text)
            anything = name.startswith("raw") or name in ("bytes", "jsonl raw")
            if anything or (
                name.startswith(("jsonl", "tfrecord")) and not text
            ):  # no lines, no samples
                visited(form, held)
                continue
            with pytest.raises(GrowcacheError, match=r"folder/k|draw 0"):
                visited(form, held, 0, 1 if form.listed else 1 << 40)
