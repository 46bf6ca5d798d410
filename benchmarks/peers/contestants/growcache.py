"""growcache's own loader, over a cache that its own writer made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.cases import BATCH, Case
from growcache.schema import Field, Schema
from growcache.torch import EpochLoader
from tests.filled import Filled


def write(case: Case, folder: Path) -> None:
    shape = (None,) if case.shape is None else case.shape
    schema = Schema((Field("x", case.dtype, shape), Field("y", "<i8", ())))
    with Filled(folder / "cache", schema=schema, max_bytes=20_000_000_000) as cache:
        for number, (values, labels) in enumerate(case.each_shard()):
            rows = [{"x": x, "y": np.array(y)} for x, y in zip(values, labels, strict=True)]
            cache.add_samples(number, rows)


@contextmanager
def opened(case: Case, folder: Path, **setting: Any) -> Iterator[EpochLoader]:
    fields = ("x", "y") if case.shape is not None else ("x", "x_offsets", "y")
    with EpochLoader(
        folder / "cache",
        batch_size=BATCH,
        min_samples=case.samples,
        as_tuple=fields,
        **setting,
    ) as loader:
        yield loader
