"""HDF5 files that h5py writes, by storage, filter and type."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

SHAPE = (24, 16)


def values(dtype: str, first: int = 0) -> Any:
    return (np.arange(first, first + np.prod(SHAPE)) % 120).reshape(SHAPE).astype(dtype)


def write(folder: Path, dtype: str = "<f4", libver: str | None = None, **storage: Any) -> None:
    import h5py

    for i in range(2):
        with h5py.File(folder / f"{i}.h5", "w", libver=libver) as file:
            file.create_dataset("x", data=values(dtype, i), **storage)


def read(place: Place, *names: str, axis: int = 0) -> Values:
    import h5py

    at = slice(place.start, place.stop)
    with h5py.File(place.path) as file:
        return {
            name.rpartition("/")[2]: file[name][at] if axis == 0 else file[name][:, at]
            for name in names
        }


def read_row(place: Place, *names: str) -> Values:
    return {name: array[0] for name, array in read(place, *names).items()}


def _stored(holds: str, dtype: str = "<f4", libver: str | None = None, **storage: Any) -> Case:
    writes = partial(write, dtype=dtype, libver=libver, **storage)
    expected = lambda place: read(place, "x")  # noqa: E731
    options = {"datasets": ["x"], "window": 4}
    return Case("h5py", holds, "hdf5", writes, expected, 12, options, needs=("h5py",))


STORAGE = [
    _stored("<f4 in one piece"),
    _stored("<f4 in one piece, libver latest", libver="latest"),
    _stored("<f4 in chunks", chunks=(5, 16)),
    _stored("<f4 in chunks, libver latest", libver="latest", chunks=(5, 7)),
    _stored("<f4 in chunks that grow", maxshape=(None, 16), chunks=(5, 16)),
    _stored("<f4, gzip", chunks=(5, 16), compression="gzip"),
    _stored("<f4, gzip with shuffle and fletcher32", chunks=(5, 16), compression="gzip", shuffle=True, fletcher32=True),
    _stored("<f4, lzf", chunks=(5, 16), compression="lzf"),
    _stored("<i4, scale-offset", "<i4", chunks=(5, 16), scaleoffset=0),
    *(
        _stored(f"{dtype} in chunks", dtype, chunks=(5, 16))
        for dtype in (">i2", "<u1", ">f8", "<f2", "<c8", "|b1")
    ),
]  # fmt: skip


def write_named(folder: Path) -> None:
    import h5py

    for i in range(2):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["eeg/signal"] = values("<i2", i)
            file["eeg/label"] = np.arange(24) + i
            file["name"] = [f"window {row}" for row in range(24)]


def write_channels(folder: Path) -> None:
    import h5py

    for i in range(2):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file.create_dataset("x", data=values("<f4", i).T, chunks=(16, 6))


def write_records(folder: Path) -> None:
    import h5py

    for i in range(2):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            rows = np.zeros(24, [("time", "<f8"), ("code", "<i4")])
            rows["time"], rows["code"] = np.arange(24) / 7, np.arange(24) + i
            file["events"] = rows


def read_record(place: Place) -> Values:
    row = read(place, "events")["events"][0]
    return {f"events.{name}": row[name] for name in row.dtype.names}


def read_named(place: Place, names: Mapping[str, str]) -> Values:
    found = read_row(place, *names.values())
    decoded = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in found.items()
    }
    return {field: decoded[name] for field, name in names.items()}


NAMED = [
    Case("h5py", "two datasets of a group", "hdf5", write_named,
         lambda place: read(place, "eeg/signal", "eeg/label"), 12,
         {"datasets": ["eeg/signal", "eeg/label"], "window": 4}, needs=("h5py",)),
    Case("h5py", "text by row", "hdf5", write_named, partial(read_named, names={"text": "name"}), 48,
         {"datasets": {"text": "name"}, "axis": 0}, needs=("h5py",)),
    Case("h5py", "channels by time in chunks", "hdf5", write_channels,
         lambda place: read(place, "x", axis=1), 12, {"axis": 1, "window": 4}, needs=("h5py",)),
    Case("h5py", "records", "hdf5", write_records, read_record, 48,
         {"datasets": ["events"], "axis": 0}, needs=("h5py",)),
]  # fmt: skip
CASES = [*STORAGE, *NAMED]
