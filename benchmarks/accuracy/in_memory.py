"""Arms without a cache that growcache is compared with: full data in memory, and data echoing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.accuracy.training import Batch


def sample_bytes(samples: Batch) -> int:
    """Return the bytes of a sample and its class."""
    return samples.inputs[0].nbytes + samples.labels[0].nbytes


@dataclass
class EchoedFeed:
    """A shuffled DataLoader over all samples, of which each batch is trained on several times.

    With one time it is training on full data. The bytes are those of a loop that streams
    every sample whenever it is loaded.
    """

    samples: Batch
    batch_size: int
    seed: int
    times: int = 1
    loaded: int = 0

    def batches(self) -> Iterator[Batch]:
        """Yield each batch of the loader as often as told."""
        loader = DataLoader(
            TensorDataset(*self.samples),
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(self.seed),
        )
        while True:
            for inputs, labels in loader:
                self.loaded += len(labels)
                for _ in range(self.times):
                    yield Batch(inputs, labels)

    def egress_bytes(self) -> int:
        """Return the bytes of all samples loaded so far."""
        return self.loaded * sample_bytes(self.samples)

    def figures(self) -> dict[str, float]:
        """Return by how much the samples were echoed."""
        return {"reuse": float(self.times)}
