"""Chunks that hdf5plugin compresses, which are read without it; and a group for each sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

SHAPE = (60, 70)


def filters() -> dict[str, Callable[[], Any]]:
    import hdf5plugin as plugin

    return {
        "bitshuffle": lambda: plugin.Bitshuffle(cname="none"),
        "bitshuffle with lz4": plugin.Bitshuffle,
        "bitshuffle with zstd": lambda: plugin.Bitshuffle(cname="zstd"),
        "lz4": lambda: plugin.LZ4(nbytes=1000),
        "bzip2": plugin.BZip2,
        "zstd": plugin.Zstd,
        "blosc": lambda: plugin.Blosc(cname="zlib", shuffle=2),
        "blosc2": plugin.Blosc2,
    }


def write(folder: Path, name: str, dtype: str) -> None:
    import h5py

    values = (np.arange(np.prod(SHAPE)) % 999).reshape(SHAPE).astype(dtype)
    for number in range(2):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=values + number, chunks=(9, 70), **filters()[name]())


def row(place: Place) -> Values:
    import h5py
    import hdf5plugin  # noqa: F401 - registers its filters

    with h5py.File(place.path) as file:
        return {"x": file["x"][place.start]}


def _case(name: str, dtype: str, refused: str = "") -> Case:
    return Case(
        "hdf5plugin",
        f"{name}, {dtype}",
        "hdf5",
        partial(write, name=name, dtype=dtype),
        None if refused else row,
        2 * SHAPE[0],
        {"axis": 0},
        needs=("h5py", "hdf5plugin"),
        refused=refused,
    )


def write_demos(folder: Path) -> None:
    """As robomimic writes demonstrations."""
    import h5py

    with h5py.File(folder / "demos.hdf5", "w") as file:
        for n in range(12):
            group = file.create_group(f"data/demo_{n}")
            group["actions"] = np.full((n + 3, 7), n, "f8")
            group["obs/image"] = np.full((n + 3, 8, 8, 3), n, "u1")
            group.attrs["num_samples"] = n + 3


def demo(place: Place) -> Values:
    import h5py

    with h5py.File(place.path) as file:
        group = file["data"][sorted(file["data"])[place.start]]
        return {"actions": group["actions"][:], "obs.image": group["obs/image"][:]}


NAMES = (
    "bitshuffle",
    "bitshuffle with lz4",
    "bitshuffle with zstd",
    "lz4",
    "bzip2",
    "zstd",
    "blosc",
)
CASES = [
    *(_case(name, dtype) for name in NAMES for dtype in ("<f4", "<u2")),
    _case("bitshuffle with lz4", ">f8"),
    _case("blosc2", "<f4", refused="filter 32026 (blosc2)"),
    Case(
        "h5py", "a group for each demonstration", "hdf5", write_demos, demo, 12, {"group": "data/*"},
        needs=("h5py",),
    ),
]  # fmt: skip
