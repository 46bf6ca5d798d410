"""Hugging Face `datasets` over a saved data set."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from benchmarks.peers.cases import BATCH, Case
from benchmarks.peers.contestants.torch_loader import loader_of, tensors

datasets.disable_progress_bars()


def write(case: Case, folder: Path) -> None:
    _save(case, folder, "bytes", datasets.Value("large_binary"))
    if case.shape is not None:
        kind = {2: datasets.Array2D, 3: datasets.Array3D}[len(case.shape)]
        _save(case, folder, "arrays", kind(case.shape, np.dtype(case.dtype).name))


def _save(case: Case, folder: Path, name: str, feature: Any) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for values, labels in case.each_shard():
            for x, y in zip(values, labels.tolist(), strict=True):
                yield {"x": x.tobytes() if name == "bytes" else x, "y": y}

    made = datasets.Dataset.from_generator(
        rows,
        features=datasets.Features({"x": feature, "y": datasets.Value("int64")}),
        cache_dir=str(folder / "made"),
        writer_batch_size=256,
    )
    made.save_to_disk(str(folder / name), max_shard_size="64MB")
    shutil.rmtree(folder / "made")


def _viewed(case: Case, table: Any) -> tuple[torch.Tensor, ...]:
    """Return a batch of Arrow's as tensors over its memory: its column is contiguous."""
    column = table["x"].combine_chunks()
    _, ends, values = column.buffers()
    offsets = np.frombuffer(ends, np.int64)[column.offset :][: len(column) + 1]
    x = np.frombuffer(values, np.uint8)[offsets[0] : offsets[-1]].view(case.dtype)
    y = table["y"].combine_chunks().to_numpy()
    if case.shape is not None:
        return tensors(x.reshape(-1, *case.shape), y)
    return tensors(x, offsets - offsets[0], y)


def _in_batches(rows: Any) -> Any:
    """Return a sampler whose every element is the rows of a whole batch."""
    shuffled = torch.utils.data.RandomSampler(rows)
    return torch.utils.data.BatchSampler(shuffled, BATCH, drop_last=False)


def _pair(case: Case, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return a batch in its own dtype: format torch makes every integer an int64."""
    dtype = torch.from_numpy(np.zeros(0, case.dtype)).dtype
    return batch["x"].to(dtype), batch["y"]


@contextmanager
def opened(case: Case, folder: Path, workers: int, *, as_torch: bool = False) -> Iterator[Any]:
    name = "arrays" if as_torch else "bytes"
    rows = datasets.load_from_disk(str(folder / name))
    rows = rows.with_format("torch" if as_torch else "arrow")
    collate = partial(_pair if as_torch else _viewed, case)
    yield loader_of(rows, workers, collate, sampler=_in_batches(rows), batch_size=None)
