"""Which arrays of a Zarr group are fields, how they are named, and whose chunks own the samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.config_source import SourceConfig
from growcache.errors import ConfigError
from growcache.formats import open_format
from growcache.formats.base import Visit
from growcache.formats.grids import ArrayGrid, AxisGrid
from growcache.formats.zarr import ZarrFormat
from growcache.formats.zarr_group import GroupArray, agreeing_arrays
from growcache.formats.zarr_metadata import zarr_metadata
from growcache.schema import Sample
from growcache.store.contract import StoredObject
from growcache.store.opening import open_store

pytest.importorskip("numcodecs")
zarr = pytest.importorskip("zarr")

ROWS = 20


def write(
    path: Path, version: int, arrays: dict[str, tuple[int, ...]], *, consolidated: bool = True
) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, shape in arrays.items():
        array = group.create_array(name, shape=shape, chunks=(8, *shape[1:]), dtype="i4")
        array[:] = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    if consolidated:
        zarr.consolidate_metadata(path)


def opened(**options: Any) -> ZarrFormat:
    found = open_format("zarr", {"window": 4, **options})
    assert isinstance(found, ZarrFormat)
    return found


def all_samples(url: str, object_format: ZarrFormat) -> list[tuple[Sample, int, int]]:
    store = open_store(SourceConfig(url=(url,)))

    async def read() -> list[tuple[Sample, int, int]]:
        found = []
        for page in store.pages():
            for entry in page:
                found += await object_format.read(StoredObject(store, entry), Visit(0, 1, 0, 0))
        await store.close()
        return found

    return sorted(asyncio.run(read()), key=lambda one: one[1])


def fields(url: str, object_format: ZarrFormat) -> list[str]:
    """The names of the fields, which all samples have; each window comes once."""
    found = all_samples(url, object_format)
    assert [start for _, start, _ in found] == list(range(0, ROWS, 4))
    (names,) = {tuple(sample) for sample, _, _ in found}
    return list(names)


ARRAYS = {"labels": (ROWS,), "lat": (7,), "signal": (ROWS, 3), "times": (ROWS,)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [2, 3])
def test_arrays_of_equal_length_are_fields(tmp_path: Path, version: int) -> None:
    write(tmp_path / "a.zarr", version, ARRAYS)
    everything, own = f"{tmp_path}/a.zarr/**", f"{tmp_path}/a.zarr/signal/**"
    assert fields(everything, opened()) == ["signal", "labels", "times"]
    assert fields(everything, opened(name="x")) == ["x", "labels", "times"]
    assert fields(everything, opened(datasets=["labels", "times"])) == ["labels", "times"]
    assert fields(everything, opened(datasets={"y": "labels", "x": "signal"})) == ["x", "y"]
    # What the URL does not name is no field unless it is asked for.
    assert fields(own, opened()) == ["signal"]
    assert fields(own, opened(beside=["labels"])) == ["signal", "labels"]
    assert fields(own, opened(datasets=["labels", "signal"])) == ["signal", "labels"]
    sample, start, stop = all_samples(everything, opened())[2]
    for name in ("signal", "labels"):
        stored = zarr.open_array(tmp_path / "a.zarr" / name, mode="r")[start:stop]
        np.testing.assert_array_equal(sample[name], stored)


@pytest.mark.filterwarnings("ignore")
def test_a_cache_that_exists_keeps_its_fields(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", 3, ARRAYS)
    kept = opened()
    kept.follow_fields(["labels"])
    assert fields(f"{tmp_path}/a.zarr/**", kept) == ["labels"]
    zarr.create_array(tmp_path / "b.zarr", shape=(ROWS,), chunks=(8,), dtype="i4")[:] = 1
    kept = opened()
    kept.follow_fields(["b.zarr", "label"])
    assert fields(f"{tmp_path}/b.zarr/**", kept) == ["b.zarr"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [2, 3])
def test_arrays_that_are_stores_of_their_own_have_one_name(
    tmp_path: Path, version: int
) -> None:
    for folder in ("a.zarr", "b.ZARR", "plain"):
        given = {"shape": (ROWS,), "chunks": (8,), "dtype": "i4", "zarr_format": version}
        zarr.create_array(tmp_path / folder, **given)[:] = 1
        assert fields(f"{tmp_path}/{folder}/**", opened()) == ["x"]
        assert fields(f"{tmp_path}/{folder}/**", opened(name="ecg")) == ["ecg"]
    write(tmp_path / "group", version, {"signal": (ROWS,)}, consolidated=False)
    assert fields(f"{tmp_path}/group/signal/**", opened()) == ["signal"]


def test_dimensions_that_have_names_agree_by_them() -> None:
    def array(*shape: int, names: tuple[str, ...] = ()) -> GroupArray:
        document = {
            "zarr_format": 2, "shape": list(shape), "chunks": list(shape), "dtype": "<f4",
            "order": "C", "fill_value": 0, "compressor": None, "filters": None,
        }  # fmt: skip
        return GroupArray(zarr_metadata(document, 2), names)

    found = {
        "lat": array(24, names=("lat",)),
        "t2m": array(24, 24, names=("time", "lat")),
        "time": array(24, names=("time",)),
        "quality": array(24),
    }
    rows = ArrayGrid(((0, AxisGrid(4, 4)),))
    assert agreeing_arrays(rows, found) == ["t2m", "quality", "time"]
    columns = ArrayGrid(((1, AxisGrid(4, 4)),))
    assert agreeing_arrays(columns, found) == ["t2m"]
    assert agreeing_arrays(ArrayGrid(((3, AxisGrid(4, 4)),)), found) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"datasets": ["x"], "beside": ["y"]}, "leave out one of the two"),
        ({"datasets": ["x"], "name": "y"}, "give names themselves"),
        ({"name": 3}, "the name of the field"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(**options)
