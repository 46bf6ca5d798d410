"""torch's DataLoader over one .npy file that is mapped."""

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
from benchmarks.peers.contestants.torch_loader import collated, loader_of, room, same


def write(case: Case, folder: Path) -> None:
    values = case.all_values()
    if case.shape is not None:
        out = np.lib.format.open_memmap(
            folder / "x.npy", "w+", case.dtype, (case.samples, *case.shape)
        )
        for i, value in enumerate(values):
            out[i] = value
        out.flush()
    else:
        np.save(folder / "x.npy", np.concatenate(values))
        np.save(folder / "offsets.npy", np.cumsum([0, *map(len, values)]))
    np.save(folder / "y.npy", np.arange(case.samples))


class Rows(torch.utils.data.Dataset[Any]):
    """Samples of one mapped file; pickled as a path, because a pickled map would be copied."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._folder = folder
        self._files: tuple[Array, ...] | None = None

    def _opened(self) -> tuple[Array, ...]:
        if self._files is None:
            names = ("x", "y") if self._case.shape is not None else ("x", "y", "offsets")
            paths = [self._folder / f"{name}.npy" for name in names]
            x = np.load(paths[0], mmap_mode="r").view(np.ndarray)
            self._files = (x, *map(np.load, paths[1:]))
        return self._files

    def __len__(self) -> int:
        return self._case.samples

    def __getitem__(self, i: int) -> tuple[Array, int]:
        x, y, *offsets = self._opened()
        if not offsets:
            return x[i], int(y[i])
        return x[offsets[0][i] : offsets[0][i + 1]], int(y[i])


class Batches(Rows):
    """The same, a whole batch at a time."""

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, ...]:
        x, y, *offsets = self._opened()
        if not offsets:
            batch = room(len(rows) * x[0].size, self._case).reshape(-1, *x.shape[1:])
            np.take(x, rows, axis=0, out=batch.numpy(), mode="clip")
            return batch, torch.from_numpy(y[rows])
        begins, ends = offsets[0][rows], offsets[0][1:][rows]
        values = [x[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
        return collated(values, y[rows], self._case)


def rows_collated(case: Case, rows: list[tuple[Array, int]]) -> tuple[torch.Tensor, ...]:
    values, labels = zip(*rows, strict=True)
    return collated(values, labels, case)


@contextmanager
def opened(case: Case, folder: Path, workers: int, batches: bool) -> Iterator[Any]:
    dataset = (Batches if batches else Rows)(case, folder)
    collate = same if batches else partial(rows_collated, case)
    yield loader_of(dataset, workers, collate, shuffle=True)
