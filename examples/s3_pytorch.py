"""Train a small PyTorch model on a cache that grows from a bucket.

    python examples/s3_pytorch.py --url 's3://bucket/train/*.npy'

Each object is one .npy array and one sample. The task, to predict a sample's mean, needs no
labels. Replace it with your own. The environment variable AWS_ENDPOINT_URL selects an S3 server
other than Amazon's. `--url '/data/*.npy'` reads a local folder.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import growcache
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a growing cache with PyTorch.")
    parser.add_argument("--url", required=True, help="objects, with globs")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    config = {
        "source": {"url": arguments.url, "format": "npy"},
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(1))
    model.to(device)
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
            total = 0.0
            for batch in loader:  # a new epoch over all samples cached by now
                x = batch["x"].to(device).float()
                loss = nn.functional.mse_loss(model(x)[:, 0], x.flatten(1).mean(1))
                optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(x)
            mean = total / max(1, loader.report.samples)
            print(f"epoch {epoch}: loss {mean:.4f}; {loader.report}")


if __name__ == "__main__":
    main()
