"""Train on volumes that MONAI reads, through a growing cache.

    python examples/dataset_monai.py --folder /mnt/slow/scans --classes healthy ill

The slow transforms (load, scale and resize) run once for each volume, in separate processes.
growcache replaces MONAI's CacheDataset. It uses a bounded part of the disk instead of memory.
Random transforms run at each delivery.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from monai import transforms
from monai.data import Dataset
from torch import nn

from growcache.torch import EpochLoader

SIZE = (16, 16, 16)


def make(folder: str, classes: list[str]) -> Any:
    """Return a Dataset of the files. Each class has a folder."""
    files = [
        {"image": str(path), "label": label}
        for label, name in enumerate(classes)
        for path in sorted(Path(folder, name).glob("*.nii*"))
    ]
    steps = [
        transforms.LoadImaged("image", ensure_channel_first=True),
        transforms.ScaleIntensityd("image"),
        transforms.Resized("image", SIZE),
    ]
    return Dataset(files, transforms.Compose(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on volumes that MONAI reads.")
    parser.add_argument("--folder", required=True, help="a folder of folders of NIfTI files")
    parser.add_argument("--classes", nargs="+", required=True, help="names of folders")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    flip = transforms.RandFlip(prob=0.5, spatial_axis=0)
    model = nn.Sequential(
        nn.Conv3d(1, 8, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, len(arguments.classes)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with EpochLoader.from_dataset(  # runs the service in a child process until this block ends
        functools.partial(make, arguments.folder, arguments.classes),
        arguments.cache,
        max_bytes=arguments.max_bytes,
        names=["image", "label"],  # without MONAI's notes on the file
        batch_size=arguments.batch_size,
        min_samples=arguments.min_samples,
        as_tuple=("image", "label"),
    ) as loader:
        for epoch in range(arguments.epochs):
            right = 0
            for images, labels in loader:  # [batch, 1, *SIZE] and [batch]
                flipped = torch.stack([torch.as_tensor(flip(image)) for image in images])
                logits = model(flipped)
                loss = nn.functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += int((logits.argmax(1) == labels).sum())
            accuracy = right / max(1, loader.report.samples)
            print(f"epoch {epoch}: accuracy {accuracy:.0%}; {loader.report}")


if __name__ == "__main__":
    main()
