r"""Train with Lightning's `Trainer` on a cache that grows.

    pip install lightning
    python examples/lightning_fit.py --url 's3://bucket/train/*.npy'

Each object is one .npy array and one sample. The task, to predict a sample's mean, needs no
labels. Lightning asks for the length of an epoch only once, so --samples-per-epoch fixes it. The
program runs unchanged on several devices. The ranks of the job share the cache, and each gets its
part of every step. Lightning does not shard the dataset again. To resume, run the program again,
because checkpoints include the loader's position.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import growcache
from growcache.torch import EpochDataLoader

# These warnings are about loaders with worker processes. This loader needs none.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
warnings.filterwarnings("ignore", message=".*`IterableDataset` has `__len__` defined.*")


class Mean(lightning.LightningModule):
    """Predicts the mean of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(1))

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        x = batch["x"].float()
        loss = nn.functional.mse_loss(self.model(x)[:, 0], x.flatten(1).mean(1))
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def on_train_epoch_end(self) -> None:
        loss = float(self.trainer.callback_metrics["loss"])
        report = self.trainer.train_dataloader.report
        print(f"epoch {self.current_epoch}: loss {loss:.4f}; {report}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a growing cache with Lightning.")
    parser.add_argument("--url", required=True, help="objects, with globs")
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="a local folder")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples-per-epoch", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()

    config = {
        "source": {"url": arguments.url, "format": "npy"},
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    checkpoints = ModelCheckpoint(arguments.checkpoints, every_n_train_steps=10, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    with (
        growcache.serve(config),  # in the background; all ranks share one service
        EpochDataLoader(
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
            samples_per_epoch=arguments.samples_per_epoch,
        ) as loader,
    ):
        module = Mean()
        module.model(next(iter(loader))["x"].float())  # gives the lazy layers their shapes
        last = arguments.checkpoints / "last.ckpt"
        trainer.fit(module, loader, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
