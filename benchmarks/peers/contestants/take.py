"""One vectorised operation per batch, out of memory into buffers that rotate."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.noise import Array
from benchmarks.peers.cases import BATCH, Case
from benchmarks.peers.contestants.memcpy import ROTATED, buffers, kept, orders
from benchmarks.peers.contestants.torch_loader import Epochs, tensors


def write(case: Case, folder: Path) -> None:
    """There is nothing to write."""


@functools.cache
def table(case: Case) -> Array:
    """Return all samples as one array."""
    return np.stack(kept(case))


def _taken(case: Case, epoch: int, how: str) -> Iterator[Any]:
    rows = table(case)
    source = torch.from_numpy(rows)
    rotated = [np.ones((BATCH, *rows.shape[1:]), rows.dtype) for _ in range(ROTATED)]
    for k, order in enumerate(orders(case, epoch)):
        out = rotated[k % ROTATED]
        if how == "numpy":
            np.take(rows, order, axis=0, out=out, mode="clip")
        else:
            torch.index_select(source, 0, torch.from_numpy(order), out=torch.from_numpy(out))
        yield tensors(out, order)


def _joined(case: Case, epoch: int) -> Iterator[Any]:
    rows = kept(case)
    for k, order in enumerate(orders(case, epoch)):
        values = [rows[row] for row in order.tolist()]
        offsets = np.cumsum([0, *map(len, values)])
        out = buffers(case, ROTATED)[k % ROTATED][: offsets[-1]]
        np.concatenate(values, out=out)
        yield tensors(out, offsets, order)


@contextmanager
def opened(case: Case, folder: Path, how: str, threads: int = 1) -> Iterator[Epochs]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if case.shape is None:
            yield Epochs(lambda epoch: _joined(case, epoch))
        else:
            yield Epochs(lambda epoch: _taken(case, epoch, how))
    finally:
        torch.set_num_threads(before)
