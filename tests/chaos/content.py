"""The content of every sample: a function of (key, version, row), which any reader can check.

A sample is 128 words of 64 bits: the key's number, the object's version, the row, 124 words
mixed from those three, and the exclusive or of all words before it. Every word is determined by
the others. So no flipped bit, short copy or mixture of two versions passes for a sample.
"""

from __future__ import annotations

import functools
import hashlib
import io
import random
from typing import Any, TypeAlias

import numpy as np

Words: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
_Mixed: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

WORDS = 128
ROWS = 96  # of an object: above 64 KiB, so that it is read by ranges, header first
MOST_ROWS = 150  # of a heavy-tailed object
PARETO_SHAPE = 1.1
_HEAD = 3
_STEPS = np.arange(_HEAD, WORDS - 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


# Only these objects ever change. A rewritten object is a hole until its listed version returns,
# and a source of nothing but holes would test nothing.
CHANGING = 5  # one object in five


def key_name(number: int) -> str:
    """Return the key of an object."""
    return f"chaos/{number:05d}.npy"


def changes(key: str) -> bool:
    """Return whether the object is one of those that are rewritten and deleted."""
    return int(key.partition("/")[2].removesuffix(".npy")) % CHANGING == 0


def _mix(values: _Mixed) -> _Mixed:
    """splitmix64's finalizer: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def samples(head: Words) -> Words:
    """Return the samples int64 [n, WORDS] whose first words are ``head``, int64 [n, 3]."""
    known = np.ascontiguousarray(head).view(np.uint64)
    base = _mix(_mix(_mix(known[:, 0]) ^ known[:, 1]) ^ known[:, 2])
    made = np.empty((len(known), WORDS), np.uint64)
    made[:, :_HEAD] = known
    made[:, _HEAD:-1] = _mix(base[:, None] + _STEPS)
    made[:, -1] = np.bitwise_xor.reduce(made[:, :-1], axis=1)
    return made.view(np.int64)


def wrong(batch: Words) -> Flags:
    """Return which samples of int64 [n, WORDS] do not match their own first words."""
    bad: Flags = (samples(batch[:, :_HEAD]) != batch).any(axis=1)
    return bad


def rows_of(key: int, *, heavy_tailed: bool) -> int:
    """Return the number of rows of an object."""
    if not heavy_tailed:
        return ROWS
    return min(MOST_ROWS, int(random.Random(key).paretovariate(PARETO_SHAPE)))


@functools.lru_cache(maxsize=64)
def object_bytes(key: int, version: int, rows: int = ROWS) -> bytes:
    """Return an object: ``.npy``, int64 [rows, WORDS]."""
    head = np.empty((rows, _HEAD), np.int64)
    head[:, 0], head[:, 1], head[:, 2] = key, version, np.arange(rows)
    file = io.BytesIO()
    np.save(file, samples(head))
    return file.getvalue()


@functools.lru_cache(maxsize=4096)
def etag(key: int, version: int, rows: int = ROWS) -> str:
    """Return the ETag that S3 gives the object: the MD5 of its bytes, in quotes."""
    return f'"{hashlib.md5(object_bytes(key, version, rows)).hexdigest()}"'
