r"""Train with Ray Train. Each node has a service and a cache, and the samplers may run on any node.

    pip install 'growcache[ray,torch]' 'ray[train]'
    python examples/ray_train.py --url 's3://bucket/train/*.npy' --workers 8 --gpu --samplers 32

Each object is one .npy array and one sample. The task, to predict a sample's mean, needs no labels.
The first worker of a node runs its service, and all workers of the node read its cache. With ``--samplers N``, N Ray
actors fill each cache. Without it, processes of the node do. The nodes need the store's credentials in their
environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn

import growcache
from growcache.torch import EpochLoader

STATE = "loader.json"


def service_config(arguments: dict[str, Any], node: int, nodes: int) -> dict[str, Any]:
    """Return the config of a node's service. Nodes draw different samples."""
    sampling: dict[str, Any] = {"node": node, "nodes": nodes}
    if arguments["samplers"]:
        # One processor each, on any node. label_selector would select a pool of nodes.
        address = ray.get_runtime_context().gcs_address
        ray_options = {"address": address, "workers": arguments["samplers"]}
        sampling |= {"engine": "ray", "workers": 0, "ray": ray_options}
    return {
        "source": {"url": arguments["url"], "format": "npy"},
        "sampling": sampling,
        "cache": {"path": arguments["cache"], "max_bytes": arguments["max_bytes"]},
    }


def number_of_nodes(node: int) -> int:
    highest = torch.tensor(node, device=get_device())
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest) + 1


@contextlib.contextmanager
def node_service(arguments: dict[str, Any]) -> Any:
    """Run the service of this node in its first worker. The other workers wait until it runs."""
    context = ray.train.get_context()
    config = service_config(
        arguments, context.get_node_rank(), number_of_nodes(context.get_node_rank())
    )
    with contextlib.ExitStack() as opened:
        if context.get_local_rank() == 0:
            opened.enter_context(growcache.serve(config))
        dist.barrier()
        yield


def train(arguments: dict[str, Any]) -> None:
    """Train in one worker."""
    with (
        node_service(arguments),
        EpochLoader(
            arguments["cache"],
            batch_size=arguments["batch_size"],
            min_samples=arguments["min_samples"],
            device=get_device(),
        ) as loader,
    ):
        model: Any = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(1))
        model = model.to(get_device())
        with torch.no_grad():
            model(next(iter(loader))["x"].float())  # gives the lazy layers their shapes
        model = prepare_model(model)
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as folder:
                loader.load_state_dict(json.loads(Path(folder, STATE).read_text()))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for epoch in range(arguments["epochs"]):
            losses = []
            for batch in loader:
                x = batch["x"].float()
                loss = nn.functional.mse_loss(model(x)[:, 0], x.flatten(1).mean(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            report(loader, epoch, torch.stack(losses).mean().item())


def report(loader: EpochLoader, epoch: int, loss: float) -> None:
    """Report to Ray Train. Any number of workers can load the first worker's state."""
    metrics = {"epoch": epoch, "loss": loss, **loader.metrics(prefix="data/")}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}; {loader.report}")
            Path(folder, STATE).write_text(json.dumps(loader.state_dict()))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a growing cache with Ray Train.")
    parser.add_argument("--url", required=True, help="objects, with globs")
    parser.add_argument(
        "--cache", type=Path, default=Path("cache"), help="a local folder on each node"
    )
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2, help="workers of Ray Train")
    parser.add_argument("--gpu", action="store_true", help="use one GPU per worker")
    parser.add_argument("--samplers", type=int, default=0, help="Ray actors per cache")
    parser.add_argument(
        "--results", type=Path, default=Path("ray-results"), help="a folder for Ray Train"
    )
    arguments = parser.parse_args()

    given = {**vars(arguments), "cache": str(arguments.cache.absolute())}
    trainer = TorchTrainer(
        train,
        train_loop_config=given,
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(storage_path=str(arguments.results.absolute())),
    )
    last = trainer.fit().metrics or {}
    print(f"the last epoch's loss is {last['loss']:.4f}")


if __name__ == "__main__":
    main()
