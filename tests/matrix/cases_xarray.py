"""Packed arrays that xarray writes as netCDF4 and Zarr, and NWB files, as their libraries decode them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

ROWS = 24
ENCODINGS: dict[str, dict[str, Any]] = {
    "int16, scale and offset": {
        "dtype": "int16", "scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -32768,
    },
    "int16, scale and offset of float32": {
        "dtype": "int16", "scale_factor": np.float32(0.25), "add_offset": np.float32(280),
        "_FillValue": -32768,
    },
    "int16, scale only": {"dtype": "int16", "scale_factor": np.float32(0.5), "_FillValue": -1},
    "int32, offset only": {"dtype": "int32", "add_offset": 250.0, "_FillValue": -9999},
    "uint8, no fill value": {"dtype": "uint8", "scale_factor": 0.5, "add_offset": 240.0},
    "float32 with a fill value": {"dtype": "float32", "_FillValue": np.float32(-999)},
    "missing_value": {"dtype": "int16", "missing_value": -5, "scale_factor": 0.5},
    "unsigned in int8": {
        "dtype": "int8", "_Unsigned": "true", "scale_factor": 2.0, "_FillValue": -1,
    },
}  # fmt: skip


def dataset(encoding: Mapping[str, Any]) -> Any:
    import xarray as xr

    values = 260 + np.arange(ROWS * 4 * 5).reshape(ROWS, 4, 5) % 40 / 2
    if "_FillValue" in encoding or "missing_value" in encoding:
        values[3, 1, 2] = values[20] = np.nan
    found = xr.Dataset({"t2m": (("time", "lat", "lon"), values.astype("f4"))})
    return found.assign_coords(lat=np.arange(4.0), lon=np.arange(5.0))


def write_netcdf(folder: Path, engine: str, encoding: Mapping[str, Any]) -> None:
    own = {"chunksizes": (8, 4, 5), "zlib": True, **encoding}
    for name in ("a.nc", "b.nc"):
        dataset(encoding).to_netcdf(folder / name, engine=engine, encoding={"t2m": own})


def write_zarr(folder: Path, version: int, encoding: Mapping[str, Any]) -> None:
    own = {"chunks": (8, 4, 5), **encoding}
    dataset(encoding).to_zarr(
        folder / "a.zarr", zarr_format=version, encoding={"t2m": own}, consolidated=False
    )


def window(place: Place, engine: str | None = None, *, scaled: bool = True) -> Values:
    import xarray as xr

    if engine is None:  # a chunk below the array t2m
        path = next(one for one in place.path.parents if one.suffix == ".zarr")
        opened = xr.open_zarr(
            path, consolidated=False, decode_times=False, mask_and_scale=scaled
        )
    else:
        opened = xr.open_dataset(
            place.path, engine=engine, decode_times=False, mask_and_scale=scaled
        )
    with opened:
        return {"t2m": np.asarray(opened["t2m"][place.start : place.stop].values)}


def _netcdf(engine: str, holds: str, encoding: Mapping[str, Any], scale: str = "cf") -> Case:
    return Case(
        f"xarray.to_netcdf, {engine}",
        holds,
        "hdf5",
        partial(write_netcdf, engine=engine, encoding=encoding),
        partial(window, engine=engine, scaled=scale == "cf"),
        2 * ROWS // 4,
        {"datasets": ["t2m"], "window": 4, "scale": scale},
        needs=("xarray", "h5py", "netCDF4" if engine == "netcdf4" else "h5netcdf"),
    )


def _zarr(version: int, holds: str, encoding: Mapping[str, Any], scale: str = "cf") -> Case:
    return Case(
        f"xarray.to_zarr, version {version}",
        holds,
        "zarr",
        partial(write_zarr, version=version, encoding=encoding),
        partial(window, scaled=scale == "cf"),
        ROWS // 4,
        {"window": 4, "scale": scale},
        url="a.zarr/t2m/**",
        needs=("xarray", "zarr"),
    )


def write_group(folder: Path, version: int) -> None:
    """All that xarray writes for a variable with coordinates, one of which is as long as another."""
    import xarray as xr

    values = np.arange(ROWS * ROWS * 3, dtype="f4").reshape(ROWS, ROWS, 3)
    variables = {
        "t2m": (("time", "lat", "lon"), values),
        "cover": (("time", "lat", "lon"), values.astype("i2")),
    }
    axes = {"time": np.arange(ROWS), "lat": np.arange(float(ROWS)), "lon": np.arange(3.0)}
    found = xr.Dataset(variables).assign_coords(axes).chunk(time=8)
    found.to_zarr(folder / "a.zarr", zarr_format=version, consolidated=True)


def group_window(place: Place) -> Values:
    import xarray as xr

    path = next(one for one in place.path.parents if one.suffix == ".zarr")
    with xr.open_zarr(path, consolidated=False, mask_and_scale=False) as opened:
        rows = slice(place.start, place.stop)
        return {name: opened[name][rows].values for name in ("t2m", "cover", "time")}


def _group(version: int) -> Case:
    return Case(
        f"xarray.to_zarr, version {version}",
        "two variables and their coordinates",
        "zarr",
        partial(write_group, version=version),
        group_window,
        ROWS // 4,
        {"window": 4, "scale": "none"},
        url="a.zarr/**",
        needs=("xarray", "zarr", "dask"),
    )


def write_ome(folder: Path, version: str) -> None:
    from ome_zarr.format import format_from_version
    from ome_zarr.writer import write_image

    for name in ("a.zarr", "b.zarr"):
        image = np.arange(2 * 64 * 64, dtype="u2").reshape(2, 64, 64)
        write_image(image, str(folder / name), axes="cyx", fmt=format_from_version(version))


def ome_block(place: Place) -> Values:
    import zarr

    path = next(one for one in place.path.parents if one.suffix == ".zarr")
    image = np.asarray(zarr.open_array(path / "s0", mode="r")[:])
    first = np.unravel_index(place.start, image.shape)
    last = np.unravel_index(place.stop - 1, image.shape)
    within = (slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True))
    return {"s0": image[tuple(within)]}


def _ome(version: str) -> Case:
    return Case(
        f"ome_zarr.writer.write_image, {version}",
        "a multiscale image of two channels",
        "zarr",
        partial(write_ome, version=version),
        ome_block,
        8,
        {"window": [None, 32, 32]},
        url="*.zarr/s0/**",
        needs=("ome_zarr", "zarr"),
    )


def write_nwb(folder: Path, *, channels: bool) -> None:
    import pynwb
    from pynwb.ecephys import ElectricalSeries

    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    file = pynwb.NWBFile("a session", "an identifier", start)
    device = file.create_device("a device")
    group = file.create_electrode_group("a", description="b", location="c", device=device)
    for _ in range(4):
        file.add_electrode(location="c", group=group)
    region = file.create_electrode_table_region(list(range(4)), "all")
    data = np.arange(-80, 80, dtype="<i2").reshape(40, 4)
    more = {"channel_conversion": np.array([1.0, 2, 3, 4])} if channels else {}
    series = ElectricalSeries(
        "lfp", data, region, rate=10.0, conversion=1.95e-7, offset=0.5, **more
    )
    file.add_acquisition(series)
    with pynwb.NWBHDF5IO(folder / "a.nwb", "w") as io:
        io.write(file)


def nwb_window(place: Place) -> Values:
    import pynwb

    with pynwb.NWBHDF5IO(place.path, "r") as io:
        found = io.read().acquisition["lfp"].get_data_in_units()[place.start : place.stop]
    return {"x": np.asarray(found, np.float32)}


def _nwb(*, channels: bool) -> Case:
    return Case(
        "pynwb.NWBHDF5IO",
        "int16 with conversion and offset" + (" of each channel" if channels else ""),
        "hdf5",
        partial(write_nwb, channels=channels),
        nwb_window,
        4,
        {"datasets": {"x": "acquisition/lfp/data"}, "window": 10, "scale": "cf"},
        needs=("pynwb",),
    )


CASES = [
    *(
        _netcdf(engine, holds, encoding)
        for engine in ("netcdf4", "h5netcdf")
        for holds, encoding in ENCODINGS.items()
    ),
    *(
        _zarr(version, holds, encoding)
        for version in (2, 3)
        for holds, encoding in ENCODINGS.items()
    ),
    _netcdf("netcdf4", "int16, as stored", ENCODINGS["int16, scale only"], "none"),
    _zarr(3, "int16, as stored", ENCODINGS["int16, scale only"], "none"),
    _group(2),
    _group(3),
    _ome("0.4"),
    _ome("0.5"),
    _nwb(channels=False),
    _nwb(channels=True),
]
