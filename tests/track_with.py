"""A job that logs `loader.metrics()` as the documentation says; prints what the tracker kept, as JSON.

python track_with.py TRACKER CACHE OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from growcache.torch import EpochDataLoader, EpochLoader

BATCH, SAMPLES, EPOCHS = 4, 40, 3


def with_tensorboard(cache: str, out: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    loader = EpochLoader(cache, batch_size=BATCH, min_samples=1)
    with SummaryWriter(out) as writer:
        for _ in range(EPOCHS):
            for _ in loader:
                pass
            for name, value in loader.metrics().items():
                writer.add_scalar(name, value, loader.global_step)
    loader.close()
    events = EventAccumulator(str(out))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def with_wandb(cache: str, out: Path) -> Any:
    import wandb

    loader = EpochLoader(cache, batch_size=BATCH, min_samples=1)
    with wandb.init(mode="offline", dir=out, project="test") as run:
        for _ in range(EPOCHS):
            for _ in loader:
                pass
            wandb.log({"loss": 0.5, **loader.metrics()})
        kept = dict(run.summary)
    loader.close()
    return {name: value for name, value in kept.items() if not name.startswith("_")}


def with_mlflow(cache: str, out: Path) -> Any:
    import mlflow

    mlflow.set_tracking_uri(f"file://{out}/mlruns")
    loader = EpochLoader(cache, batch_size=BATCH, min_samples=1)
    with mlflow.start_run() as run:
        for step in range(EPOCHS):
            for _ in loader:
                pass
            mlflow.log_metrics(loader.metrics(), step=step)
    loader.close()
    return dict(mlflow.get_run(run.info.run_id).data.metrics)


def with_lightning(cache: str, out: Path, package: str = "lightning.pytorch") -> Any:
    """Both names of Lightning; batches are 10 an epoch, and every fourth is logged too."""
    import importlib
    import pickle

    import torch

    lightning: Any = importlib.import_module(package)
    loggers = importlib.import_module(f"{package}.loggers")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(batch["x"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    from growcache.torch import LightningMetrics

    callback = pickle.loads(pickle.dumps(LightningMetrics(every_n_steps=4)))
    assert isinstance(callback, lightning.Callback)
    logger = loggers.CSVLogger(out)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=logger,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = EpochDataLoader(cache, batch_size=BATCH, min_samples=1, samples_per_epoch=SAMPLES)
    trainer.fit(Module(), loader)
    loader.close()
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    return [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]


TRACKERS: dict[str, Callable[[str, Path], Any]] = {
    "tensorboard": with_tensorboard,
    "wandb": with_wandb,
    "mlflow": with_mlflow,
    "lightning": with_lightning,
    "pytorch_lightning": lambda cache, out: with_lightning(cache, out, "pytorch_lightning"),
}

if __name__ == "__main__":
    tracker, cache, out = sys.argv[1:]
    print("KEPT" + json.dumps(TRACKERS[tracker](cache, Path(out))))
