"""Code that several contestants share: torch's DataLoader, and batches as tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.noise import Array
from benchmarks.peers.cases import BATCH, Case

# Loaders never write to the memory they read, so torch's warning about read-only memory does not apply.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")


def tensors(*parts: Array) -> tuple[torch.Tensor, ...]:
    """Return arrays as tensors over the same memory."""
    return tuple(map(torch.from_numpy, parts))


def collated(values: Sequence[Array], labels: Any, case: Case) -> tuple[torch.Tensor, ...]:
    """Copy samples into a batch of tensors; ``labels`` may be any sequence of ints."""
    y = torch.from_numpy(np.asarray(labels, np.int64))
    if case.shape is not None:
        x = room(len(values) * values[0].size, case).reshape(len(values), *case.shape)
        np.stack(values, out=x.numpy())
        return x, y
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    x = room(int(offsets[-1]), case)
    np.concatenate(values, out=x.numpy())
    return x, torch.from_numpy(offsets), y


def room(items: int, case: Case) -> torch.Tensor:
    """Return memory for a batch, in a worker such as its loader can map: it is copied once.

    As torch's own `default_collate` does it.
    """
    dtype = torch.from_numpy(np.empty(0, case.dtype)).dtype
    if torch.utils.data.get_worker_info() is None:
        return torch.empty(items, dtype=dtype)
    storage: Any = torch.UntypedStorage  # the method that is called has no types
    made: Any = torch.empty(0, dtype=dtype)
    shared: torch.Tensor = made.set_(storage._new_shared(items * dtype.itemsize), 0, (items,))
    return shared


def decoded(data: Any, case: Case, offset: int = 0) -> Array:
    """Return the bytes of a sample as its array, without a copy."""
    values = np.frombuffer(data, case.dtype, offset=offset)
    return values if case.shape is None else values.reshape(case.shape)


def loader_of(
    dataset: Any, workers: int, collate: Callable[[Any], Any], **options: Any
) -> torch.utils.data.DataLoader[Any]:
    """Return torch's DataLoader with workers that live on between epochs."""
    return torch.utils.data.DataLoader(
        dataset,
        **{"batch_size": BATCH, **options},
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=collate,
    )


def same(batch: Any) -> Any:
    """Return what the data set made: it is a batch already."""
    return batch


class Epochs:
    """Calls a function for each epoch, with its number."""

    def __init__(self, make: Callable[[int], Iterable[Any]]) -> None:
        self._make = make
        self._epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        return iter(self._make(self._epoch))
