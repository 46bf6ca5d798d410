"""A job on a GPU; fails where it does not find what it should.

    python gpu_job.py NAME CACHE [OUT]

The cache has 80 samples, whose ``x`` is full of their ``id``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from growcache.torch import EpochDataLoader, EpochLoader

PROGRAM = Path(__file__)
SLEEP_CYCLES = 200_000_000  # a tenth of a second and more


def loader(cache: str) -> EpochLoader:
    return EpochLoader(cache, batch_size=2, min_samples=1, device="cuda")


def right(batch: dict[str, Any]) -> bool:
    return bool((batch["x"] == batch["id"][:, None]).all())


def leave(cache: str) -> None:
    """End in the middle of an epoch, with work under way; the loader lives to the end."""
    kept = loader(cache)
    batches = iter(kept)
    for _ in range(5):
        batch = next(batches)
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        batch["x"].sum()
    globals()["kept"] = kept, batches


def memory(cache: str) -> None:
    """Have no memory on the device, and then have it."""
    with loader(cache) as made:
        torch.cuda.set_per_process_memory_fraction(1e-6)
        try:
            list(made)
        except torch.OutOfMemoryError:
            torch.cuda.set_per_process_memory_fraction(1.0)
        else:
            raise AssertionError("there was memory")
        assert sum(right(batch) for batch in made) == 40


def untouched(cache: str) -> None:
    """Fork where CUDA was not used yet, behind a loader that was made."""
    made = loader(cache)
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if (child := os.fork()) == 0:
        ended = 1
        try:
            ended = int(sum(right(batch) for batch in made) != 40)
            made.close()
        finally:
            os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0
    assert sum(right(batch) for batch in made) == 40
    made.close()


def forked(cache: str) -> None:
    """Fork where CUDA is in use: the child gets an error, the parent goes on."""
    with loader(cache) as made:
        for batch in made:
            assert right(batch)
            if made.step == 20 and (child := os.fork()) == 0:
                ended = 1
                try:
                    next(iter(made))
                except RuntimeError as error:
                    ended = int("forked subprocess" not in str(error))
                finally:
                    os._exit(ended)
        assert os.waitpid(child, 0)[1] == 0


def failing(cache: str) -> None:
    """Fail in a step on the device."""
    for batch in loader(cache):
        table = torch.zeros(1, device="cuda")
        table[batch["id"] + 1].sum()


def lightning(cache: str) -> None:
    """Have Lightning fit, its device found by itself."""
    import lightning as found

    class Module(found.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.LazyLinear(1)
            self.steps = 0

        def training_step(self, batch: Any, index: int) -> Any:
            assert batch["x"].is_cuda
            assert right(batch)
            self.steps += 1
            return self.model(batch["x"] / 1e6).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    for device in (None, "cuda"):
        module = Module()
        module.model(torch.zeros(1, 32768))
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
        trainer = found.Trainer(accelerator="gpu", devices=1, max_epochs=3, **options)
        with EpochDataLoader(
            cache, batch_size=2, min_samples=1, samples_per_epoch=60, device=device
        ) as made:
            trainer.fit(module, made)
        assert module.steps == 90


def accelerate(cache: str) -> None:
    """Train as Accelerate's loop does."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(32768, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    made = EpochDataLoader(
        *(cache,),
        batch_size=2,
        min_samples=1,
        samples_per_epoch=60,
        device=accelerator.device,
    )
    model, optimizer, batches = accelerator.prepare(model, optimizer, made)
    steps = 0
    for _ in range(3):
        for batch in batches:
            assert right(batch)
            accelerator.backward(model(batch["x"] / 1e6).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == 90
    made.close()
    accelerator.end_training()


def ranks(cache: str, out: str) -> None:
    """Be one of several on the same device, and reduce at every step."""
    torch.distributed.init_process_group("gloo")
    rank, ids = torch.distributed.get_rank(), list[int]()
    with loader(cache) as made:
        for batch in made:
            assert right(batch)
            torch.distributed.all_reduce(batch["x"].mean().cpu())
            ids += batch["id"].tolist()
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    Path(out, f"{rank}.txt").write_text(" ".join(map(str, ids)))


JOBS: dict[str, Any] = {
    job.__name__: job
    for job in (leave, memory, untouched, forked, failing, lightning, accelerate, ranks)
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])
