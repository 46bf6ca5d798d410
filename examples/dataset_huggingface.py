"""Train on a Hugging Face Dataset through a growing cache.

    python examples/dataset_huggingface.py --dataset my/dataset --classes 10

growcache reads each row and decodes each image once, in separate processes. Training takes the
samples from the cache, and each epoch has more of them. `load_dataset` downloads the whole dataset
first. If that is too much, growcache can read the Parquet files by range: see
docs/reference/formats.md.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset, load_from_disk
from torch import nn

from growcache.torch import EpochLoader

SIDE = 32  # pixels


def smaller(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Resize the images to one size. `with_transform` gives rows in lists."""
    images = [image.convert("RGB").resize((SIDE, SIDE)) for image in rows["image"]]
    return {"image": images, "label": rows["label"]}


def make(dataset: str, split: str) -> Any:
    """Return a dataset from the hub, or from a folder that `save_to_disk` wrote."""
    if Path(dataset).is_dir():
        return load_from_disk(dataset).with_transform(smaller)
    return load_dataset(dataset, split=split).with_transform(smaller)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a Hugging Face Dataset.")
    parser.add_argument("--dataset", required=True, help="its name on the hub, or a folder")
    parser.add_argument("--split", default="train", help="the split of a dataset from the hub")
    parser.add_argument("--classes", type=int, required=True, help="the number of classes")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    model = nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, arguments.classes),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with EpochLoader.from_dataset(  # runs the service in a child process until this block ends
        functools.partial(make, arguments.dataset, arguments.split),
        arguments.cache,
        max_bytes=arguments.max_bytes,
        batch_size=arguments.batch_size,
        min_samples=arguments.min_samples,
        as_tuple=("image", "label"),
    ) as loader:
        for epoch in range(arguments.epochs):
            right = 0
            for images, labels in loader:  # [batch, side, side, 3] and [batch]
                logits = model(images.permute(0, 3, 1, 2).float() / 255)
                loss = nn.functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += int((logits.argmax(1) == labels).sum())
            accuracy = right / max(1, loader.report.samples)
            print(f"epoch {epoch}: accuracy {accuracy:.0%}; {loader.report}")


if __name__ == "__main__":
    main()
