"""The part `throughput` of the benchmark `ray_engine`: the same cache, filled by local samplers and by actors."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Child, median, write_config
from benchmarks.process_cpu import CpuByKind
from benchmarks.ray_objects import (
    OBJECT_WINDOWS,
    WINDOW_BYTES,
    on_ray,
    process_kind,
    served_objects,
    shard_times,
    source_of,
)
from benchmarks.servers import Server
from growcache.cache.metrics_file import read_metrics
from growcache.monitor.metric_tables import metric_tables
from tests.sampling.ray_clusters import ray_cluster

STORE_BYTES = 500_000_000
SAMPLERS = 2
LIMIT_SECONDS = 120
CASES: Mapping[str, dict[str, Any]] = {
    "64 KiB windows": {},
    "a spectrum of each": {"transform": "benchmarks.ray_objects:spectrum"},
}
STAGES = ("fetch", "transform", "encode", "reserve", "write")
KINDS = ("supervisor", "writer", "workers", "Ray")


@dataclass(frozen=True, slots=True)
class Fill:
    """A cache filled by a whole `growcache run`."""

    first_seconds: float  # until the first shard
    fill_seconds: float  # from then until the last
    shards: int
    start_cpu_seconds: float  # until the first shard, of all processes
    cpu: Mapping[str, float]  # seconds from then on, by kind of process
    stages: Mapping[str, float]  # seconds of a group


def measure_throughput(
    objects: int, rounds: int, directory: Path | None
) -> list[dict[str, Any]]:
    """Return a row for each case and engine."""
    found: dict[tuple[str, str], list[Fill]] = {}
    with served_objects(objects) as server, ray_cluster(SAMPLERS, STORE_BYTES) as cluster:
        engines = {"local": {"workers": SAMPLERS}, "ray": on_ray(cluster.address, SAMPLERS)}
        for _ in range(rounds):
            for case, sampling in CASES.items():
                for engine, where in engines.items():
                    fill = filled(server, {**sampling, **where}, directory)
                    found.setdefault((case, engine), []).append(fill)
    megabytes = objects * OBJECT_WINDOWS * WINDOW_BYTES / 1e6
    return [
        _row(case, engine, fills, found[case, "local"], megabytes)
        for (case, engine), fills in found.items()
    ]


def filled(server: Server, sampling: Mapping[str, Any], directory: Path | None) -> Fill:
    with tempfile.TemporaryDirectory(dir=directory, prefix="ray-engine-") as name:
        config, cache = Path(name) / "config.yaml", Path(name) / "cache"
        bound = {"path": str(cache), "max_bytes": "20GB"}
        write_config(config, source_of(server), sampling, bound)
        with CpuByKind(process_kind) as cpu:
            began = time.time()
            child = Child.growcache("run", str(config), "--until-full", log=Path(name) / "log")
            at_first = _cpu_at_first_shard(child, cache, cpu)
            child.wait()
        times = shard_times(cache)
        stages = metric_tables(read_metrics(cache))["stages"]
        return Fill(
            times[0] - began,
            times[-1] - times[0],
            len(times),
            at_first.total(),
            cpu.seconds - at_first,
            {stage["name"]: stage["amount"] / stage["count"] for stage in stages},
        )


def _cpu_at_first_shard(child: Child, cache: Path, cpu: CpuByKind) -> Counter[str]:
    while not ((cache / "shards").exists() and any((cache / "shards").iterdir())):
        child.check(LIMIT_SECONDS)
        time.sleep(0.02)
    return cpu.seconds


def _row(
    case: str, engine: str, fills: Sequence[Fill], local: Sequence[Fill], megabytes: float
) -> dict[str, Any]:
    def middle(values: Sequence[float]) -> float:
        return median(list(values))

    pairs = list(zip(local, fills, strict=True))
    total = [sum(fill.cpu.values()) for fill in fills]
    total_local = [sum(fill.cpu.values()) for fill in local]
    ratios = [ours / others for ours, others in zip(total, total_local, strict=True)]
    return {
        "case": case,
        "engine": engine,
        "first shard, s": middle([fill.first_seconds for fill in fills]),
        "MB/s": middle([megabytes * (1 - 1 / f.shards) / f.fill_seconds for f in fills]),
        "ratio": middle([one.fill_seconds / other.fill_seconds for one, other in pairs]),
        "CPU s until then": middle([fill.start_cpu_seconds for fill in fills]),
        "CPU s per GB": middle([seconds * 1e3 / megabytes for seconds in total]),
        "CPU ratio": middle(ratios),
        **{
            f"{kind} CPU s": middle([fill.cpu.get(kind, 0.0) for fill in fills])
            for kind in KINDS
        },
        **{
            f"{stage} ms": middle([1e3 * fill.stages.get(stage, 0.0) for fill in fills])
            for stage in STAGES
        },
    }
