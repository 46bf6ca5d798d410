"""A real Ray cluster on this machine: a head without processors, and two nodes of one each."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 80_000_000

# Of Ray, which reads them when it is imported.
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


class RayCluster:
    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
            },
        )
        self.address: str = self._cluster.address

    def add_node(self, cpus: int = 1) -> Any:
        return self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)

    def remove_node(self, node: Any) -> None:
        """As a machine that loses power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_cluster(nodes: int = 2) -> Iterator[RayCluster]:
    folder = tempfile.mkdtemp(prefix="gc-")  # a socket's path may have 107 characters
    variables = {**VARIABLES, "RAY_TMPDIR": folder}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    cluster = RayCluster()
    try:
        for _ in range(nodes):
            cluster.add_node()
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
