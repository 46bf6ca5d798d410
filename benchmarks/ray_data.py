"""The part `ray-data` of the benchmark `ray_engine`: five epochs of shuffled batches, by Ray Data and by growcache."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Child, median, write_config
from benchmarks.process_cpu import CpuByKind
from benchmarks.ray_data_reader import KEPT, WAYS
from benchmarks.ray_objects import (
    OBJECT_WINDOWS,
    WINDOW_BYTES,
    on_ray,
    process_kind,
    sent_bytes,
    served_objects,
    source_of,
)
from benchmarks.ray_stores import StoreWatch
from benchmarks.servers import Server
from tests.sampling.ray_clusters import RayCluster, ray_cluster

EPOCHS = 5
NODES = 2
# Object stores of each node and of the head: the dataset fits in all of them several times, or not.
STORE_BYTES, SMALL_STORE_BYTES = 1_000_000_000, 120_000_000
LIMIT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Reading:
    """Five epochs' worth of samples, as one reader got them."""

    first_seconds: float
    seconds: float
    samples: int
    different: int
    sent_bytes: int
    cpu_seconds: float
    most_stored_bytes: int
    spilled_bytes: int


def measure_ray_data(objects: int, rounds: int, directory: Path | None) -> list[dict[str, Any]]:
    """Return a row for each way of reading."""
    found: dict[str, list[Reading]] = {way: [] for way in WAYS}
    small: list[Reading] = []
    with served_objects(objects) as server:
        with ray_cluster(NODES, STORE_BYTES) as cluster:
            for _ in range(rounds):
                for way, readings in found.items():
                    readings.append(read(way, server, cluster, objects, directory))
        with ray_cluster(NODES, SMALL_STORE_BYTES) as cluster:
            for _ in range(rounds):
                small.append(read(KEPT, server, cluster, objects, directory))
    rows = [_row(way, readings, objects) for way, readings in found.items()]
    rows.insert(list(WAYS).index(KEPT) + 1, _row(f"{KEPT}, small stores", small, objects))
    return rows


def read(
    way: str, server: Server, cluster: RayCluster, objects: int, directory: Path | None
) -> Reading:
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="ray-data-") as name,
        StoreWatch(cluster) as stores,
        CpuByKind(process_kind) as cpu,
    ):
        sent, began = sent_bytes(), time.time()
        arguments = [cluster.address, str(objects), str(EPOCHS), str(began)]
        if way.startswith("growcache"):
            said = _read_cache(way, server, cluster, Path(name), arguments)
        else:
            said = _reader(way, server.endpoint, Path(name), arguments)
        sent = sent_bytes() - sent
    return Reading(
        said["first"], said["seconds"], said["samples"], said["different"], sent,
        sum(cpu.seconds.values()), stores.most_used_bytes, stores.spilled_bytes,
    )  # fmt: skip


def _read_cache(
    way: str, server: Server, cluster: RayCluster, place: Path, arguments: Sequence[str]
) -> Mapping[str, Any]:
    cache = place / "cache"
    bound = {"path": str(cache), "max_bytes": "20GB"}
    write_config(place / "config.yaml", source_of(server), on_ray(cluster.address), bound)
    service = Child.growcache("run", str(place / "config.yaml"), log=place / "run.log")
    try:
        return _reader(way, str(cache), place, arguments)
    finally:
        service.interrupt()


def _reader(way: str, where: str, place: Path, arguments: Sequence[str]) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ray_data_reader", way, where, *arguments]
    run = Child(command, place / "reader.log").wait(LIMIT_SECONDS)
    found: Mapping[str, Any] = json.loads(run.output.splitlines()[-1])
    return found


def _row(way: str, readings: Sequence[Reading], objects: int) -> dict[str, Any]:
    windows = objects * OBJECT_WINDOWS
    payload = windows * WINDOW_BYTES
    return {
        "way": way,
        "first batch, s": median([one.first_seconds for one in readings]),
        "all, s": median([one.seconds for one in readings]),
        "samples/s": median([one.samples / one.seconds for one in readings]),
        "after the first, /s": median(
            [one.samples / (one.seconds - one.first_seconds) for one in readings]
        ),
        "different": median([one.different / windows for one in readings]),
        "read ÷ dataset": median([one.sent_bytes / payload for one in readings]),
        "CPU s": median([one.cpu_seconds for one in readings]),
        "stored ÷ dataset": median([one.most_stored_bytes / payload for one in readings]),
        "spilled MB": median([one.spilled_bytes / 1e6 for one in readings]),
    }
