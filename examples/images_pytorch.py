"""Train on JPEGs that stay encoded in the cache, and decode them in the loader.

    python examples/images_pytorch.py --url 's3://bucket/photos/*/*.jpg' --classes cat dog

An image's folder names its class. The cache holds about ten times as many encoded images as
decoded ones. Each epoch crops and flips the images anew. `--url '/data/photos/*/*.jpg'` reads a
local folder. Needs: pip install 'growcache[image,torch]'
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import growcache
from growcache.images import Decode
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on JPEGs of a growing cache.")
    parser.add_argument("--url", required=True, help="images, with globs")
    parser.add_argument("--classes", nargs="+", required=True, help="names of folders")
    parser.add_argument("--size", type=int, default=64, help="pixels per side")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    config = {
        "source": {
            "url": arguments.url,
            "format": "image",
            "options": {"classes": arguments.classes},  # the label is an index of this list
        },
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    model = nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=5, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, len(arguments.classes)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with (
        growcache.serve(config),  # draws samples in the background until this block ends
        EpochLoader(
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
            # Runs in the loader's threads. For validation use Decode(size) alone.
            transform=Decode((arguments.size, arguments.size), crop="random", flip=True),
            as_tuple=("image", "label"),
        ) as loader,
    ):
        for epoch in range(arguments.epochs):
            right = 0
            for images, labels in loader:  # uint8 [batch, size, size, 3], int64 [batch]
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
