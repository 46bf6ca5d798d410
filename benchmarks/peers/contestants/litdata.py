"""LitData over a local folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import litdata

from benchmarks.peers.cases import BATCH, Case
from benchmarks.peers.contestants.torch_loader import collated, decoded


def _samples(case: Case, number: int) -> Iterator[dict[str, Any]]:
    values, labels = case.shard(number)
    for x, y in zip(values, labels.tolist(), strict=True):
        yield {"x": x.tobytes(), "y": y}


def write(case: Case, folder: Path) -> None:
    out = folder / "chunks"
    shutil.rmtree(out, ignore_errors=True)
    litdata.optimize(
        fn=partial(_samples, case),
        inputs=list(range(case.shards)),
        output_dir=str(out),
        chunk_bytes="64MB",
        num_workers=1,
        verbose=False,
    )


def _collated(case: Case, samples: list[dict[str, Any]]) -> Any:
    values = [decoded(sample["x"], case) for sample in samples]
    return collated(values, [sample["y"] for sample in samples], case)


@contextmanager
def opened(case: Case, folder: Path, workers: int) -> Iterator[Any]:
    dataset = litdata.StreamingDataset(str(folder / "chunks"), shuffle=True, drop_last=False)
    yield litdata.StreamingDataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=partial(_collated, case),
        persistent_workers=workers > 0,
    )
