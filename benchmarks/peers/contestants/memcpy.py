"""Rows of an array in memory, copied one by one into buffers that rotate."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.noise import Array
from benchmarks.peers.cases import BATCH, Case
from benchmarks.peers.contestants.torch_loader import Epochs, tensors

ROTATED = 8  # about as many as a prefetching loader has in flight


@functools.cache
def kept(case: Case) -> list[Array]:
    """Return all samples; where all are of one shape, as rows of one array."""
    values = case.all_values()
    return values if case.shape is None else list(np.stack(values))


def write(case: Case, folder: Path) -> None:
    """There is nothing to write."""


@functools.cache
def buffers(case: Case, count: int) -> list[Array]:
    """Return room for batches of the largest samples, all its pages in memory."""
    most = max(value.nbytes for value in kept(case))
    return [np.ones(BATCH * most, np.uint8) for _ in range(count)]


def orders(case: Case, epoch: int) -> Iterator[Array]:
    """Yield the rows of each batch, int64 [BATCH]."""
    order = np.random.default_rng(epoch).permutation(case.samples)
    return iter(order.reshape(-1, BATCH))


def copied(case: Case, epoch: int, count: int) -> Iterator[Any]:
    """Yield the batches of an epoch, in a number of buffers in turn."""
    rows = kept(case)
    rotated = [buffer.view(case.dtype) for buffer in buffers(case, count)]
    for k, order in enumerate(orders(case, epoch)):
        out = rotated[k % count]
        if case.shape is not None:
            x = out[: BATCH * rows[0].size].reshape(BATCH, *case.shape)
            for i, row in enumerate(order.tolist()):
                x[i] = rows[row]
            yield tensors(x, order)
            continue
        end, offsets = 0, [0]
        for row in order.tolist():
            value = rows[row]
            out[end : end + len(value)] = value
            end += len(value)
            offsets.append(end)
        yield tensors(out[:end], np.array(offsets), order)


@contextmanager
def opened(case: Case, folder: Path) -> Iterator[Epochs]:
    buffers(case, ROTATED)
    yield Epochs(lambda epoch: copied(case, epoch, ROTATED))
