"""The connection to a Ray cluster, or to a Ray that the service starts itself."""

from __future__ import annotations

import math
import socket
from typing import Any

import ray

from growcache.config_ray import AUTO, LOCAL, RayConfig

LEAST_STORE_BYTES = 80_000_000  # Ray's minimum for an object store
ANSWER_SECONDS = 5.0
STORE_SHARE = 0.75  # of the smallest object store, because others may use it, too


def connect(config: RayConfig, folder: str | None) -> None:
    """Connect this process, the driver. ``folder`` is for the files of a Ray that it starts.

    Ray raises its own errors if there is no cluster: ConnectionError, RuntimeError, ValueError,
    ….
    """
    common: dict[str, Any] = {
        "namespace": "growcache",
        "logging_level": "ERROR",
        "log_to_driver": True,  # the samplers' output
    }
    if config.address != LOCAL:
        if config.address != AUTO:
            _require_answer(config.address)
        ray.init(address=config.address, **common)
        return
    ray.init(
        address=LOCAL,
        num_cpus=math.ceil(config.num_cpus * config.workers),
        resources={name: each * config.workers for name, each in config.resources.items()},
        labels=config.label_selector,
        object_store_memory=max(
            LEAST_STORE_BYTES, math.ceil(int(config.in_flight_bytes) / STORE_SHARE)
        ),
        include_dashboard=False,
        _temp_dir=folder,
        **common,
    )


def _require_answer(address: str) -> None:
    """Raise OSError if no head answers, because Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS):
        pass


def living_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()
    return [node for node in nodes if node["Alive"]]


def is_member() -> bool:
    """Whether the node of this process's connection belongs to the cluster.

    May raise Ray's errors.
    """
    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here for node in living_nodes())


def node_name(node_id: str, host: str) -> str:
    """Return the host, with a part of the node's id if several nodes share the host."""
    alike = [node for node in living_nodes() if node["NodeManagerHostname"] == host]
    return host if len(alike) < 2 else f"{host}-{node_id[:6]}"


def in_flight_limit(config: RayConfig) -> int:
    """Return the bytes that may be in flight: as configured, if every object store can hold them."""
    stores = [
        node["Resources"]["object_store_memory"]
        for node in living_nodes()
        if "object_store_memory" in node["Resources"]
    ]
    least = math.floor(STORE_SHARE * min(stores, default=math.inf)) if stores else math.inf
    return int(min(int(config.in_flight_bytes), least))
