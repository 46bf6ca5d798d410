"""Formats of arrays for benchmarks/formats.py: an object of each, and what reads it by hand.

What is by hand is what a careful user writes with fsspec and the format's own library: files are
opened once and kept, ranges are asked for where the library can, and headers of plain arrays are
given. Of `.npz` rows there is no such way: an archive is fetched whole for each.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.formats_samples import CHANNELS, ROWS, SAMPLE_BYTES, Take, ranges, values

HEADER = 128  # bytes, of a .npy file
CHUNK = 4  # samples, of an HDF5 chunk
STORED = 32  # samples, of a chunk of Zarr, which is an object
BLOCK = 1 << 16  # bytes that fsspec reads ahead, beneath h5py


def make_npy(path: Path, rng: np.random.Generator, samples: int) -> int:
    with path.open("wb") as file:
        np.save(file, rows := values(rng, samples))
    return int(rows.nbytes)


def npy_by_hand(files: Any) -> Take:
    return _plain(files, HEADER)


def make_raw(path: Path, rng: np.random.Generator, samples: int) -> int:
    return path.write_bytes(values(rng, samples).tobytes())


def raw_by_hand(files: Any) -> Take:
    return _plain(files, 0)


def _plain(files: Any, header: int) -> Take:
    def take(key: str, number: int) -> Any:
        data = ranges(files, key, header + number * SAMPLE_BYTES, SAMPLE_BYTES)
        return np.frombuffer(data, "<f4").reshape(ROWS, CHANNELS)

    return take


def make_npz(path: Path, rng: np.random.Generator, samples: int) -> int:
    with path.open("wb") as file:
        np.savez(file, x=(rows := values(rng, samples)))
    return int(rows.nbytes)


def npz_by_hand(files: Any) -> Take:
    def take(key: str, number: int) -> Any:
        with np.load(io.BytesIO(files.cat_file(key))) as arrays:
            return arrays["x"][number * ROWS : (number + 1) * ROWS]

    return take


def make_hdf5(path: Path, rng: np.random.Generator, samples: int) -> int:
    import h5py

    with h5py.File(path, "w") as file:
        chunks = (CHUNK * ROWS, CHANNELS)
        stored = file.create_dataset(
            "x", data=values(rng, samples), chunks=chunks, compression="gzip"
        )
        return int(stored.id.get_storage_size())


def hdf5_by_hand(files: Any) -> Take:
    import h5py

    @cache  # for all threads: the library lets in one at a time
    def dataset(key: str) -> Any:
        return h5py.File(files.open(key, block_size=BLOCK), "r")["x"]

    def take(key: str, number: int) -> Any:
        return dataset(key)[number * ROWS : (number + 1) * ROWS]

    return take


def make_zarr(path: Path, rng: np.random.Generator, samples: int) -> int:
    import zarr

    array = zarr.create_array(
        path / "x",
        shape=(samples * ROWS, CHANNELS),
        chunks=(STORED * ROWS, CHANNELS),
        dtype="f4",
    )
    array[:] = values(rng, samples)
    return sum(file.stat().st_size for file in (path / "x" / "c").rglob("*") if file.is_file())


def zarr_by_hand(files: Any) -> Take:
    import zarr

    @cache
    def array(key: str) -> Any:
        return zarr.open_array(f"s3://{key}/x", mode="r", storage_options=files.storage_options)

    def take(key: str, number: int) -> Any:
        return array(key)[number * ROWS : (number + 1) * ROWS]

    return take
