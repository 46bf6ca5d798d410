"""A real Ray cluster on this machine: a head without processors, and nodes.

It is a process of its own, because Ray reads its environment when it is imported.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

STORE_BYTES = 80_000_000  # the least that Ray takes


class RayCluster:
    """Speaks with the process that owns the nodes; a line for each command, and one for its answer."""

    def __init__(self, commands: IO[str], answers: IO[str]) -> None:
        self._commands = commands
        self._answers = answers
        self.address = self._answer()

    def add_node(self, cpus: int = 1) -> str:
        return self._do(f"add node-{secrets.token_hex(3)} {cpus}")

    def remove_node(self, name: str) -> None:
        """As a machine that loses power."""
        self._do(f"remove {name}")

    def kill_head(self) -> None:
        self._do("behead head")

    def _do(self, command: str) -> str:
        print(command, file=self._commands, flush=True)
        return self._answer()

    def _answer(self) -> str:
        for line in self._answers:
            if line.startswith("answer "):
                return line.split()[1]
        raise EOFError("the cluster ended; what it printed says why")


@contextmanager
def ray_cluster(nodes: int = 2) -> Iterator[RayCluster]:
    folder = tempfile.mkdtemp(prefix="gc-")  # short: a socket's path may have 107 characters
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": folder,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)  # for the drivers, too
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sampling.ray_clusters"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        cluster = RayCluster(process.stdin, process.stdout)
        for _ in range(nodes):
            cluster.add_node()
        yield cluster
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def main() -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    print("answer", cluster.address, flush=True)
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        match line.split():
            case ["add", name, cpus]:
                nodes[name] = cluster.add_node(
                    num_cpus=int(cpus), object_store_memory=STORE_BYTES
                )
            case ["remove", name]:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            case ["behead", name]:
                cluster.head_node.kill_gcs_server()
        print("answer", name, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
