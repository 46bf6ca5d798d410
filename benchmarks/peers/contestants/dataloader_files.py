"""torch's DataLoader over a file per sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.noise import Array
from benchmarks.peers.cases import Case
from benchmarks.peers.contestants.dataloader_mmap import rows_collated
from benchmarks.peers.contestants.torch_loader import loader_of


def _path(folder: Path, label: int) -> str:
    return f"{folder}/{label >> 12}/{label}.raw"


def write(case: Case, folder: Path) -> None:
    for values, labels in case.each_shard():
        for value, label in zip(values, labels.tolist(), strict=True):
            path = Path(_path(folder, label))
            path.parent.mkdir(exist_ok=True)
            value.tofile(path)


class Files(torch.utils.data.Dataset[Any]):
    """A sample per file, whose label is its number."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._folder = folder

    def __len__(self) -> int:
        return self._case.samples

    def __getitem__(self, i: int) -> tuple[Array, int]:
        value = np.fromfile(_path(self._folder, i), self._case.dtype)
        return (value if self._case.shape is None else value.reshape(self._case.shape)), i


@contextmanager
def opened(case: Case, folder: Path, workers: int) -> Iterator[Any]:
    yield loader_of(Files(case, folder), workers, partial(rows_collated, case), shuffle=True)
