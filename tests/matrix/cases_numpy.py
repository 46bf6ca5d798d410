"""Files that NumPy writes: .npy, .npz, and values without a header."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

SHAPE = (12, 40)


def values(dtype: str, shape: tuple[int, ...] = SHAPE, first: int = 0) -> Any:
    return (np.arange(first, first + np.prod(shape)) % 120).reshape(shape).astype(dtype)


def save(folder: Path, dtype: str, order: str = "C", shape: tuple[int, ...] = SHAPE) -> None:
    for i in range(2):
        np.save(folder / f"{i}.npy", np.asarray(values(dtype, shape, i), order=order))  # type: ignore[call-overload]


def whole(place: Place) -> Values:
    return {"x": np.load(place.path)}


def rows(place: Place, axis: int = 0) -> Values:
    array = np.moveaxis(np.load(place.path), axis, 0)
    return {"x": np.moveaxis(array[place.start : place.stop], 0, axis)}


def row(place: Place, axis: int = 0) -> Values:
    return {"x": np.take(np.load(place.path), place.start, axis)}


def _npy(
    holds: str,
    samples: int,
    expected: Any,
    dtype: str = "<f4",
    order: str = "C",
    **options: Any,
) -> Case:
    return Case(
        "numpy.save",
        holds,
        "npy",
        partial(save, dtype=dtype, order=order),
        expected,
        samples,
        options,
    )


NPY = [
    *(
        _npy(f"{dtype} [12, 40]", 2, whole, dtype)
        for dtype in ("<f4", ">f8", "|i1", ">i2", "<u4", "<c8", "|b1", "<f2")
    ),
    _npy("<f4 [12, 40]", 24, row, axis=0),
    _npy("<f4 [12, 40], Fortran order", 24, row, order="F", axis=0),
    _npy("<f4 [12, 40], channels by time", 8, partial(rows, axis=1), axis=1, window=10),
    _npy("<f4 [12, 40], channels by time in Fortran order", 8, partial(rows, axis=1), order="F", axis=1, window=10),
    _npy(">i2 [12, 40]", 14, partial(rows, axis=1), ">i2", axis=1, window=10, stride=5),
]  # fmt: skip
CASES = NPY
