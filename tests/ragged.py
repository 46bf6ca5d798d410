"""Samples whose values differ in size, of every kind that a schema knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from growcache.schema import Field, Sample, Schema
from tests.filled import Filled

SCHEMAS: dict[str, dict[str, Any]] = {
    "rows": {"x": ["float32", None, 3]},
    "inner": {"x": ["int16", 2, None]},
    "both": {"x": ["float64", None, 2, None]},
    "empty": {"x": ["uint8", None, 0]},
    "flat": {"x": ["complex64", None]},
    "bytes": {"x": "bytes"},
    "str": {"x": "str"},
    "fixed": {"x": ["uint16", 3]},
}


def value_of(field: Field, name: int) -> Any:
    rng = np.random.default_rng(name)
    if field.is_blob:
        data = bytes(rng.integers(97, 123, int(rng.integers(0, 9)), np.uint8))
        return data.decode() + "é" if field.dtype == "str" else data
    shape = field.shape_of([int(rng.integers(0, 5)) for _ in field.ragged_dims])
    return (rng.random(shape) * 100).astype(field.dtype)


def ragged_cache(
    root: Path, declared: dict[str, Any], cache_format: str = "tfrecord"
) -> Filled:
    """A cache whose samples have the declared fields, and an ``id`` that decides them."""
    schema = Schema.declared({"id": ["int64"], **declared})

    def sample(name: int) -> Sample:
        values = {f.name: value_of(f, name) for f in schema.fields if f.name != "id"}
        return {"id": np.array(name, "<i8"), **values}

    return Filled(root, sample, schema=schema, cache_format=cache_format)
