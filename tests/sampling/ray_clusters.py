"""A real Ray cluster on this machine: a head without processors, and nodes.

It is a process of its own, because Ray reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import IO, Any, NamedTuple

STORE_BYTES = 80_000_000  # the least that Ray takes


class StoreUse(NamedTuple):
    """The object store of one node.

    ``used_bytes`` counts objects that were freed, too: Ray deletes them once a second, or where it needs the room.
    ``pinned_bytes`` are those that it may not drop.
    """

    used_bytes: int
    pinned_bytes: int
    spilled_bytes: int  # since the node began


class RayCluster:
    """Speaks with the process that owns the nodes; a line for each command, and one for its answer."""

    def __init__(self, commands: IO[str], answers: IO[str]) -> None:
        self._commands = commands
        self._answers = answers
        self._turn = threading.Lock()
        self.address = self._answer()

    def add_node(self, cpus: int = 1) -> str:
        return self._do(f"add node-{secrets.token_hex(3)} {cpus}")

    def remove_node(self, name: str) -> None:
        """As a machine that loses power."""
        self._do(f"remove {name}")

    def kill_head(self) -> None:
        self._do("behead head")

    def store_use(self) -> dict[str, StoreUse]:
        """Return the use of the object stores of all living nodes, by Ray's number of the node."""
        found = json.loads(self._do("stores of-all"))
        return {node: StoreUse(*use) for node, use in found.items()}

    def _do(self, command: str) -> str:
        with self._turn:
            print(command, file=self._commands, flush=True)
            return self._answer()

    def _answer(self) -> str:
        for line in self._answers:
            if line.startswith("answer "):
                return line.split(maxsplit=1)[1].strip()
        raise EOFError("the cluster ended; what it printed says why")


@contextmanager
def ray_cluster(
    nodes: int = 2,
    store_bytes: int = STORE_BYTES,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[RayCluster]:
    """``more``: variables that Ray reads."""
    folder = tempfile.mkdtemp(prefix="gc-")  # short: a socket's path may have 107 characters
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "120",  # a busy machine
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": folder,
        **more,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)  # for the drivers, too
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sampling.ray_clusters", str(store_bytes)],
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
        process.wait(300)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def main() -> None:
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": int(sys.argv[1])}
    head = {"num_cpus": 0, "include_dashboard": False, **store}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    print("answer", cluster.address, flush=True)
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        match line.split():
            case ["add", answer, cpus]:
                nodes[answer] = cluster.add_node(num_cpus=int(cpus), **store)
            case ["remove", answer]:
                cluster.remove_node(nodes.pop(answer), allow_graceful=False)
            case ["behead", answer]:
                cluster.head_node.kill_gcs_server()
            case ["stores", answer]:
                answer = json.dumps(_store_use(cluster))
        print("answer", answer, flush=True)
    cluster.shutdown()


def _store_use(cluster: Any) -> dict[str, StoreUse]:
    import grpc
    from ray._private import internal_api

    asking: Any = internal_api  # whose functions have no types
    found = {}
    for node in cluster.global_state.node_table():
        if not node["Alive"]:
            continue
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        with suppress(grpc.RpcError):  # it was just removed
            stats = asking.node_stats(*address, include_memory_info=False).store_stats
            found[node["NodeID"]] = StoreUse(
                stats.object_store_bytes_used,
                stats.object_store_bytes_primary_copy,
                stats.spilled_bytes_total,
            )
    return found


if __name__ == "__main__":
    main()
