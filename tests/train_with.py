"""A job of a trainer that knows DataLoaders; writes what each of its ranks was given.

    python train_with.py TRAINER CACHE OUT [MORE]

OUT gets a file of JSON per rank: the ids of each step, and what the trainer took for the
number of steps in an epoch. An epoch is 40 samples, ten of which are a step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from growcache.errors import ConfigError
from growcache.torch import EpochDataLoader

EPOCHS, EPOCH_SAMPLES, BATCH = 3, 40, 4
SAVED_STEP = 3  # of the second epoch


def loaders(cache: str) -> tuple[EpochDataLoader, EpochDataLoader]:
    train = EpochDataLoader(
        cache, batch_size=BATCH, min_samples=1, samples_per_epoch=EPOCH_SAMPLES
    )
    return train, EpochDataLoader(cache, batch_size=BATCH, fixed=True)


def write(out: Path, rank: int, **found: Any) -> None:
    (out / f"{rank}.json").write_text(json.dumps(found))


def with_lightning(
    cache: str, out: Path, devices: str = "1", checkpoint: str = "", overfit: str = "0"
) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(4, 1)
            self.seen: list[list[int]] = []

        def training_step(self, batch: Any, index: int) -> Any:
            self.seen.append(batch["id"].tolist())
            return self.model(batch["x"] / 1e5).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            loss = self.model(batch["x"] / 1e5).mean()
            self.log("loss", loss, batch_size=len(batch["x"]), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> Any:
            return batch["id"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    train, fixed = loaders(cache)
    if overfit != "0":
        train = EpochDataLoader(cache, batch_size=BATCH, fixed=True)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy="ddp" if devices != "1" else "auto",
        max_epochs=EPOCHS,
        overfit_batches=int(overfit),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(out, every_n_train_steps=13, save_top_k=-1)],
    )
    trainer.fit(module, train, fixed, ckpt_path=checkpoint or None, weights_only=False)
    same, samples = trainer.train_dataloader is train, train.report.samples
    predicted = [] if checkpoint or devices != "1" else trainer.predict(module, fixed)
    write(
        *(out, trainer.global_rank),
        steps=module.seen,
        length=trainer.num_training_batches,
        predicted=[ids.tolist() for ids in predicted],
        same=same,
        samples=samples,
    )
    train.close()
    fixed.close()


def with_torchdata(cache: str, out: Path, saved: str = "") -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    train, fixed = loaders(cache)

    def stateful(workers: int = 0) -> Any:
        return StatefulDataLoader(
            train.dataset,
            batch_size=train.batch_size,
            drop_last=train.drop_last,
            collate_fn=train.collate_fn,
            num_workers=workers,
        )

    loader, steps = stateful(), []
    if saved:
        loader.load_state_dict(torch.load(Path(saved) / "state.pt"))
    for _ in range(1 if saved else 2):
        for batch in loader:
            steps.append(batch["id"].tolist())
            if not saved and len(steps) == len(train) + SAVED_STEP:
                torch.save(loader.state_dict(), out / "state.pt")
    refused = ""
    try:
        next(iter(stateful(2)))
    except ConfigError as error:
        refused = str(error)
    rank = train.loader.options.ranks.rank
    write(out, rank, steps=steps, length=len(train), same=True, refused=refused)
    train.close()
    fixed.close()


def with_accelerate(cache: str, out: Path, saved: str = "") -> None:
    from accelerate import Accelerator

    train, fixed = loaders(cache)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, train)
    state = out / "state"  # the ranks stand at the same place, and one of them says so
    if saved:
        accelerator.load_state(Path(saved) / "state")
        steps = [batch["id"].tolist() for batch in loader]
        write(out, accelerator.process_index, steps=steps, length=len(loader))
        return
    steps = []
    for epoch in range(EPOCHS):
        for step, batch in enumerate(loader):
            steps.append(batch["id"].tolist())
            accelerator.backward(model(batch["x"] / 1e5).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, step + 1) == (1, SAVED_STEP):
                accelerator.save_state(state)
    samples = train.report.samples
    accelerator.load_state(state)
    again = [batch["id"].tolist() for batch in loader]
    length = len(accelerator.skip_first_batches(loader, 1)) + 1
    write(
        *(out, accelerator.process_index),
        steps=steps,
        again=again,
        length=length,
        same=loader is train,
        samples=samples,
    )
    train.close()
    fixed.close()
    accelerator.end_training()


def with_transformers(cache: str, out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(4, 1)
            self.seen: list[list[int]] = []

        def forward(self, x: Any, id: Any, _valid: Any = None, labels: Any = None) -> Any:
            if self.training:
                self.seen.append(id.tolist())
            found = self.model(x / 1e5)
            return {"loss": found.square().mean(), "logits": found}

    train, fixed = loaders(cache)

    class Ours(Trainer):
        def get_train_dataloader(self) -> Any:
            return train

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return fixed

    arguments = TrainingArguments(
        str(out / "o"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        eval_strategy="epoch",
        disable_tqdm=True,
        label_names=["id"],
    )
    model = Model()
    trainer = Ours(model, arguments, eval_dataset=fixed.dataset)
    trainer.train()
    write(
        *(out, arguments.process_index),
        steps=model.seen,
        length=len(trainer.get_train_dataloader()),
        same=True,
        samples=train.report.samples,
    )
    train.close()
    fixed.close()


if __name__ == "__main__":
    trainer, cache, out, *more = sys.argv[1:]
    globals()[f"with_{trainer}"](cache, Path(out), *more)
