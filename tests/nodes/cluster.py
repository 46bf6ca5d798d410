"""Several nodes with a service each, one object server for all, and jobs of torchrun over them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.nginx_s3 import nginx
from growcache.cache.index.reader import read_index
from growcache.errors import CacheError
from tests.nodes.namespaces import STORE_ADDRESS, Namespace, namespaces
from tests.sampling.services import make_source, write_config

ROOT = Path(__file__).parent.parent.parent
SAMPLE_SHAPE = (64, 64)


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


@dataclass
class Node:
    place: Namespace
    folder: Path
    endpoint: str
    service: subprocess.Popen[bytes] | None = None

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def samples(self) -> int:
        try:
            return read_index(self.cache).totals.samples
        except CacheError:
            return 0

    def serve(self, nodes: int) -> None:
        """Run the service as one of that many; an earlier one ends first."""
        self.stop_service()
        options = {"endpoint_url": self.endpoint, "key": "k", "secret": "s"}
        config = write_config(
            self.folder / "config.yaml",
            "s3://bucket/*.npy",
            source={"storage_options": options},
            sampling={"node": self.place.number, "nodes": nodes, "concurrency": 8},
            cache={"path": str(self.cache), "max_bytes": "40MB"},
        )
        with (self.folder / "service.log").open("ab") as log:
            self.service = subprocess.Popen(
                self.place.inside([sys.executable, "-m", "growcache", "run", str(config)]),
                **_quietly(log),
            )

    def stop_service(self) -> None:
        if self.service is not None:
            self.service.terminate()
            self.service.wait(300)
            self.service = None


def _quietly(log: Any) -> dict[str, Any]:
    hidden = ("PYTHONDONTWRITEBYTECODE", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return {
        "stdin": subprocess.DEVNULL,
        "stdout": log,
        "stderr": log,
        "cwd": ROOT,
        "env": environment,
    }


@dataclass
class Job:
    """A run of torchrun on some of the nodes."""

    nodes: list[Node]
    out: Path
    per_node: int
    launched: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def world(self) -> int:
        return self.per_node * len(self.nodes)

    def lines(self, rank: int, event: str = "step") -> list[dict[str, Any]]:
        path = self.out / f"{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        found = [
            json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"
        ]
        return [line for line in found if line["event"] == event]

    def steps(self) -> int:
        """Return the steps that every rank has made."""
        return min(len(self.lines(rank)) for rank in range(self.world))

    def log(self, rank: int) -> str:
        path = self.out / f"{rank}.log"
        return path.read_text() if path.exists() else ""

    def output(self, node: int) -> str:
        return (self.out / f"torchrun{node}.log").read_text()

    def wait(self, seconds: float, nodes: Sequence[int] | None = None) -> list[int]:
        """Return the exit codes of torchrun on these nodes."""
        chosen = self.launched if nodes is None else [self.launched[node] for node in nodes]
        deadline = time.monotonic() + seconds
        return [one.wait(max(0.1, deadline - time.monotonic())) for one in chosen]

    def samples(self, node: int, epoch: int, until: int | None = None) -> list[int]:
        """Return what a node's ranks delivered in an epoch, up to a step."""
        ranks = range(node * self.per_node, (node + 1) * self.per_node)
        lines = [line for rank in ranks for line in self.lines(rank) if line["epoch"] == epoch]
        return [
            x
            for line in lines
            if until is None or line["step"] <= until
            for x in line["samples"]
        ]

    def steps_of_epochs(self) -> list[dict[int, int]]:
        """Return of each rank the number of steps of each epoch."""
        found = []
        for rank in range(self.world):
            steps: defaultdict[int, int] = defaultdict(int)
            for line in self.lines(rank):
                steps[line["epoch"]] += 1
            found.append(dict(steps))
        return found

    def agreements(self) -> list[float]:
        """Return the milliseconds of each all-reduce, on the rank that joined it last."""
        passes: defaultdict[str, list[float]] = defaultdict(list)
        for rank in range(self.world):
            for line in self.log(rank).splitlines():
                if "agreed on in" in line:
                    name = line.split("DEBUG ")[1].split(", with")[0]
                    passes[name].append(float(line.split("agreed on in ")[1].split()[0]))
        return [min(one) for one in passes.values() if len(one) == self.world]

    def common_state(self) -> tuple[int, Path]:
        """Return the last step of which every node saved a state."""
        steps = [
            int(path.name)
            for path in (self.out / "states").iterdir()
            if len(list(path.glob("[0-9]*.json"))) == len(self.nodes)
        ]
        return max(steps), self.out / "states" / str(max(steps))


@dataclass
class Cluster:
    nodes: list[Node]
    folder: Path
    _stack: ExitStack
    _jobs: int = 0

    def launch(self, nodes: list[Node], per_node: int = 1, **settings: Any) -> Job:
        """Start torchrun on these nodes, the first of which is rank 0's."""
        self._jobs += 1
        job = Job(nodes, self.folder / f"job{self._jobs}", per_node)
        job.out.mkdir()
        port = 20_000 + (os.getpid() * 31 + self._jobs) % 20_000
        for number, node in enumerate(nodes):
            command = [sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", str(len(nodes)), "--node-rank", str(number)]
            command += ["--nproc-per-node", str(per_node), "--max-restarts", "0"]
            command += ["--master-addr", nodes[0].place.address, "--master-port", str(port)]
            command += ["-m", "tests.nodes.train", str(node.cache), str(job.out)]
            command += [f"{name}={json.dumps(value)}" for name, value in settings.items()]
            log = (job.out / f"torchrun{number}.log").open("wb")
            quiet = _quietly(log)
            quiet["env"] |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            one = subprocess.Popen(node.place.inside(command), **quiet)
            log.close()
            self._stack.callback(one.wait)
            self._stack.callback(one.kill)
            job.launched.append(one)
        return job


@contextmanager
def cluster(
    folder: Path, bytes_per_second: Sequence[float], objects: int = 3000
) -> Iterator[Cluster]:
    """Make nodes with links of these speeds, and an object server with numbered samples."""
    make_source(folder / "objects" / "bucket", objects, SAMPLE_SHAPE)
    with ExitStack() as stack:
        places = stack.enter_context(namespaces(bytes_per_second))
        endpoint = stack.enter_context(_object_server(folder))
        nodes = []
        for place in places:
            own = folder / f"node{place.number}"
            own.mkdir()
            nodes.append(Node(place, own, endpoint))
            stack.callback(nodes[-1].stop_service)
        yield Cluster(nodes, folder, stack.enter_context(ExitStack()))


@contextmanager
def _object_server(folder: Path) -> Iterator[str]:
    if nginx() is None:
        raise FileNotFoundError("no nginx: apt-get install nginx-light")
    scratch, (port, listing_port) = folder / "nginx", _free_ports()
    scratch.mkdir()
    command = [sys.executable, "-m", "benchmarks.nginx_s3", "--address", STORE_ADDRESS]
    command += ["--folder", str(folder / "objects"), "--scratch", str(scratch)]
    command += ["--port", str(port), "--listing-port", str(listing_port)]
    with (folder / "nginx.log").open("wb") as log:
        server = subprocess.Popen(command, **_quietly(log))
    try:
        wait_until(lambda: _answers(port), 30, "the object server answers")
        yield f"http://{STORE_ADDRESS}:{port}"
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection((STORE_ADDRESS, port), 1).close()
    except OSError:
        return False
    return True


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in (first, second)]
