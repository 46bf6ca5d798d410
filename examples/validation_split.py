r"""Train on a cache that grows, and validate on one that never changes.

    python examples/validation_split.py \
        --url 's3://bucket/recordings/**/*.npy' --group '(?P<group>sub-[0-9]+)'

All objects of a group, such as a subject, are in the same subset. With a split by file, the
validation loss is too good to be true. Each object is one .npy array and one sample. The task, to
predict a sample's mean, needs no labels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import growcache
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and validate with one cache each.")
    parser.add_argument("--url", required=True, help="objects, with globs")
    parser.add_argument("--group", help="regular expression with (?P<group>…)")
    parser.add_argument("--validation-share", type=float, default=0.2)
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="a local folder")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of each cache")
    parser.add_argument("--validation-samples", type=int, default=1000)
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    share = arguments.validation_share
    fractions = {"train": 1 - share, "validation": share}

    def config(use: str, **cache: Any) -> dict[str, Any]:
        return {
            "source": {"url": arguments.url, "format": "npy"},
            "split": {"group": arguments.group, "fractions": fractions, "use": use},
            "cache": {
                "path": arguments.cache / use,
                "max_bytes": arguments.max_bytes,
                **cache,
            },
        }

    growing = config("train")
    # A fixed number of samples, drawn at random once by the seed, and never evicted.
    fixed = config("validation", eviction="none", max_samples=arguments.validation_samples)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(1))
    with (
        growcache.serve(growing),
        growcache.serve(fixed),
        EpochLoader(
            arguments.cache / "train",
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
        ) as train,
        # Waits until the cache is complete. Each epoch is then one pass in the same order.
        EpochLoader(
            arguments.cache / "validation", batch_size=arguments.batch_size, fixed=True
        ) as validation,
    ):
        optimizer = None
        for epoch in range(arguments.epochs):
            for batch in train:
                loss = loss_of(model, batch)
                optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(
                f"epoch {epoch}: trained on {train.report.samples} samples; "
                f"validation loss {validate(model, validation):.4f} "
                f"on the same {validation.report.samples}"
            )


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    x = batch["x"].float()
    return nn.functional.mse_loss(model(x)[:, 0], x.flatten(1).mean(1))


def validate(model: nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> float:
    total, samples = 0.0, 0
    with torch.no_grad():
        for batch in batches:  # the last one may be smaller
            total += loss_of(model, batch).item() * len(batch["x"])
            samples += len(batch["x"])
    return total / samples


if __name__ == "__main__":
    main()
