r"""Train with Hugging Face's Accelerate on a cache that grows.

    pip install accelerate
    accelerate launch examples/accelerate_loop.py --url 's3://bucket/train/*.npy'

Each object is one .npy array and one sample. The task, to predict a sample's mean, needs no
labels. ``prepare`` returns the loader unchanged, because the loader handles the ranks of a job
itself and delivers on its own device. ``save_state`` and ``load_state`` include it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import growcache
from growcache.torch import EpochDataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a growing cache with Accelerate.")
    parser.add_argument("--url", required=True, help="objects, with globs")
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="a local folder")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples-per-epoch", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--state", type=Path, help="a folder to save to and resume from")
    arguments = parser.parse_args()

    config = {
        "source": {"url": arguments.url, "format": "npy"},
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    accelerator = Accelerator()
    with (
        growcache.serve(config),  # in the background; all ranks share one service
        EpochDataLoader(
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
            # Over all ranks; a multiple of the samples of an optimizer step.
            samples_per_epoch=arguments.samples_per_epoch,
            device=accelerator.device,
        ) as loader,
    ):
        first = next(iter(loader))["x"].float()
        model: Any = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(1))
        model = model.to(accelerator.device)
        model(first)  # gives the lazy layers their shapes
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if arguments.state is not None and arguments.state.exists():
            accelerator.load_state(arguments.state)
        for epoch in range(arguments.epochs):
            total = torch.zeros((), device=accelerator.device)
            for batch in loader:
                x = batch["x"].float()
                loss = nn.functional.mse_loss(model(x)[:, 0], x.flatten(1).mean(1))
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                total += loss.detach()
            mean = accelerator.reduce(total, "mean").item() / len(loader)
            accelerator.print(f"epoch {epoch}: loss {mean:.4f}; {loader.report}")
        if arguments.state is not None:
            accelerator.save_state(arguments.state)


if __name__ == "__main__":
    main()
