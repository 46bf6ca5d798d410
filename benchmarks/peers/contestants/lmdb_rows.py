"""LMDB, one environment for all samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch

from benchmarks.noise import Array
from benchmarks.peers.cases import Case
from benchmarks.peers.contestants.torch_loader import loader_of, same, tensors

MAP_BYTES = 8 << 30
KEY_BYTES = 8


def _key(label: int) -> bytes:
    return label.to_bytes(KEY_BYTES, "big")


def write(case: Case, folder: Path) -> None:
    environment = lmdb.open(str(folder / "lmdb"), map_size=MAP_BYTES)
    for values, labels in case.each_shard():
        with environment.begin(write=True) as transaction:
            for x, y in zip(values, labels, strict=True):
                transaction.put(_key(int(y)), y.tobytes() + x.tobytes(), append=True)
    environment.close()


class Rows(torch.utils.data.Dataset[Any]):
    """Batches out of the map; each process opens it for itself."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._path = str(folder / "lmdb")
        self._environment: Any = None

    def __len__(self) -> int:
        return self._case.samples

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, ...]:
        if self._environment is None:
            self._environment = lmdb.open(
                self._path, readonly=True, lock=False, map_size=MAP_BYTES
            )
        with self._environment.begin(buffers=True) as transaction:
            found = [np.frombuffer(transaction.get(_key(row)), np.uint8) for row in rows]
            return tensors(*self._copied(found))

    def _copied(self, found: list[Array]) -> tuple[Array, ...]:
        """Copy the values out of the map, which is valid during the transaction only."""
        y = np.array([value[:KEY_BYTES].view(np.int64)[0] for value in found])
        values = [value[KEY_BYTES:].view(self._case.dtype) for value in found]
        if self._case.shape is not None:
            return np.stack(values).reshape(-1, *self._case.shape), y
        return np.concatenate(values), np.cumsum([0, *map(len, values)]), y

    def close(self) -> None:
        """Close what this process opened."""
        if self._environment is not None:
            self._environment.close()


@contextmanager
def opened(case: Case, folder: Path, workers: int) -> Iterator[Any]:
    rows = Rows(case, folder)
    try:
        yield loader_of(rows, workers, same, shuffle=True)
    finally:
        rows.close()
