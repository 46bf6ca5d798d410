"""One rank of a job over several nodes: a tiny model, an all-reduce of its gradient at every step.

    torchrun ... -m tests.nodes.train CACHE OUT [key=value ...]

The arguments of the loader are JSON. Others: ``epochs``, ``seconds`` of a step, ``states`` (a folder with those of
a step, to go on from), ``steps`` (leave after as many). OUT gets a line of JSON per step, ``RANK.jsonl``, and of each node
a state per step, ``states/STEP/NODE.json``. The log is in ``RANK.log``.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from growcache.torch import EpochLoader

KEPT_STATES = 6


def main(cache: str, out: str, *settings: str) -> None:
    options = {name: json.loads(value) for name, value in (s.split("=", 1) for s in settings)}
    job = {name: options.pop(name, None) for name in ("epochs", "seconds", "states", "steps")}
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(out)
    log_to(folder / f"{rank}.log")
    model = torch.nn.Linear(1, 1)
    loader = EpochLoader(cache, **options)
    if job["states"]:
        loader.load_state_dict(own_state(Path(job["states"])), missing="substitute")
    with loader, (folder / f"{rank}.jsonl").open("a") as log:
        write(log, event="began", rank=rank, node=node())
        for epoch, batch in steps_of(loader, job["epochs"] or 1, job["steps"]):
            values = batch["x"].flatten(1)[:, :1]
            model(values / 1e6).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            state = loader.state_dict()
            valid = batch.get("_valid", torch.ones(len(values), dtype=torch.bool))
            samples = [int(x) for x in values[valid, 0].tolist()]
            write(log, event="step", epoch=epoch, step=loader.global_step, samples=samples)
            if int(os.environ["LOCAL_RANK"]) == 0:
                save_state(folder / "states", loader.global_step, state)
            time.sleep(job["seconds"] or 0)
        write(log, event="ended")
    dist.destroy_process_group()


def steps_of(loader: Any, epochs: int, most: int | None) -> Iterator[tuple[int, Any]]:
    made = 0
    for epoch in range(epochs):
        for batch in loader:
            yield epoch, batch
            made += 1
            if made == most:
                return


def node() -> int:
    return int(os.environ["GROUP_RANK"])


def own_state(folder: Path) -> Any:
    """Return the state of this node, or another's where it is new."""
    mine = folder / f"{node()}.json"
    path = mine if mine.exists() else min(folder.glob("*.json"))
    return json.loads(path.read_text())


def save_state(folder: Path, step: int, state: Any) -> None:
    at = folder / str(step)
    at.mkdir(parents=True, exist_ok=True)
    hidden = at / f".{node()}"
    hidden.write_text(json.dumps(state))
    hidden.rename(at / f"{node()}.json")
    shutil.rmtree(folder / str(step - KEPT_STATES), ignore_errors=True)


def log_to(path: Path) -> None:
    """Keep what growcache says, with the time of this machine."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(created).3f %(levelname)s %(message)s"))
    logger = logging.getLogger("growcache")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)


def write(log: Any, **values: Any) -> None:
    log.write(json.dumps({"at": time.time(), **values}) + "\n")
    log.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
