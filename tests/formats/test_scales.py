from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from growcache.errors import ConfigError, FormatError
from growcache.formats import open_format
from growcache.formats.scales import array_scale, scale_advice, zarr_attributes
from growcache.schema import Array
from tests.formats.held import Held, Row, visited

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

PACKED = np.arange(-60, 60, dtype="<i2").reshape(20, 6)
CF = {"scale_factor": np.float32(0.5), "add_offset": np.float32(10), "_FillValue": np.int16(7)}

# Stored dtype, attributes, the dtype that xarray decodes to, and what the stored 7 means.
CASES: list[tuple[str, dict[str, Any], str, float]] = [
    ("<i2", CF, "f4", np.nan),
    ("<i2", {"scale_factor": 0.5}, "f8", 3.5),
    ("<i2", {"scale_factor": np.float32(0.5)}, "f4", 3.5),
    ("<i2", {"scale_factor": np.float32(0.5), "add_offset": 1.0}, "f8", 4.5),
    ("<i4", {"scale_factor": np.float32(0.5), "add_offset": np.float32(1)}, "f8", 4.5),
    (">i2", {"add_offset": np.float32(1)}, "f8", 8.0),
    ("<i2", {"scale_factor": 2}, "i8", 14),
    ("<i2", {"scale_factor": 2, "missing_value": 7}, "f8", np.nan),
    ("<i2", {"_FillValue": np.int16(7)}, "f4", np.nan),
    ("<i4", {"missing_value": np.array([6, 7])}, "f8", np.nan),
    ("<f4", {"_FillValue": np.float32(7)}, "f4", np.nan),
    ("<f2", {"_FillValue": np.nan, "scale_factor": 2.0}, "f2", 14),
    ("|u1", {"_Unsigned": "false"}, "i1", 7),
    ("|i1", {"_Unsigned": b"true", "_FillValue": np.int8(7)}, "f4", np.nan),
    ("<i2", {"conversion": 1e-6, "offset": 1.0, "unit": "volts"}, "f4", 1 + 7e-6),
    ("<f8", {"conversion": 1e-6, "unit": "volts"}, "f8", 7 * 1e-6),
]


@pytest.mark.parametrize(("stored", "attributes", "dtype", "meant"), CASES)
def test_attributes_decide_dtype_and_values_as_xarray_has_them(
    stored: str, attributes: dict[str, Any], dtype: str, meant: float
) -> None:
    scale = array_scale(np.dtype(stored), attributes)
    assert scale is not None
    found = scale.apply(np.array([7], stored), (range(1),))
    assert found.dtype == scale.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, np.array([meant], dtype))
    assert "scale: cf" in scale_advice("x", np.dtype(stored), attributes)


@pytest.mark.parametrize(
    ("stored", "attributes"),
    [
        ("<i2", {}),
        ("<i2", {"_FillValue": np.nan}),
        ("<f4", {"_FillValue": np.nan}),
        ("<i2", {"conversion": 2.0}),  # without a unit: not NWB's
        ("<i2", {"conversion": 1.0, "offset": 0.0, "unit": "volts"}),
        ("|b1", {"_FillValue": True}),
    ],
)
def test_attributes_that_change_nothing_are_not_mentioned(
    stored: str, attributes: dict[str, Any]
) -> None:
    assert scale_advice("x", np.dtype(stored), attributes) == ""


def test_a_fill_value_of_the_other_sign_is_the_same_bits() -> None:
    scale = array_scale(np.dtype("i1"), {"_Unsigned": "true", "_FillValue": np.int8(-1)})
    assert scale is not None
    found = scale.apply(np.array([-1, -2], "i1"), (range(2),))
    np.testing.assert_array_equal(found, [np.nan, 254])


def test_zarr_writes_fill_values_in_its_own_ways() -> None:
    packed, real = np.dtype("<i2"), np.dtype("<f4")
    assert zarr_attributes({"_FillValue": 3}, packed, 2, np.int16(9)) == {"_FillValue": 9}
    assert zarr_attributes({"_FillValue": 3, "other": 1}, packed, 3, 0) == {"_FillValue": 3}
    coded = zarr_attributes({"_FillValue": "AAAAAAAA8D8="}, real, 3, 0)
    assert coded == {"_FillValue": 1.0}
    with pytest.raises(FormatError, match="base64"):
        zarr_attributes({"_FillValue": "nonsense"}, real, 3, 0)


def hdf5(attributes: Mapping[str, Any], channels: Array | None = None) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        data = opened.create_dataset("series/data", data=PACKED, chunks=(8, 3))
        data.attrs.update(attributes)
        if channels is not None:
            opened["series/channel_conversion"] = channels
    return file.getvalue()


def values(rows: list[Row]) -> Array:
    return np.concatenate([np.asarray(next(iter(sample.values()))) for sample, _, _ in rows])


MEANT = np.where(PACKED == 7, np.nan, PACKED * np.float32(0.5) + np.float32(10))


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": [4, 3]}])
def test_scaled_windows_of_hdf5(options: dict[str, Any]) -> None:
    options = {"datasets": {"x": "series/data"}, "scale": "cf", **options}
    for sample, start, _ in visited(open_format("hdf5", options), Held(hdf5(CF))):
        x = np.asarray(sample["x"])
        assert x.dtype == np.float32
        row, column = divmod(start, 6) if x.shape == (4, 3) else (start, 0)
        want = MEANT[row : row + x.shape[0], column : column + x.shape[1]]
        np.testing.assert_array_equal(x, want)


def test_the_factor_of_each_channel_of_nwb() -> None:
    channels = np.arange(1.0, 7.0)
    data = hdf5({"conversion": 0.5, "offset": 1.0, "unit": "volts"}, channels)
    options = {"datasets": {"x": "series/data"}, "scale": "cf", "window": [10, 2]}
    for sample, start, _ in visited(open_format("hdf5", options), Held(data)):
        row, column = divmod(start, 6)
        rows, columns = slice(row, row + 10), slice(column, column + 2)
        want = PACKED[rows, columns] * (0.5 * channels[columns]) + 1
        np.testing.assert_array_equal(sample["x"], want.astype(np.float32))
    wrong = Held(hdf5({"conversion": 0.5, "unit": "V"}, np.ones(5)))
    with pytest.raises(FormatError, match="a number for each of the channels"):
        visited(open_format("hdf5", options), wrong)


def zarr_objects(version: int, attributes: Mapping[str, Any]) -> dict[str, bytes]:
    held: dict[str, Any] = {}
    group = zarr.open_group(zarr.storage.MemoryStore(held), mode="w", zarr_format=version)
    array = group.create_array("x", shape=(20, 6), chunks=(8, 6), dtype="<i2", fill_value=7)
    array.attrs.update(attributes)
    array[:] = PACKED
    return {f"a.zarr/{key}": value.to_bytes() for key, value in held.items()}


@pytest.mark.parametrize("version", [2, 3])
def test_scaled_windows_of_zarr(version: int) -> None:
    attributes: dict[str, Any] = {"scale_factor": 0.5, "add_offset": 10.0}
    if version == 3:
        attributes["_FillValue"] = 7
    objects = zarr_objects(version, attributes)
    scaled = open_format("zarr", {"window": 4, "scale": "cf"})
    plain = open_format("zarr", {"window": 4})
    for key, data in objects.items():
        held = Held(data, key, objects)
        for sample, start, stop in visited(scaled, held):
            assert np.asarray(sample["x"]).dtype == np.float64
            np.testing.assert_array_equal(sample["x"], MEANT[start:stop])
        for sample, start, stop in visited(plain, held):
            np.testing.assert_array_equal(sample["x"], PACKED[start:stop])
    chunk = next(Held(data, key, objects) for key, data in objects.items() if key[-1] == "0")
    said = asyncio.run(plain.advice(chunk))
    assert "array a.zarr/x/ has scale_factor 0.5, add_offset 10.0, _FillValue 7" in said
    for setting in ("cf", "none"):
        quiet = open_format("zarr", {"window": 4, "scale": setting})
        assert asyncio.run(quiet.advice(chunk)) == ""


def test_zarr_metadata_may_hold_nan() -> None:
    objects = zarr_objects(2, {"scale_factor": 0.5})
    objects["a.zarr/x/.zattrs"] = json.dumps({"missing_value": float("nan")}).encode()
    held = Held(objects["a.zarr/x/0.0"], "a.zarr/x/0.0", objects)
    rows = visited(open_format("zarr", {"axis": 0, "scale": "cf"}), held)
    assert np.isnan(np.stack([np.asarray(sample["x"]) for sample, _, _ in rows])).sum() == 0


def test_a_scale_that_is_no_number_is_named() -> None:
    held = Held(hdf5({"scale_factor": "two"}))
    options = {"datasets": "series/data", "axis": 0}
    with pytest.raises(FormatError, match="one number as attribute scale_factor"):
        visited(open_format("hdf5", {**options, "scale": "cf"}), held)
    assert asyncio.run(open_format("hdf5", options).advice(held)) == ""
    with pytest.raises(ConfigError, match="cf or none"):
        open_format("hdf5", {**options, "scale": "netcdf"})
