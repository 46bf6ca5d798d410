"""Train on samples that your own function reads, with labels from the objects' keys.

    python examples/user_function.py --url 's3://bucket/train/*/*.npz' --classes healthy ill

The functions are in recordings.py, next to this file. Change them to suit your objects.
`--url '/data/train/*/*.npz'` reads a local folder.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import growcache
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on samples of your own function.")
    parser.add_argument("--url", required=True, help="objects, with globs")
    parser.add_argument("--classes", nargs="+", required=True, help="names of folders")
    parser.add_argument("--length", type=int, default=256, help="steps per window")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    config = {
        "source": {
            "url": arguments.url,
            "format": "recordings:read",
            "options": {"length": arguments.length, "count": 8},
        },
        "sampling": {
            "transform": "recordings:prepare",
            "transform_options": {"classes": arguments.classes},
        },
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    model = nn.Sequential(
        nn.LazyConv1d(16, kernel_size=9, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(16, len(arguments.classes)),
    )
    with (
        growcache.serve(config),  # draws samples in the background until this block ends
        EpochLoader(
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
            as_tuple=("x", "y"),
        ) as loader,
    ):
        optimizer = None
        for epoch in range(arguments.epochs):
            right = 0
            for x, y in loader:  # [batch, length, channels] and [batch]
                logits = model(x.transpose(1, 2))
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
