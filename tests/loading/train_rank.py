"""One rank of a job: it trains with the others, and all reduce at every step.

    python train_rank.py CACHE OUT EPOCHS key=value…    (the arguments of the loader)

It writes a line of JSON per epoch into OUT: the values of its samples, per step.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from growcache.torch import EpochLoader


def main(cache: str, out: str, epochs: str, *settings: str) -> None:
    options = {name: json.loads(value) for name, value in (s.split("=") for s in settings)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    loader = EpochLoader(cache, **options)
    with loader, Path(out).open("a") as file:
        for _ in range(int(epochs)):
            steps = []
            for batch in loader:
                together = torch.tensor([len(batch["x"])])
                dist.all_reduce(together)
                steps.append(batch["x"][:, 0, 0].tolist())
            file.write(json.dumps({"steps": steps, "skipped": loader.report.skipped}) + "\n")
            file.flush()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
