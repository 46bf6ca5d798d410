"""The golden configurations; ``WEB`` stands for the address of the objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]
ROWS: Values = {"url": "WEB/rows/*.npy", "format": "npy", "options": {"axis": 0}}
ONE: Values = {"samples_per_object": 1}  # of a visit, though objects are small
FIXED: Values = {"max_samples": 150, "eviction": "none"}


@dataclass(frozen=True)
class Case:
    """A configuration whose shards are known.

    Attributes:
        source: of the configuration.
        sampling: what it says of that besides the size of shards.
        cache: likewise, besides path and bound.
        split: of the configuration.
        grows: whether a second run finds more objects.
        slow: whether only `make test-slow` runs it.
    """

    source: Any
    sampling: Values = field(default_factory=dict)
    cache: Values = field(default_factory=dict)
    split: Values | None = None
    grows: bool = False
    slow: bool = False


CASES: dict[str, Case] = {
    "npy rows": Case(ROWS, ONE, slow=True),  # "two editions" starts as this one
    "npy rows, cache npy": Case(ROWS, ONE, cache={"format": "npy"}, slow=True),
    "npy windows, several of a visit": Case(
        {**ROWS, "options": {"window": 2, "stride": 1}}, {"samples_per_object": 5}
    ),
    "npy whole, ragged": Case({"url": "WEB/ragged/*.npy", "format": "npy"}, slow=True),
    "npy whole, ragged, cache npy": Case(
        {"url": "WEB/ragged/*.npy", "format": "npy"}, cache={"format": "npy"}
    ),
    "npy rows of small objects": Case(ROWS, slow=True),
    "npz rows of small objects": Case(
        {"url": "WEB/npz/*.npz", "format": "npz", "options": {"axis": 0}}, slow=True
    ),
    "npz rows": Case(
        {"url": "WEB/npz/*.npz", "format": "npz", "options": {"axis": 0}}, ONE, slow=True
    ),
    "raw windows, random phase": Case(
        {
            "url": "WEB/raw/*.dat",
            "format": "raw",
            "options": {"dtype": ">i2", "shape": [4], "offset": 16, "window": 3},
        },
        slow=True,
    ),
    "jsonl": Case({"url": "WEB/words/*.jsonl", "format": "jsonl"}),
    "tfrecord": Case(
        {"url": "WEB/records/*.tfrecord", "format": "tfrecord", "options": {"decode": "none"}},
        slow=True,
    ),
    "tar": Case({"url": "WEB/archives/*.tar", "format": "tar"}, slow=True),
    "parquet": Case({"url": "WEB/parquet/*.parquet", "format": "parquet"}, slow=True),
    "hdf5 windows of small objects": Case(
        {"url": "WEB/hdf5/*.h5", "format": "hdf5", "options": {"window": 4}}, slow=True
    ),
    "hdf5 windows": Case(
        {"url": "WEB/hdf5/*.h5", "format": "hdf5", "options": {"window": 4}},
        ONE,
        slow=True,
    ),
    "zarr windows": Case(
        {"url": "WEB/zarr/*.zarr/signal/*", "format": "zarr", "options": {"window": 4}},
        slow=True,
    ),
    "lmdb": Case(
        {"url": "WEB/lmdb/*.lmdb", "format": "lmdb", "options": {"key": "str"}}, slow=True
    ),
    "image": Case({"url": "WEB/pictures/*/*.png", "format": "image"}, slow=True),
    "bytes, replacement": Case(
        {"url": "WEB/words/*.jsonl", "format": "bytes"},
        {"order": "replacement"},
        FIXED,
        slow=True,
    ),
    "user's format": Case({"url": "WEB/rows/*.npy", "format": "golden_code:read"}, slow=True),
    "replacement": Case(ROWS, {**ONE, "order": "replacement"}, FIXED, slow=True),
    "max_samples": Case(ROWS, {**ONE, "seed": 5}, FIXED, slow=True),
    "weight_by objects": Case(ROWS, {**ONE, "weight_by": "objects"}, slow=True),
    "weight_by objects, replacement": Case(
        ROWS, {**ONE, "weight_by": "objects", "order": "replacement"}, FIXED, slow=True
    ),
    "strata": Case(ROWS, {**ONE, "strata": {"by": r"(?P<stratum>sub-\d)"}}, FIXED),
    "split": Case(
        ROWS,
        ONE,
        split={"group": r"(?P<group>sub-\d+)", "fractions": {"a": 0.5, "b": 0.5}, "use": "a"},
    ),
    "labels": Case(
        {
            **ROWS,
            "labels": {
                "url": "WEB/tables/labels.csv",
                "key": "name",
                "match": "name",
                "columns": ["state", "score"],
            },
        },
        ONE,
        slow=True,
    ),
    "fields": Case(
        {
            "fields": {"x": "WEB/pairs/x_{k}.npy", "y": "WEB/pairs/y_{k}.npy"},
            "format": "npy",
            "options": {"axis": 0},
        },
        ONE,
        slow=True,
    ),
    "sources with weights": Case(
        [
            {**ROWS, "weight": 3},
            {"url": "WEB/late/*.npy", "format": "npy", "options": {"axis": 0}, "weight": 1},
        ],
        ONE,
        FIXED,
        slow=True,
    ),
    "node 1 of 3": Case(ROWS, {**ONE, "node": 1, "nodes": 3}),
    "transform": Case(ROWS, {**ONE, "transform": "golden_code:noisy"}),
    "two editions": Case({**ROWS, "url": "WEB/grown/*.npy"}, ONE, grows=True),
}
