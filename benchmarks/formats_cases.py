"""The cases of benchmarks/formats.py: the content and size of objects, and how they are read.

If a visit yields one sample, a pass takes long; such cases have fewer samples than those whose
visits yield many.
"""

from __future__ import annotations

from typing import Any

from benchmarks import formats_arrays as arrays
from benchmarks import formats_records as records
from benchmarks.formats_samples import CHANNELS, ROWS, Case
from benchmarks.formats_science import science_cases
from benchmarks.formats_small import small_cases

ONE, SOME, MANY = 1024, 2048, 4096  # samples per object: 16, 32 and 64 MiB
WINDOW: dict[str, Any] = {"window": ROWS, "phase": "zero"}
RAW: dict[str, Any] = {**WINDOW, "dtype": "<f4", "shape": [CHANNELS]}
FEATURES: dict[str, Any] = {"features": {"x": ["float32", ROWS, CHANNELS], "label": "int64"}}

CASES = {
    case.name: case
    for case in (
        Case("npy windows", "npy", arrays.make_npy, arrays.npy_by_hand, ONE, WINDOW, goal=20),
        Case("raw windows", "raw", arrays.make_raw, arrays.raw_by_hand, ONE, RAW),
        Case("npz windows", "npz", arrays.make_npz, arrays.npz_by_hand, ONE, WINDOW),
        Case(
            "hdf5 windows",
            "hdf5",
            arrays.make_hdf5,
            arrays.hdf5_by_hand,
            SOME,
            WINDOW,
            opens=True,
            goal=20,
            needs="h5py",
        ),
        Case(
            "zarr windows",
            "zarr",
            arrays.make_zarr,
            arrays.zarr_by_hand,
            MANY,
            WINDOW,
            objects="*.zarr/x/c/**",
            opens=True,
            needs="zarr",
        ),
        Case("jsonl", "jsonl", records.make_jsonl, records.jsonl_by_hand, MANY),
        Case("tar", "tar", records.make_tar, records.tar_by_hand, MANY),
        Case(
            "tfrecord",
            "tfrecord",
            records.make_tfrecord,
            records.tfrecord_by_hand,
            MANY,
            FEATURES,
            opens=True,
            needs="tfrecord",
        ),
        Case(
            "parquet",
            "parquet",
            records.make_parquet,
            records.parquet_by_hand,
            MANY,
            {"columns": ["x"]},
            opens=True,
            needs="pyarrow",
        ),
        Case(
            "lmdb",
            "lmdb",
            records.make_lmdb,
            records.lmdb_by_hand,
            ONE,
            opens=True,
            downloads=True,
            needs="lmdb",
        ),
        Case(
            "lmdb, 16 a visit",
            "lmdb",
            records.make_lmdb,
            records.lmdb_by_hand,
            SOME,
            sampling={"samples_per_object": 16},
            opens=True,
            downloads=True,
            needs="lmdb",
        ),
        *science_cases(),
        *small_cases(),
    )
}
