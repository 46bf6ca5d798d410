"""Caches of random samples, written by the cache's own writer: what the loaders are measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.noise import random_samples
from growcache.schema import Array, Field, Schema
from tests.filled import Filled

__all__ = ["SyntheticCache", "random_samples"]


class SyntheticCache(Filled):
    """A cache in the hands of its only writer; a context manager.

    Args:
        root: of the cache.
        dtype: of the one field, ``x``.
        shape: of it; None for ragged dimensions.
        config: bound and eviction; roomy by default.
    """

    def __init__(
        self, root: Path, dtype: str, shape: tuple[int | None, ...], **config: Any
    ) -> None:
        schema = Schema((Field("x", dtype, shape),))
        super().__init__(root, schema=schema, **{"max_bytes": 10_000_000_000, **config})

    def add_arrays(self, number: int, arrays: Array | list[Array]) -> None:
        """Commit a shard of one sample per array."""
        self.add_samples(number, [{"x": array} for array in arrays])
