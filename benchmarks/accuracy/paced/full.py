"""torch's DataLoader over all samples in memory: what training would be without a link."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.accuracy.paced.place import BATCH, Batch, Place, samples_of


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    loader = DataLoader(
        TensorDataset(*map(torch.from_numpy, samples_of(place.samples))),
        BATCH,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(place.seed),
    )
    while True:
        for windows, labels in loader:
            yield Batch(windows, labels)
