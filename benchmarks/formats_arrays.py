"""Array formats for benchmarks/formats.py: how their objects are made and read by hand.

The hand-written readers are what a careful user writes with fsspec and the format's own library.
They open files once and keep them, request ranges where the library can, and know the headers of
plain arrays in advance. For rows of `.npz` there is no such way, so each read fetches the whole
archive.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.formats_samples import CHANNELS, ROWS, SAMPLE_BYTES, Take, ranges, values

HEADER = 128  # bytes in the header of a .npy file
CHUNK = 4  # samples in an HDF5 chunk
STORED = 32  # samples in a Zarr chunk, which is an object
BLOCK = 1 << 16  # bytes that fsspec reads ahead for h5py


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

    @cache  # shared by all threads because the library admits one at a time
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
