"""Train on your own Dataset through a growing cache.

    python examples/dataset_pytorch.py --folder /mnt/slow/recordings --classes healthy ill

The Dataset is an ordinary PyTorch Dataset whose items are slow to read. growcache calls it in
separate processes and threads, and caches the items. Training never waits for the Dataset.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from growcache.torch import EpochLoader


class Recordings(Dataset[tuple[torch.Tensor, int]]):
    """Windows of recordings. Each class has a folder."""

    def __init__(self, folder: str, classes: list[str], length: int) -> None:
        self.files = sorted(Path(folder).glob("*/*.npz"))
        self.classes, self.length = classes, length

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        with np.load(file) as arrays:
            signal = arrays["signal"][: self.length]
        return torch.from_numpy(signal).T, self.classes.index(file.parent.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a Dataset through a cache.")
    parser.add_argument("--folder", required=True, help="a folder of folders of .npz files")
    parser.add_argument("--classes", nargs="+", required=True, help="names of folders")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    make = functools.partial(Recordings, arguments.folder, arguments.classes, length=256)
    model = nn.Sequential(
        nn.LazyConv1d(16, kernel_size=9, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(16, len(arguments.classes)),
    )
    with EpochLoader.from_dataset(  # runs the service in a child process until this block ends
        make,
        arguments.cache,
        max_bytes=arguments.max_bytes,
        names=["x", "y"],
        batch_size=arguments.batch_size,
        min_samples=arguments.min_samples,
        as_tuple=("x", "y"),
    ) as loader:
        optimizer = None
        for epoch in range(arguments.epochs):
            right = 0
            for x, y in loader:  # [batch, channels, length] and [batch]
                logits = model(x)
                loss = nn.functional.cross_entropy(logits, y)
                optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += int((logits.argmax(1) == y).sum())
            accuracy = right / max(1, loader.report.samples)
            print(f"epoch {epoch}: accuracy {accuracy:.0%}; {loader.report}")


if __name__ == "__main__":
    main()
