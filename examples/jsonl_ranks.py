r"""Train on lines of JSON with several processes, and resume exactly where a job stopped.

    torchrun --nproc-per-node 2 examples/jsonl_ranks.py \
        --url 's3://bucket/text/*.jsonl' --checkpoint checkpoint.pt

Each line is a sample: a text and its label. All ranks read one cache and take the same number of
steps. Rank 0 saves a checkpoint every --save-every steps. Kill the job and start it with the same
command. It resumes after the last checkpoint, in the middle of the epoch, with the next lines.
`--url '/data/text/*.jsonl'` reads a local folder.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import growcache
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on lines of JSON, in several ranks.")
    parser.add_argument("--url", required=True, help="files of lines, with globs")
    parser.add_argument("--classes", type=int, default=2, help="labels are below this number")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="10GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    arguments = parser.parse_args()

    config = {
        "source": {
            "url": arguments.url,
            "format": "jsonl",
            # The bytes of all texts come in sequence, with the offset of each text.
            "options": {"fields": {"text": "bytes", "label": "int64"}},
        },
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    distributed.init_process_group("gloo")  # "nccl" with GPUs
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    model: Any = nn.parallel.DistributedDataParallel(Classifier(arguments.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    serves = os.environ["LOCAL_RANK"] == "0"  # one service on each machine
    with (
        growcache.serve(config) if serves else nullcontext(),
        EpochLoader(  # detects its rank itself
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
        ) as loader,
    ):
        epoch, step, total = 0, 0, 0.0
        if arguments.checkpoint.exists():
            saved = torch.load(arguments.checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])  # on every rank, rank 0's state
            epoch, step, total = saved["at"]
            if rank == 0:
                print(f"resumes in epoch {epoch} after step {step}")
        while epoch < arguments.epochs:
            for batch in loader:  # an interrupted epoch delivers its rest
                loss = nn.functional.cross_entropy(model(batch), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                mean = loss.detach() / world_size
                distributed.all_reduce(mean)
                step, total = step + 1, total + mean.item()
                if rank == 0 and step % arguments.save_every == 0:
                    state = {"model": model, "optimizer": optimizer, "loader": loader}
                    states = {name: each.state_dict() for name, each in state.items()}
                    save({**states, "at": (epoch, step, total)}, arguments.checkpoint)
            if rank == 0:
                print(f"epoch {epoch}: loss {total / step:.9f} in {step} steps", flush=True)
            epoch, step, total = epoch + 1, 0, 0.0
    distributed.destroy_process_group()


class Classifier(nn.Module):
    """Classifies a text by its bytes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(256, 32)
        self.last = nn.Linear(32, classes)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of each text."""
        texts: torch.Tensor = self.mean(batch["text"].long(), batch["text_offsets"][:-1])
        logits: torch.Tensor = self.last(texts)
        return logits


def save(state: dict[str, Any], path: Path) -> None:
    """Write the checkpoint atomically."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
