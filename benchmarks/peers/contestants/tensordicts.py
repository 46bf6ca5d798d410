"""A memory-mapped TensorDict, which is also what TorchRL's replay buffers keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.peers.cases import BATCH, Case
from benchmarks.peers.contestants.torch_loader import Epochs


def write(case: Case, folder: Path) -> None:
    assert case.shape is not None
    dtype = torch.from_numpy(np.zeros(0, case.dtype)).dtype
    like = {
        "x": torch.empty((), dtype=dtype).expand(case.samples, *case.shape),
        "y": torch.zeros((), dtype=torch.int64).expand(case.samples),
    }
    kept = TensorDict(like, [case.samples]).memmap_like(str(folder / "rows"))
    for values, labels in case.each_shard():
        rows = slice(int(labels[0]), int(labels[-1]) + 1)
        kept["x"][rows] = torch.from_numpy(np.stack(values))
        kept["y"][rows] = torch.from_numpy(labels)


def _batches(rows: Any) -> Iterator[tuple[torch.Tensor, ...]]:
    for indices in torch.randperm(len(rows)).view(-1, BATCH):
        batch = rows[indices]
        yield batch["x"], batch["y"]


@contextmanager
def opened(case: Case, folder: Path, threads: int) -> Iterator[Epochs]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = TensorDict.load_memmap(str(folder / "rows"))
        yield Epochs(lambda _: _batches(rows))
    finally:
        torch.set_num_threads(before)
