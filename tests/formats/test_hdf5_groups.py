"""HDF5 files in which each group is a sample, datasets of text, and netCDF's bare dimensions."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from growcache.errors import ConfigError, FormatError
from growcache.formats import open_format
from growcache.formats.base import Visit
from growcache.schema import Sample
from tests.formats.held import Held, visited

h5py = pytest.importorskip("h5py")
pytest.importorskip("numcodecs")

DEMOS = 12


def hdf5(write: Callable[[Any], object]) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        write(opened)
    return file.getvalue()


def demos(folder: str = "") -> bytes:
    def write(file: Any) -> None:
        for n in range(DEMOS):
            group = file.create_group(f"{folder}demo_{n}")
            group["actions"] = np.full((n + 2, 7), n, "f4")
            group.create_dataset(
                "obs/image", data=np.full((n + 2, 4, 4), n, "u1"), chunks=(2, 4, 4),
                compression="gzip",
            )  # fmt: skip
            group["reward"] = float(n)
            group["task"] = f"task {n}"
            group["steps"] = [f"step {i}" for i in range(n)] or ["none"]

    return hdf5(write)


def read(data: bytes, **options: Any) -> list[tuple[Sample, int, int]]:
    return visited(open_format("hdf5", options), Held(data))


@pytest.mark.parametrize("folder", ["", "data/", "a/b/"])
def test_each_group_is_a_sample(folder: str) -> None:
    data = demos(folder)
    names = sorted(f"demo_{n}" for n in range(DEMOS))
    found = read(data, group=f"{folder}*")
    assert [(start, stop) for _, start, stop in found] == [(i, i + 1) for i in range(DEMOS)]
    with h5py.File(io.BytesIO(data)) as file:
        for sample, start, _ in found:
            group = file[folder + names[start]]
            assert sorted(sample) == ["actions", "obs.image", "reward", "task"]
            assert sample["task"] == group["task"].asstr()[()]
            for name in ("actions", "obs.image", "reward"):
                np.testing.assert_array_equal(sample[name], group[name.replace(".", "/")])


def test_parts_are_of_groups() -> None:
    data = Held(demos())
    object_format = open_format("hdf5", {"group": "*", "datasets": {"x": "obs/image"}})
    measure = asyncio.run(object_format.measure(data))
    assert measure.samples == DEMOS
    assert 1 < measure.together <= DEMOS
    starts = [
        start
        for part in range(5)
        for sample, start, _ in asyncio.run(object_format.read(data, Visit(part, 5, 0, 0)))
        if list(sample) == ["x"]
    ]
    assert starts == list(range(DEMOS))


@pytest.mark.parametrize(
    ("text", "names"),
    [(None, ["reward", "task"]), ("drop", ["reward"])],
)
def test_text_of_groups_is_kept_where_it_is_a_value(text: str | None, names: list[str]) -> None:
    def written(file: Any) -> None:
        file["a/reward"], file["a/task"], file["a/steps"] = 1.0, "pour", ["lift", "tilt"]

    ((sample, _, _),) = read(hdf5(written), group="*", text=text)
    assert sorted(sample) == names
    with pytest.raises(FormatError, match="steps is an array of strings"):
        read(hdf5(written), group="*", text="keep")


def test_text_among_datasets_of_one_length() -> None:
    def write(file: Any) -> None:
        file["x"], file["names"] = np.arange(8.0), [f"n{i}" for i in range(8)]

    data = hdf5(write)
    assert sorted(read(data, axis=0)[0][0]) == ["names", "x"]
    assert sorted(read(data, axis=0, text="drop")[0][0]) == ["x"]
    assert sorted(read(data, window=4)[0][0]) == ["x"]
    with pytest.raises(FormatError, match="text: drop"):
        read(data, window=4, text="keep")


def test_a_dimension_of_netcdf_without_values_is_no_field() -> None:
    def write(file: Any) -> None:
        file["t2m"] = np.arange(16.0).reshape(8, 2)
        for name, size in (("time", 8), ("lat", 2)):
            file.create_dataset(name, (size,), ">f4").make_scale(
                f"This is a netCDF dimension but not a netCDF variable.{size:10}"
            )

    assert list(read(hdf5(write), axis=0)[0][0]) == ["t2m"]


def test_what_is_no_group() -> None:
    data = demos("data/")
    with pytest.raises(FormatError, match="no group at 'other'"):
        read(data, group="other/*")
    for group in ("data", "*/*", 3, "**"):
        with pytest.raises(ConfigError, match="group: expected"):
            open_format("hdf5", {"group": group})
    with pytest.raises(ConfigError, match="leave out axis and window"):
        open_format("hdf5", {"group": "*", "window": 3})
    held = Held(hdf5(lambda file: file.create_group("data")))
    measure = asyncio.run(open_format("hdf5", {"group": "data/*"}).measure(held))
    assert (measure.samples, measure.empty) == (0, "no group at data/*")
