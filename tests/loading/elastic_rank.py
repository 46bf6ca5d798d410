"""One rank of a job that is killed, and goes on with other ranks.

    python -m tests.loading.elastic_rank LIBRARY CACHE OUT STEPS STATE

LIBRARY is torch, whose ranks all reduce at every step, or numpy, without torch. OUT gets a line of JSON per step and rank, and
after every step a state of one of the ranks in turn. After STEPS steps rank 0 is killed, and the others with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {"batch_size": 4, "min_samples": 1, "seed": 5, "drop_last": False}


def main(library: str, cache: str, out: str, steps: str, state: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loader, reduce = (with_torch if library == "torch" else with_numpy)(cache)
    if state:
        loader.load_state_dict(json.loads(Path(state).read_text()))
    with loader, (Path(out) / f"{rank}.jsonl").open("a") as log:
        for made, batch in enumerate(loader, 1):
            step, valid = loader.global_step, batch["_valid"].tolist()
            delivered = [
                name for name, ok in zip(batch["id"].tolist(), valid, strict=True) if ok
            ]
            log.write(json.dumps([step, delivered]) + "\n")
            log.flush()
            if step % world == rank:
                hidden = Path(out) / f".{step}"
                hidden.write_text(json.dumps(loader.state_dict()))
                hidden.rename(Path(out) / f"{step}.state")
            if made == int(steps) and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            reduce(len(valid))


def with_torch(cache: str) -> tuple[Any, Callable[[int], None]]:
    import torch
    import torch.distributed as dist

    from growcache.torch import EpochLoader

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    def reduce(samples: int) -> None:
        total = torch.tensor([samples])
        dist.all_reduce(total)
        assert int(total) == samples * dist.get_world_size()

    return EpochLoader(cache, **OPTIONS), reduce


def with_numpy(cache: str) -> tuple[Any, Callable[[int], None]]:
    from growcache.numpy import EpochLoader

    return EpochLoader(cache, **OPTIONS), lambda samples: None


if __name__ == "__main__":
    main(*sys.argv[1:])
