"""The part `kills` of the benchmark `ray_engine`: a cache is filled while actors, the writer and nodes are killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.measure import Child, write_config
from benchmarks.ray_objects import on_ray, served_objects, source_of
from benchmarks.ray_stores import StoreWatch
from growcache.cache.status import read_status
from growcache.errors import CacheError
from tests.sampling.ray_clusters import RayCluster, ray_cluster

NODES, SAMPLERS = 2, 8
NUM_CPUS = NODES / SAMPLERS
SHARD_SAMPLES = 4  # 256 KiB: Ray sends what is below 100 KB within a message
IN_FLIGHT_BYTES = 8_000_000  # two groups
# The cache must not be whole before the last kill, yet a group must end more often than its actor is killed:
# a service gives up on a group on which 15 samplers were killed.
BYTES_PER_SECOND, UNLIMITED = "3MB", "10GB"
WEIGHTS = {"actor": 90, "writer": 5, "node": 5}
PAUSE_SECONDS = (0.1, 1.7)  # before each kill
LIMIT_SECONDS, END_SECONDS = 180.0, 10.0
SAMPLE_SECONDS = 0.1


class Killer:
    """Kills, in a random order, what a service on a cluster consists of; the supervisor itself lives."""

    def __init__(self, cache: Path, cluster: RayCluster, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._cache = cache
        self._cluster = cluster
        self._random = random.Random(seed)
        self._nodes = [cluster.add_node() for _ in range(NODES)]

    def kill(self, service: Child) -> None:
        """Kill one of them, as soon as there is one."""
        time.sleep(self._random.uniform(*PAUSE_SECONDS))
        (kind,) = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        end = service.seconds + LIMIT_SECONDS
        while not self._killed(kind, service.process.pid):
            service.check(end)
            time.sleep(0.05)
        self.killed[kind] += 1

    def _killed(self, kind: str, service: int) -> bool:
        if kind == "node":
            place = self._random.randrange(NODES)
            self._cluster.remove_node(self._nodes[place])
            self._nodes[place] = self._cluster.add_node()
            return True
        pids = self._actors() if kind == "actor" else _writers(service)
        return bool(pids) and _kill(self._random.choice(pids))

    def _actors(self) -> list[int]:
        """Return the older half, because the service waits ever longer before it replaces one that died young."""
        ages: dict[int, float] = {}
        with suppress(CacheError):  # there is none yet
            states = read_status(self._cache).worker_states
            for pid in [one.pid for one in states if one.pid]:
                with suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        ages[pid] = time.time() - process.create_time()
        oldest_first = sorted(ages, key=lambda pid: -ages[pid])
        return oldest_first[: (len(ages) + 1) // 2]


def _writers(service: int) -> list[int]:
    found = []
    for child in psutil.Process(service).children():
        with suppress(psutil.Error):
            if "ray-writer" in child.cmdline():
                found.append(child.pid)
    return found


def _kill(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def measure_kills(
    objects: int, kills: int, seed: int, directory: Path | None
) -> dict[str, Any]:
    """Return the counts of a run with this number of kills."""
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="ray-kills-") as name,
        served_objects(objects) as server,
    ):
        killed, alone = Path(name) / "killed.yaml", Path(name) / "alone.yaml"
        with ray_cluster(0) as cluster:
            sampling = on_ray(
                cluster.address, SAMPLERS, num_cpus=NUM_CPUS, in_flight_bytes=IN_FLIGHT_BYTES
            )
            _write(
                killed, source_of(server), sampling | {"max_bytes_per_second": BYTES_PER_SECOND}
            )
            found = _killed_run(killed, cluster, kills, seed)
            token = os.environ["RAY_AUTH_TOKEN"]  # which all processes of the cluster have
            found["actors left"] = _left(token, "ray::SamplerActor")
        found["Ray's processes left"] = _left(token)
        _write(alone, source_of(server), {"workers": 1})
        Child.growcache("run", str(alone), "--until-full", log=Path(name) / "alone.log").wait()
        ours, expected = (_digests(path.with_suffix("")) for path in (killed, alone))
        check = [sys.executable, "-m", "growcache", "check", str(killed.with_suffix(""))]
        return {
            **found,
            "files": len(ours),
            "files that differ": sum(ours.get(k) != expected.get(k) for k in ours | expected),
            "growcache check": subprocess.run(check, check=False).returncode,
        }


def _write(path: Path, source: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    cache = {"path": str(path.with_suffix("")), "max_bytes": "20GB"}
    write_config(path, source, {"shard_samples": SHARD_SAMPLES, **sampling}, cache)


def _killed_run(config: Path, cluster: RayCluster, kills: int, seed: int) -> dict[str, Any]:
    cache = config.with_suffix("")
    killer = Killer(cache, cluster, seed)
    log = config.with_suffix(".log")
    service = Child.growcache("run", str(config), "--until-full", log=log)
    try:
        with StoreWatch(cluster, SAMPLE_SECONDS) as stores:
            for _ in range(kills):
                killer.kill(service)
            during, took = read_status(cache), service.seconds
            _lift_limit(config)
            whole = service.wait(service.seconds + LIMIT_SECONDS)
    finally:
        if service.process.poll() is None:
            service.process.kill()
    after = read_status(cache)
    return {
        "kills": killer.killed.total(),
        **{f"of {kind}s": killer.killed[kind] for kind in WEIGHTS},
        "seconds": round(took),
        "seconds from the last to the end": round(whole.wall_seconds - took),
        "samples meanwhile": during.samples,
        "samples": after.samples,
        "holes": after.holes,
        "most pinned in a store, MB": stores.most_pinned_bytes_of_a_node / 1e6,
        "most used in a store, MB": stores.most_used_bytes_of_a_node / 1e6,
        "in_flight_bytes, MB": IN_FLIGHT_BYTES / 1e6,
        "looks": stores.looks,
        "spilled MB": stores.spilled_bytes / 1e6,
    }


def _lift_limit(config: Path) -> None:
    """The service follows its file."""
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    values["sampling"]["max_bytes_per_second"] = UNLIMITED
    config.write_text(yaml.safe_dump(values), encoding="utf-8")


def _left(token: str, part: str = "") -> int:
    """Count the processes of a cluster, also those that lost their parent; they have a few seconds to end."""
    end = time.monotonic() + END_SECONDS
    while found := _processes(token, part):
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return len(found)


def _processes(token: str, part: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RAY_AUTH_TOKEN") == token:
                found += [process] if part in " ".join(process.cmdline()) else []
    return found


def _digests(cache: Path) -> dict[str, str]:
    files = (path for path in (cache / "shards").iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
