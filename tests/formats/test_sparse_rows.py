"""Rows of CSR matrices in HDF5 and Zarr, as AnnData writes them; slow tests compare with anndata."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.config_source import SourceConfig
from growcache.errors import ConfigError, FormatError
from growcache.formats import open_format
from growcache.formats.base import Visit
from growcache.schema import Array
from growcache.store.contract import StoredObject
from growcache.store.opening import open_store
from tests.formats.held import Held, Row, visited

h5py = pytest.importorskip("h5py")
pytest.importorskip("numcodecs")

RNG = np.random.default_rng(0)
MATRIX: Array = np.where(RNG.random((50, 30)) < 0.2, RNG.integers(1, 99, (50, 30)), 0).astype(
    "<f4"
)
MATRIX[[0, 7, 49]] = 0


def members(matrix: Array) -> dict[str, Array]:
    rows, columns = np.nonzero(matrix)
    pointers = np.searchsorted(rows, np.arange(len(matrix) + 1))
    return {
        "data": matrix[rows, columns],
        "indices": columns.astype("<i4"),
        "indptr": pointers.astype("<i4"),
    }


def h5ad(more: dict[str, Any] | None = None, **settings: Any) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        group = opened.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": MATRIX.shape})
        for name, values in {**members(MATRIX), **(more or {})}.items():
            group.create_dataset(name, data=values, **settings)
        opened["label"] = np.arange(50)
    return file.getvalue()


def read(data: bytes, **options: Any) -> list[Row]:
    return visited(open_format("hdf5", {"datasets": {"x": "X"}, **options}), Held(data))


@pytest.mark.parametrize("settings", [{}, {"chunks": (16,), "compression": "gzip"}])
def test_rows_are_dense(settings: dict[str, Any]) -> None:
    data = h5ad(**settings)
    found = read(data, axis=0, datasets={"x": "X", "y": "label"})
    assert [start for _, start, _ in found] == list(range(50))
    for sample, start, _ in found:
        np.testing.assert_array_equal(sample["x"], MATRIX[start])
        assert np.asarray(sample["x"]).dtype == np.float32
        assert sample["y"] == start
    for sample, start, stop in read(data, window=8, select={1: [3, 20]}):
        np.testing.assert_array_equal(sample["x"], MATRIX[start:stop, [3, 20]])


def test_rows_are_ragged() -> None:
    for sample, start, _ in read(h5ad(), axis=0, sparse="ragged"):
        assert sorted(sample) == ["x.data", "x.indices"]
        columns = np.asarray(sample["x.indices"])
        np.testing.assert_array_equal(columns, np.flatnonzero(MATRIX[start]))
        np.testing.assert_array_equal(sample["x.data"], MATRIX[start, columns])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"indptr": np.arange(51)[::-1]}, "indptr does not point to rows"),
        ({"indptr": np.full(51, 10**6)}, "indptr does not point to rows"),
        ({"indices": np.full(len(members(MATRIX)["data"]), 30)}, "a column beyond its 30"),
        ({"indptr": np.arange(9)}, "not a sparse matrix of"),
        ({"indptr": np.arange(51.0)}, "indices that are not integers"),
    ],
)
def test_matrices_that_cannot_be(more: dict[str, Any], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read(h5ad(more), axis=0)


def test_what_cannot_be_read_by_rows() -> None:
    with pytest.raises(FormatError, match="use axis: 0"):
        read(h5ad(), axis=1)
    with pytest.raises(ConfigError, match="use axis: 0"):
        open_format("hdf5", {"datasets": "X", "window": 4, "sparse": "ragged"})
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        opened.create_group("X").attrs["encoding-type"] = "csc_matrix"
    with pytest.raises(FormatError, match="tocsr"):
        read(file.getvalue(), axis=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("chunk", [16, 17, 1000])
def test_chunks_of_values_own_the_rows_that_begin_in_them(
    tmp_path: Path, version: int, chunk: int
) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    matrix = group.create_group("X")
    matrix.attrs.update({"encoding-type": "csr_matrix", "shape": list(MATRIX.shape)})
    for name, values in {"label": np.arange(50), **members(MATRIX)}.items():
        into = group if name == "label" else matrix
        into.create_array(name, shape=values.shape, chunks=(chunk,), dtype=values.dtype)[:] = (
            values
        )
    options: dict[str, Any] = {"datasets": {"x": "X", "y": "label"}, "axis": 0}
    for pattern in ("**", "X/data/**"):
        found = stored_samples(f"{tmp_path}/a.zarr/{pattern}", options)
        assert [start for _, start, _ in found] == list(range(50))
        for sample, start, _ in found:
            np.testing.assert_array_equal(sample["x"], MATRIX[start])
            assert sample["y"] == start
    ragged = stored_samples(f"{tmp_path}/a.zarr/**", {**options, "sparse": "ragged"})
    for sample, start, _ in ragged:
        np.testing.assert_array_equal(sample["x.indices"], np.flatnonzero(MATRIX[start]))
    windows = {**options, "axis": None, "window": 7, "stride": 3}
    for sample, start, stop in stored_samples(f"{tmp_path}/a.zarr/**", windows):
        np.testing.assert_array_equal(sample["x"], MATRIX[start:stop])


def stored_samples(url: str, options: dict[str, Any]) -> list[Row]:
    store = open_store(SourceConfig(url=(url,)))
    object_format = open_format("zarr", options)

    async def read() -> list[Row]:
        found: list[Row] = []
        for page in store.pages():
            for entry in page:
                reader = StoredObject(store, entry)
                rows = await object_format.read(reader, Visit(0, 1, 0, 0))
                assert (await object_format.measure(reader)).samples == len(rows)
                found += rows
        await store.close()
        return found

    return sorted(asyncio.run(read()), key=lambda row: row[1])
