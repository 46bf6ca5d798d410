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


def cube(place: Place) -> Values:
    array = np.load(place.path)
    first, last = (np.unravel_index(at, array.shape) for at in (place.start, place.stop - 1))
    return {"x": array[tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True))]}


BLOCKS = [
    Case("numpy.save", "<f4 [6, 8, 10] in blocks", "npy", partial(save, dtype="<f4", shape=(6, 8, 10)), cube, 16,
         {"window": [3, 4, 5]}),
    Case("numpy.save", "<u2 [6, 8, 10] in patches", "npy", partial(save, dtype="<u2", shape=(6, 8, 10)), cube, 8,
         {"window": [None, 4, 5]}),
    Case("numpy.save", "<f4 [6, 8, 10], Fortran order, in blocks", "npy",
         partial(save, dtype="<f4", order="F", shape=(6, 8, 10)), cube, 16, {"window": [3, 4, 5]}),
    Case("numpy.save", "<f4 [12, 40], some of the channels", "npy", partial(save, dtype="<f4"),
         lambda place: {"x": np.load(place.path)[[1, 5, 9], place.start : place.stop]}, 8,
         {"axis": 1, "window": 10, "select": {0: [1, 5, 9]}}),
]  # fmt: skip


def savez(folder: Path, *, compressed: bool = False) -> None:
    write = np.savez_compressed if compressed else np.savez
    for i in range(2):
        write(folder / f"{i}.npz", x=values("<f4", first=i), y=values("<i8", (12,), i))


def archive(place: Place) -> Values:
    with np.load(place.path) as found:
        return dict(found)


def archive_rows(place: Place, *, single: bool) -> Values:
    at: Any = place.start if single else slice(place.start, place.stop)
    return {name: array[at] for name, array in archive(place).items()}


NPZ = [
    Case("numpy.savez", "x <f4 [12, 40], y <i8 [12]", "npz", savez, archive, 2),
    Case("numpy.savez", "x <f4 [12, 40], y <i8 [12]", "npz", savez,
         partial(archive_rows, single=True), 24, {"axis": 0}),
    Case("numpy.savez", "x <f4 [12, 40], y <i8 [12]", "npz", savez,
         partial(archive_rows, single=False), 6, {"window": 4}),
    Case("numpy.savez_compressed", "x <f4 [12, 40], y <i8 [12]", "npz", partial(savez, compressed=True), archive, 2),
    Case("numpy.savez_compressed", "x <f4 [12, 40], y <i8 [12]", "npz", partial(savez, compressed=True),
         partial(archive_rows, single=True), 24, {"axis": 0, "read": "whole"}),
]  # fmt: skip


def tofile(folder: Path, dtype: str, header: bytes = b"") -> None:
    for i in range(2):
        (folder / f"{i}.dat").write_bytes(header + values(dtype, first=i).tobytes())


def raw(place: Place, dtype: str, offset: int = 0, axis: int = 0) -> Values:
    array = np.fromfile(place.path, dtype, offset=offset).reshape(SHAPE)
    at = slice(place.start, place.stop)
    return {"x": array[at] if axis == 0 else array[:, at]}


RAW = [
    Case("numpy.tofile", ">i2 [12, 40]", "raw", partial(tofile, dtype=">i2"), partial(raw, dtype=">i2"), 8,
         {"dtype": ">i2", "shape": [40], "window": 3, "phase": "zero"}),
    Case("numpy.tofile", "<f8 [12, 40] after 64 bytes", "raw", partial(tofile, dtype="<f8", header=bytes(64)),
         partial(raw, dtype="<f8", offset=64), 8,
         {"dtype": "<f8", "shape": [40], "offset": 64, "window": 3, "phase": "zero"}),
    Case("numpy.tofile", "<f4 [12, 40], channels by time", "raw", partial(tofile, dtype="<f4"),
         partial(raw, dtype="<f4", axis=1), 8,
         {"dtype": "<f4", "shape": [12, None], "axis": 1, "window": 10, "phase": "zero"}),
]  # fmt: skip
CASES = [*NPY, *BLOCKS, *NPZ, *RAW]
