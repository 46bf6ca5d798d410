"""A training loop that a scheduler may stop at any time. It saves a checkpoint, and the next start resumes there.

    python deploy/train.py /cache --checkpoint last.pt                            # one process
    torchrun --nproc-per-node 2 deploy/train.py /cache --checkpoint last.pt       # several, on one or more machines

SIGTERM and SIGUSR1 end it after the current step, with a checkpoint and exit code 75. Replace the model and the step
with your own.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from growcache.torch import EpochLoader

stopping = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda number, frame: stopping.fill_(1))
signal.signal(signal.SIGUSR1, lambda number, frame: stopping.fill_(1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train for a number of steps.")
    parser.add_argument("cache", help="the cache that a service fills on this machine")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("last.pt"), help="all ranks share it"
    )
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank")
    parser.add_argument("--min-samples", type=int, default=1000)
    arguments = parser.parse_args()

    device = start_ranks()
    torch.manual_seed(0)
    model = nn.Linear(2, 1).to(device)
    trained: nn.Module = model
    if distributed.is_initialized():
        trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    parts = {"model": model, "optimizer": optimizer}
    with EpochLoader(
        arguments.cache, batch_size=arguments.batch_size, min_samples=arguments.min_samples
    ) as loader:
        step, epoch = load(arguments.checkpoint, parts, loader)
        loss = torch.tensor(0.0)
        while step < arguments.steps and not must_stop(device):
            for batch in loader:  # an interrupted epoch delivers its rest
                x = batch["x"].to(device).float().flatten(1)
                features = torch.stack([x.mean(1), x.std(1)], 1)
                loss = (trained(features)[:, 0] - x.amax(1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                ends = must_stop(device) or step == arguments.steps
                if ends or step % arguments.save_every == 0:
                    save(arguments.checkpoint, parts, loader, step, epoch)
                if ends:
                    say(f"ends at step {step} in epoch {epoch}")
                    break
            else:
                say(f"epoch {epoch}, step {step}: loss {loss.item():.4f}; {loader.report}")
                epoch += 1
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if step < arguments.steps:
        sys.exit(os.EX_TEMPFAIL)  # otherwise a Kubernetes Job counts it as complete


def start_ranks() -> torch.device:
    """Join the other ranks if torchrun started this one, and return the device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def must_stop(device: torch.device) -> bool:
    """Whether any rank got a signal. All ranks then end after the same step."""
    told = stopping.to(device, copy=True)
    if distributed.is_initialized():
        distributed.all_reduce(told, distributed.ReduceOp.MAX)
    return bool(told.item())


def save(path: Path, parts: Any, loader: EpochLoader, step: int, epoch: int) -> None:
    """Write a checkpoint atomically, with the state of one loader per machine."""
    states = [(machine(), loader.state_dict())]
    if distributed.is_initialized():
        states *= distributed.get_world_size()
        distributed.all_gather_object(states, states[0])
    if is_first():
        saved = {name: part.state_dict() for name, part in parts.items()}
        unfinished = path.with_suffix(".unfinished")
        torch.save({**saved, "loaders": dict(states), "at": (step, epoch)}, unfinished)
        unfinished.replace(path)


def load(path: Path, parts: Any, loader: EpochLoader) -> tuple[int, int]:
    if not path.exists():
        return 0, 0
    saved = torch.load(path, map_location="cpu")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    states = saved["loaders"]
    state = states.get(machine(), states[min(states)])
    if machine() in states or len(states) == 1:  # samples that its cache lacks are refetched
        loader.load_state_dict(state, missing="refetch")
    else:  # a new machine takes the state of another, and reads its own cache
        loader.load_state_dict(state, missing="substitute")
    step, epoch = saved["at"]
    say(f"resumes after step {step} in epoch {epoch}")
    return step, epoch


def machine() -> str:
    """Return the machine's name, because its number may change when a job restarts."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    if is_first():
        print(text, flush=True)


if __name__ == "__main__":
    main()
