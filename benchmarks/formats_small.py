"""Small objects for benchmarks/formats.py: a few samples each, as an array of rows.

The header of such an object, and what a store and HTTP send with it, are large next to its samples.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.formats_samples import Case, Make, Take, ranges

KIB = 1024
HEADER = 128  # bytes, of a .npy file
# Of an object: KiB of its rows, rows, and bytes that may be fetched for each of theirs. The entry
# of an object in a listing, and the head of an answer, take some 800 bytes together. Raw objects
# have no header: a visit is one sample, and costs the head of one answer.
ANSWER = 600  # bytes
SIZES = ((3, 3, 1.5), (15, 15, 1.2), (60, 15, 1.2), (96, 6, 1.2))
OBJECTS = 600
FORMATS: dict[str, dict[str, Any]] = {
    "npy": {"axis": 0},
    "npz": {"axis": 0},
    "raw": {"dtype": "<f4"},
}


def small_cases() -> list[Case]:
    """Return the cases: each format with objects of each size."""
    return [
        _case(form, options, kib * KIB // rows, rows, goal)
        for form, options in FORMATS.items()
        for kib, rows, goal in SIZES
    ]


def _case(form: str, options: dict[str, Any], row_bytes: int, rows: int, goal: float) -> Case:
    shape = {"shape": [row_bytes // 4]} if form == "raw" else {}
    return Case(
        name=f"{form} of {row_bytes * rows // KIB} KiB",
        format=form,
        make=_make(form, row_bytes),
        by_hand=_by_hand(form, row_bytes),
        samples=rows,
        options={**options, **shape},
        count=OBJECTS,
        sample_bytes=row_bytes,
        amplification=max(goal, 1.05 + ANSWER / row_bytes if form == "raw" else 0),
    )


def _make(form: str, row_bytes: int) -> Make:
    def make(path: Path, rng: np.random.Generator, samples: int) -> int:
        values = rng.random((samples, row_bytes // 4), dtype=np.float32)
        with path.open("wb") as file:
            if form == "npz":
                np.savez(file, x=values)
            elif form == "npy":
                np.save(file, values)
            else:
                file.write(values.tobytes())
        return int(values.nbytes)

    return make


def _by_hand(form: str, row_bytes: int) -> Callable[[Any], Take]:
    header = HEADER if form == "npy" else 0

    def opened(files: Any) -> Take:
        def take(key: str, number: int) -> Any:
            if form == "npz":
                with np.load(io.BytesIO(files.cat_file(key))) as arrays:
                    return arrays["x"][number]
            data = ranges(files, key, header + number * row_bytes, row_bytes)
            return np.frombuffer(data, "<f4")

        return take

    return opened
