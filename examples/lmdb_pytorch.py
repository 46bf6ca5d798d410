"""Train on chunks of pickled points, which are the values of LMDB files in a bucket.

    python examples/lmdb_pytorch.py --url 's3://bucket/chunks/*.lmdb'

Each epoch is a random mixture of the points of all chunks. Training never waits for a whole chunk.
points.py, next to this file, turns a value into a sample. Change it to suit your values.
`--url '/data/chunks/*.lmdb'` reads a local folder.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import growcache
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on pickled values of LMDB files.")
    parser.add_argument("--url", required=True, help="data files, with globs")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="10GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    config = {
        "source": {
            "url": arguments.url,
            "format": "lmdb",
            "options": {"decode": "points:decode"},
        },
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 1))
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
            total = 0.0
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x)[:, 0], y)
                optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss) * len(y)
            mean = total / max(1, loader.report.samples)
            print(f"epoch {epoch}: loss {mean:.3f}; {loader.report}")


if __name__ == "__main__":
    main()
