"""MAT-files and NetCDF 3, which functions of growcache read with SciPy."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values


def write_mat(folder: Path, **settings: Any) -> None:
    for i in range(2):
        eeg = (np.arange(400).reshape(4, 100) + i).astype("f4")
        held = {
            "eeg": eeg,
            "rate": 100 + i,
            "subject": f"s{i}",
            "cells": np.array([1, "a"], object),
        }
        import_module("scipy.io").savemat(folder / f"{i}.mat", held, **settings)


def by_loadmat(place: Place, window: int | None = None) -> Values:
    found = import_module("scipy.io").loadmat(place.path)
    if window is not None:
        start = place.start * window  # an origin counts what the function yields
        return {"eeg": found["eeg"][:, start : start + window]}
    rate = found["rate"].reshape(())
    return {"eeg": found["eeg"], "rate": rate, "subject": str(found["subject"].item())}


def write_netcdf(folder: Path) -> None:
    xr = import_module("xarray")
    for i in range(2):
        values = np.arange(60, dtype="f8").reshape(12, 5) / 4 + i
        values[3, 2] = np.nan
        packed = {"dtype": "i2", "scale_factor": 0.25, "add_offset": 1.0, "_FillValue": -1}
        xr.Dataset({"t2m": (("time", "x"), values)}).to_netcdf(
            folder / f"{i}.nc",
            format="NETCDF3_CLASSIC",
            engine="scipy",
            encoding={"t2m": packed},
        )


def by_xarray(place: Place, *, scale: bool) -> Values:
    xr = import_module("xarray")
    with xr.open_dataset(place.path, engine="scipy", mask_and_scale=scale) as found:
        return {"t2m": found["t2m"].values[place.start].astype("f8" if scale else "i2")}


MAT, NETCDF = "growcache.readers:mat", "growcache.readers:netcdf3"
_NEEDS = ("scipy", "xarray")
CASES = [
    Case("scipy.io.savemat", "MAT 5", MAT, write_mat, by_loadmat, 2, needs=("scipy",)),
    Case("scipy.io.savemat", "MAT 5, compressed", MAT, partial(write_mat, do_compression=True),
         partial(by_loadmat, window=25), 8, {"variables": ["eeg"], "axis": 1, "window": 25}, needs=("scipy",)),
    Case("xarray.to_netcdf", "NETCDF3_CLASSIC", NETCDF, write_netcdf, partial(by_xarray, scale=False), 24,
         {"variables": ["t2m"], "axis": 0}, needs=_NEEDS),
    Case("xarray.to_netcdf", "NETCDF3_CLASSIC", NETCDF, write_netcdf, partial(by_xarray, scale=True), 24,
         {"variables": ["t2m"], "axis": 0, "scale": True}, needs=_NEEDS),
]  # fmt: skip
