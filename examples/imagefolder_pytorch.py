r"""Train on millions of image files in a folder per class, and validate on another folder.

    python examples/imagefolder_pytorch.py --classes classes.txt \
        --train 's3://bucket/imagenet/train/*/*.JPEG' --val 's3://bucket/imagenet/val/*/*.JPEG'

Each line of classes.txt names a folder, as `ls train` writes them. Samplers fetch the images in
random order, decode and resize each once, and cache the pixels on the local disk. Each epoch crops
and flips the cached images anew. Without --val, a twentieth of --train is held out.
`--train '/data/train/*/*.jpg'` reads a local folder.
Needs: pip install 'growcache[image,torch]'
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import growcache
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on images in a folder per class.")
    parser.add_argument("--train", required=True, help="images, with globs")
    parser.add_argument("--val", help="images to validate on (default: a part of --train)")
    parser.add_argument("--classes", type=Path, required=True, help="names of the folders")
    parser.add_argument("--balanced", action="store_true", help="draw classes equally often")
    parser.add_argument("--size", type=int, default=256, help="pixels per side, in the cache")
    parser.add_argument("--crop", type=int, default=224, help="pixels that the model sees")
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="a local folder")
    parser.add_argument("--max-bytes", default="100GB", help="the upper bound of each cache")
    parser.add_argument("--val-samples", type=int, default=50_000)
    parser.add_argument("--min-samples", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=100)
    arguments = parser.parse_args()
    classes = arguments.classes.read_text().split()

    def config(use: str, url: str, **cache: Any) -> dict[str, Any]:
        size = [arguments.size, arguments.size]
        made: dict[str, Any] = {
            "source": {"url": url, "format": "image", "options": {"classes": classes}},
            "sampling": {
                "transform": "growcache.images:Decode",
                "transform_options": {"size": size, "crop": "center"},
                "workers": max(1, (os.cpu_count() or 2) // 2),  # the others are for training
            },
            "cache": {"path": arguments.cache / use, "max_bytes": arguments.max_bytes, **cache},
        }
        if not arguments.val:
            made["split"] = {"fractions": {"train": 0.95, "val": 0.05}, "use": use}
        return made

    growing = config("train", arguments.train)
    if arguments.balanced:
        growing["sampling"]["strata"] = {"by": "label", "weights": "balanced"}
    fixed = config(
        "val", arguments.val or arguments.train,
        eviction="none", max_samples=arguments.val_samples,
    )  # fmt: skip

    def augmented(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        crop = arguments.crop
        top, left = rng.integers(arguments.size - crop, size=2, endpoint=True)
        image = sample["image"][top : top + crop, left : left + crop]
        return {**sample, "image": image[:, ::-1] if rng.random() < 0.5 else image}

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(  # for example torchvision.models.resnet50()
        nn.Conv2d(3, 32, kernel_size=5, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, len(classes)),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with (
        growcache.serve(growing),  # draws samples in the background until this block ends
        growcache.serve(fixed),
        EpochLoader(
            arguments.cache / "train",
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
            transform=augmented,
            as_tuple=("image", "label"),
        ) as train,
        EpochLoader(
            arguments.cache / "val",
            batch_size=arguments.batch_size,
            fixed=True,
            as_tuple=("image", "label"),
        ) as val,
    ):
        for epoch in range(arguments.epochs):
            model.train()
            for images, labels in train:  # uint8 [batch, crop, crop, 3], int64 [batch]
                logits = model(pixels(images, device))
                loss = nn.functional.cross_entropy(logits, labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model.eval()
            margin, right = (arguments.size - arguments.crop) // 2, 0
            middle = slice(margin, margin + arguments.crop)
            for images, labels in val:  # the same images in the same order in each epoch
                with torch.no_grad():
                    logits = model(pixels(images[:, middle, middle], device))
                right += int((logits.argmax(1) == labels.to(device)).sum())
            accuracy = 100 * right / val.report.samples
            same = f"accuracy {accuracy:.0f} % of the same {val.report.samples} images"
            print(f"epoch {epoch}: {same}; trained on {train.report}")


def pixels(images: torch.Tensor, device: str) -> torch.Tensor:
    """Return the input of a model: float32 [batch, 3, height, width], around 0."""
    return images.to(device).permute(0, 3, 1, 2).float() / 128 - 1


if __name__ == "__main__":
    main()
