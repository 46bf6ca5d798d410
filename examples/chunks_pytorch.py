r"""Train on chunks of samples and labels that are too large for memory and disk.

    python examples/chunks_pytorch.py --classes 2 \
        --x 's3://bucket/train_x_{k}.npy' --y 's3://bucket/train_y_{k}.npy'

Chunks with the same {k} belong together: row i of train_y_7.npy is the label of row i of
train_x_7.npy. Samplers fetch single rows from all chunks, so every batch mixes all chunks.
No chunk is ever loaded or stored as a whole.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import growcache
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on chunks of samples and labels.")
    parser.add_argument("--x", required=True, help="chunks of samples, with {k}")
    parser.add_argument("--y", required=True, help="chunks of their labels, with {k}")
    parser.add_argument("--classes", type=int, required=True, help="the number of classes")
    parser.add_argument("--neighbours", type=int, default=8, help="rows per request")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    config = {
        "source": {
            "fields": {"x": arguments.x, "y": arguments.y},
            "format": "npy",
            "options": {"axis": 0},
        },
        "sampling": {"samples_per_object": arguments.neighbours},
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(arguments.classes)
    ).to(device)
    with (
        growcache.serve(config),  # draws samples in the background until this block ends
        EpochLoader(
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
        ) as loader,
    ):
        optimizer = None
        for epoch in range(arguments.epochs):
            right = 0
            for batch in loader:  # a new epoch over all samples cached by now
                y = batch["y"].to(device).long()
                found = model(batch["x"].to(device).float())
                loss = nn.functional.cross_entropy(found, y)
                optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += int((found.argmax(1) == y).sum())
            report = loader.report
            accuracy = 100 * right / report.samples
            print(f"epoch {epoch}: accuracy {accuracy:.0f} % of {report.samples} samples")


if __name__ == "__main__":
    main()
