"""The remote object formats of benchmarks/formats.py: an object of each, and what reads it by hand.

What is by hand is what a careful user writes with fsspec and the format's own library: files are
opened once and kept, ranges are asked for where the library can, and an index of the lines, and
the headers of plain arrays, are given. Only of `.npz` rows, and of LMDB, there is no such way:
the one is fetched whole for each row, of the other each file is downloaded whole, once.
"""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

SAMPLES = 256  # of an object
ROWS, CHANNELS = 64, 64  # float32, of a sample: 16 KiB
SAMPLE_BYTES = ROWS * CHANNELS * 4
HEADER = 128  # bytes, of a .npy file
CHUNK = 4  # samples, of an HDF5 chunk
GROUP = 32  # samples, of a Parquet row group
BLOCK = 1 << 16  # bytes that fsspec reads ahead, beneath h5py and pyarrow

Take: TypeAlias = Callable[[str, int], Any]  # the sample of an object's key and a number


@dataclass(frozen=True, slots=True)
class Case:
    """A format.

    Attributes:
        name: of the row, and of the folder.
        format: as in ``source.format``.
        make: writes an object's file, and returns the bytes of the rows, pages, chunks, row
            groups or lines that hold its samples.
        by_hand: makes, of a file system, what takes one sample.
        options: of the format.
        goal: such that growcache is so many times as fast as the loop, at 50 ms.
        needs: the library that makes the objects, and reads them by hand.
    """

    name: str
    format: str
    make: Callable[[Path, np.random.Generator], int]
    by_hand: Callable[[Any], Take]
    options: dict[str, Any] = field(default_factory=dict)
    goal: float | None = None
    needs: str = "numpy"


def values(rng: np.random.Generator) -> Any:
    """Return the rows of an object, which cannot be compressed much."""
    return rng.random((SAMPLES * ROWS, CHANNELS), dtype=np.float32)


# Plain arrays


def make_npy(path: Path, rng: np.random.Generator) -> int:
    np.save(path, rows := values(rng))
    return int(rows.nbytes)


def make_raw(path: Path, rng: np.random.Generator) -> int:
    return path.write_bytes(values(rng).tobytes())


def ranges_after(header: int) -> Callable[[Any], Take]:
    """One range request for each sample, behind a header of known size."""

    def by_hand(files: Any) -> Take:
        def take(key: str, number: int) -> Any:
            start = header + number * SAMPLE_BYTES
            return np.frombuffer(
                files.cat_file(key, start=start, end=start + SAMPLE_BYTES), "<f4"
            )

        return take

    return by_hand


def make_npz(path: Path, rng: np.random.Generator) -> int:
    np.savez(path, x=(rows := values(rng)))
    return int(rows.nbytes)


def npz_by_hand(files: Any) -> Take:
    def take(key: str, number: int) -> Any:
        with np.load(io.BytesIO(files.cat_file(key))) as arrays:
            return arrays["x"][number * ROWS : (number + 1) * ROWS]

    return take


# Libraries


def make_hdf5(path: Path, rng: np.random.Generator) -> int:
    import h5py

    with h5py.File(path, "w") as file:
        stored = file.create_dataset(
            "x", data=values(rng), chunks=(CHUNK * ROWS, CHANNELS), compression="gzip"
        )
        return int(stored.id.get_storage_size())


def hdf5_by_hand(files: Any) -> Take:
    import h5py

    @cache
    def dataset(_thread: int, key: str) -> Any:
        return h5py.File(files.open(key, block_size=BLOCK), "r")["x"]

    def take(key: str, number: int) -> Any:
        opened = dataset(threading.get_ident(), key)
        return opened[number * ROWS : (number + 1) * ROWS]

    return take


def make_lmdb(path: Path, rng: np.random.Generator) -> int:
    import lmdb

    with (
        lmdb.open(str(path), subdir=False, map_size=1 << 26, lock=False) as env,
        env.begin(write=True) as txn,
    ):
        for number, rows in enumerate(values(rng).reshape(SAMPLES, ROWS, CHANNELS)):
            txn.put(b"%06d" % number, pickle.dumps(rows))
        pages = txn.stat()
    return pages["psize"] * (pages["leaf_pages"] + pages["overflow_pages"])


def lmdb_by_hand(files: Any) -> Take:
    import lmdb

    once = threading.Lock()

    @cache
    def environment(key: str) -> Any:
        copy = f"{tempfile.gettempdir()}/{Path(key).name}"
        files.get_file(key, copy)
        return lmdb.open(copy, subdir=False, readonly=True, lock=False, max_spare_txns=64)

    def take(key: str, number: int) -> Any:
        with once:  # or several threads would download the same one
            opened = environment(key)
        with opened.begin() as txn:
            return pickle.loads(txn.get(b"%06d" % number))

    return take


def make_parquet(path: Path, rng: np.random.Generator) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.float32(), ROWS * CHANNELS)
    column = pa.FixedSizeListArray.from_arrays(values(rng).reshape(-1), type=kind)
    more = pa.array(rng.random(SAMPLES))
    pq.write_table(pa.table({"x": column, "more": more}), path, row_group_size=GROUP)
    groups = pq.ParquetFile(path).metadata
    wanted = [groups.row_group(i).column(0) for i in range(groups.num_row_groups)]
    return sum(column.total_compressed_size for column in wanted)


def parquet_by_hand(files: Any) -> Take:
    import pyarrow.parquet as pq

    @cache
    def table(_thread: int, key: str) -> Any:
        return pq.ParquetFile(files.open(key, cache_type="none"), pre_buffer=True)

    def take(key: str, number: int) -> Any:
        opened = table(threading.get_ident(), key)
        group = opened.read_row_group(number // GROUP, columns=["x"])
        return group["x"][number % GROUP].values.to_numpy()

    return take


# Lines

LINE = 16_000  # bytes; all equally long, so that where one begins is known


def make_jsonl(path: Path, rng: np.random.Generator) -> int:
    letters = rng.integers(97, 123, (SAMPLES, LINE), np.uint8)
    for number, line in enumerate(letters):
        head = b'{"label": %3d, "text": "' % number
        line[: len(head)] = np.frombuffer(head, np.uint8)
        line[-3:] = np.frombuffer(b'"}\n', np.uint8)
    return path.write_bytes(letters.tobytes())


def jsonl_by_hand(files: Any) -> Take:
    def take(key: str, number: int) -> Any:
        return json.loads(files.cat_file(key, start=number * LINE, end=(number + 1) * LINE))

    return take


WINDOW: dict[str, Any] = {"window": ROWS, "phase": "zero"}
CASES = {
    case.name: case
    for case in (
        Case("npy windows", "npy", make_npy, ranges_after(HEADER), WINDOW, goal=20),
        Case(
            "raw windows",
            "raw",
            make_raw,
            ranges_after(0),
            {**WINDOW, "dtype": "<f4", "shape": [CHANNELS]},
        ),
        Case("npz windows", "npz", make_npz, npz_by_hand, WINDOW),
        Case("jsonl", "jsonl", make_jsonl, jsonl_by_hand),
        Case("lmdb", "lmdb", make_lmdb, lmdb_by_hand, needs="lmdb"),
        Case("hdf5 windows", "hdf5", make_hdf5, hdf5_by_hand, WINDOW, goal=20, needs="h5py"),
        Case(
            "parquet",
            "parquet",
            make_parquet,
            parquet_by_hand,
            {"columns": ["x"]},
            needs="pyarrow",
        ),
    )
}
