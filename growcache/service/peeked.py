"""Samples that are looked at in a cache, each with its place and where it came from.

A look takes no lease: a shard that is evicted meanwhile is passed over, and one that is open
already stays readable to its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from growcache.cache.files import Layout
from growcache.cache.formats import open_shard, shard_path
from growcache.cache.index import IndexView, ShardRow, read_index
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheMissingError, ConfigError, CorruptShardError
from growcache.schema import Origin, Sample, Schema, Value
from growcache.service.words import plural

EXAMPLES = 8
PRINTED_VALUES = 64
PRINTED_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Peeked:
    """One sample, with its place in the cache and what its shard says of itself."""

    shard: int
    i: int
    sidecar: Sidecar
    sample: Sample

    @property
    def origin(self) -> Origin:
        """Where it came from."""
        return self.sidecar.origin(self.i)


def sample_at(root: Path, place: str) -> Peeked:
    """Return the sample at ``place`` ("shard:i").

    Raises:
        CacheMissingError: there is no cache, or no sample in it yet.
        ConfigError: ``place`` names no sample of the cache.
    """
    view, _ = index_of(root)
    return one(root, view, place)


def index_of(root: Path) -> tuple[IndexView, Schema]:
    """Return what the index tells of a cache that holds samples.

    Raises:
        CacheMissingError: there is no cache, or no sample in it yet.
    """
    view = read_index(root)
    if view.schema is None or not view.totals.samples:
        raise CacheMissingError(
            f"the cache at {root} holds no sample yet; see how it goes: growcache status {root}"
        )
    return view, view.schema


def one(root: Path, view: IndexView, place: str) -> Peeked:
    """Return the sample at ``place`` ("shard:i").

    Raises:
        ConfigError: ``place`` names no sample of the cache.
    """
    match = re.fullmatch(r"(\d+):(\d+)", place)
    if not match:
        raise ConfigError(f"--sample expects SHARD:I, such as 12:0, found {place!r}")
    shard, i = int(match[1]), int(match[2])
    row = next((row for row in view.shards if row.number == shard), None)
    if row is None:
        known = [row.number for row in view.shards]
        raise ConfigError(
            f"shard {shard} is not in the cache (any more); it holds {plural(len(known), 'shard')} "
            f"from {min(known)} to {max(known)}"
        )
    if i >= row.samples:
        raise ConfigError(f"shard {shard} has {plural(row.samples, 'sample')}, counted from 0")
    return _read(root, row, i)


def some(root: Path, view: IndexView) -> Iterator[Peeked]:
    """Yield the first samples of shards that are evenly spread over the cache, by their numbers."""
    rows = sorted((r for r in view.shards if r.samples), key=lambda row: row.number)
    for k in range(min(EXAMPLES, len(rows))):
        row = rows[k * len(rows) // min(EXAMPLES, len(rows))]
        try:
            yield _read(root, row, 0)
        except (FileNotFoundError, CorruptShardError):
            if shard_path(Layout(root), row.number, view.cache_format).exists():
                raise
            # evicted since the index was read


def _read(root: Path, row: ShardRow, i: int) -> Peeked:
    layout = Layout(root)
    path = layout.sidecar(row.number)
    sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    mapped = open_shard(
        layout, row.number, sidecar.samples, sidecar.schema, sidecar.cache_format
    )
    try:
        return Peeked(row.number, i, sidecar, mapped[i])
    finally:
        mapped.close()


def summary(value: Value) -> dict[str, Any]:
    """Return dtype, shape, extremes and, if it is short, all of it; NaN becomes null.

    Of bytes and strings: how long they are (in bytes, in characters), and strings' beginning.
    """
    if isinstance(value, bytes):
        return {"dtype": "bytes", "length": len(value)}
    if isinstance(value, str):
        return {"dtype": "str", "length": len(value), "value": value[:PRINTED_CHARACTERS]}
    facts: dict[str, Any] = {"dtype": value.dtype.name, "shape": list(value.shape)}
    if value.size and value.dtype.kind in "biuf":
        facts |= {"min": value.min(), "mean": value.mean(dtype=np.float64), "max": value.max()}
        facts = {k: v.item() if isinstance(v, np.generic) else v for k, v in facts.items()}
    if value.size <= PRINTED_VALUES and value.dtype.kind in "biuf":
        facts["values"] = value.tolist()
    return facts
