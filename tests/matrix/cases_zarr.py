"""Arrays that zarr writes, in both versions, some chunks of which were never written."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

SHAPE = (96, 6)
STORED: dict[str, dict[str, Any]] = {
    "version 3": {"chunks": (8, 3)},
    "version 3, shards": {"chunks": (4, 3), "shards": (16, 6)},
    "version 3, big-endian int16": {"chunks": (8, 6), "dtype": ">i2"},
    "version 2": {"chunks": (8, 3), "zarr_format": 2},
    "version 2, Fortran order": {"chunks": (8, 6), "zarr_format": 2, "order": "F"},
}


def write(folder: Path, sparse: bool, **settings: Any) -> None:
    import zarr

    given = {"dtype": "<f4", "fill_value": -3, "name": "x", **settings}
    array = zarr.create_array(folder / "a.zarr", shape=SHAPE, **given)
    values = np.arange(96 * 6).reshape(SHAPE)
    for start in range(0, 96, 16):
        if not sparse or start % 48:
            array[start : start + 16] = values[start : start + 16]


def cut(place: Place, axis: int = 0) -> Values:
    import zarr

    folder = next(path for path in place.path.parents if path.suffix == ".zarr")
    array = np.moveaxis(np.asarray(zarr.open_array(folder / "x", mode="r")[:]), axis, 0)
    return {"x": np.moveaxis(array[place.start : place.stop], 0, axis)}


def _case(holds: str, sparse: bool, samples: int, along: int = 0, **options: Any) -> Case:
    return Case(
        "zarr.create_array",
        f"{holds}, a third of it never written" if sparse else holds,
        "zarr",
        partial(write, sparse=sparse, **STORED[holds]),
        partial(cut, axis=along),
        samples,
        options,
        url="a.zarr/**",
        needs=("zarr", "numcodecs"),
    )


CASES = [
    *(_case(holds, False, 24, window=4) for holds in STORED),
    *(_case(holds, True, 24, window=4) for holds in STORED),
    _case("version 3", True, 31, window=6, stride=3),
    _case("version 2", True, 3, 1, axis=1, window=2),
]
