"""The cost of metrics and dashboard: CPU of the service and of the dashboard at one scrape a second.

First a real one: `growcache run --http` draws from a local folder, paced, into a small cache that it turns over, and a loader
reads it. In turns of some seconds /metrics is scraped once a second and not at all; the CPU of supervisor, samplers and
dashboard comes from /proc. Then caches of many shards, in the hands of their writer: what the supervisor spends on
metrics.json, and what an answer costs while a service runs and after it. Last, what counting adds to each read, by timeit.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from benchmarks.measure import parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache
from growcache.cache.status import write_status
from growcache.cache.status_model import Status
from growcache.monitor.server import create_app
from growcache.sampling.records import Records
from growcache.sampling.status_builder import cache_fields
from growcache.store.request_counts import RequestCounts

SECONDS, ROUNDS = 10.0, 5
SHARDS, QUICK_SHARDS = (100, 100_000), (100, 1_000)
GOAL_CORE, GOAL_READ_MICROSECONDS = 0.01, 0.5
CONFIG = """
source: {{url: "{0}/source/*.npy", format: npy}}
sampling: {{workers: 1, shard_samples: 8, max_bytes_per_second: 1MB}}
cache: {{path: {0}/cache, max_bytes: 8MB, min_free: 0}}
"""
LOADER = """
import sys, time
from growcache.numpy import EpochLoader
loader = EpochLoader(sys.argv[1], batch_size=8, min_samples=64)
while True:
    for batch in loader:
        time.sleep(0.01)
"""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children(pid: int) -> dict[str, int]:
    """Return the children of a process by what they are."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    named = {}
    for child in map(int, text.split()):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        named["dashboard" if b"dashboard" in words else "sampler"] = child
    return named


def shares(
    pids: dict[str, int], url: str, seconds: float, *, scrapes: bool
) -> dict[str, float]:
    """Return how much of a core each process takes."""
    before, began = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        if scrapes:
            urllib.request.urlopen(url + "metrics", timeout=10).read()
        time.sleep(max(0.0, 1.0 - (time.monotonic() - now)))
    took = time.monotonic() - began
    return {name: (cpu_seconds(pid) - before[name]) / took for name, pid in pids.items()}


def real_run(folder: Path, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Measure a service, its dashboard and a loader."""
    (folder / "source").mkdir()
    for number in range(400):
        values = np.random.default_rng(number).random((16, 256), np.float32)
        np.save(folder / "source" / f"{number:05d}.npy", values)
    config = folder / "growcache.yaml"
    config.write_text(CONFIG.format(folder), encoding="utf-8")
    command = [sys.executable, "-m", "growcache", "run", str(config), "--http", "127.0.0.1:0"]
    service = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    loader = subprocess.Popen([sys.executable, "-c", LOADER, str(folder / "cache")])
    try:
        assert service.stderr is not None
        found = re.search(rb"http://\S+", service.stderr.readline())
        assert found is not None
        url = found[0].decode()
        time.sleep(seconds)  # until the cache turns over
        pids = {"supervisor": service.pid, **children(service.pid)}
        turns: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for number in range(2 * rounds):
            scrapes = number % 2 == 0
            turns[scrapes].append(shares(pids, url, seconds, scrapes=scrapes))
    finally:
        loader.kill()
        service.terminate()
        loader.wait()
        service.wait(30)
    for name in pids:
        on, off = (statistics.median(t[name] for t in turns[kind]) for kind in (True, False))
        row = {"process": name, "% of a core, scraped": 100 * on, "not scraped": 100 * off}
        if name == "dashboard":
            row["goal"] = verdict(100 * on, 100 * GOAL_CORE, at_most=True)
        yield row


def milliseconds(action: Any, rounds: int) -> float:
    """Return the median time of a call."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


def many_shards(folder: Path, shards: int, rounds: int) -> dict[str, Any]:
    """Measure a cache of that number of shards, with its writer and without."""
    root = folder / f"cache-{shards}"
    row: dict[str, Any] = {"shards": shards}
    with SyntheticCache(root, "|u1", (64,)) as filled:
        filled.add_thousands(range(shards), 8)
        records = Records(filled.cache)
        told = Status(**cache_fields(filled.cache))
        told = replace(told, state="running", pid=os.getpid(), updated_at=time.time())
        write_status(root, told)
        row["first metrics.json, ms"] = milliseconds(lambda: records.write_metrics(told, {}), 1)
        row["metrics.json, ms"] = milliseconds(lambda: records.write_metrics(told, {}), rounds)
        client = TestClient(create_app([root]), base_url="http://localhost")
        client.get("/metrics")
        row["/metrics, ms"] = milliseconds(lambda: client.get("/metrics"), rounds)
        row["/status.json, ms"] = milliseconds(lambda: client.get("/status.json"), rounds)
    client = TestClient(create_app([root]), base_url="http://localhost")
    row["stopped: first, ms"] = milliseconds(lambda: client.get("/metrics"), 1)
    row["stopped: next, ms"] = milliseconds(lambda: client.get("/metrics"), rounds)
    return row


def counting() -> dict[str, Any]:
    """Measure what counting adds to a read."""
    counts, loops = RequestCounts(), 200_000

    def counted() -> None:
        began = time.monotonic()
        counts.served_get(time.monotonic() - began, 1000)

    def bare() -> None:
        pass

    def microseconds(function: Callable[[], None]) -> float:
        found = timeit.repeat(function, timer=time.process_time, number=loops, repeat=7)
        return 1e6 * min(found) / loops

    cost = microseconds(counted) - microseconds(bare)
    return {"µs per read": cost, "goal": verdict(cost, GOAL_READ_MICROSECONDS, at_most=True)}


def main() -> int:
    given = parser(__doc__).parse_args()
    rounds = given.rounds or (1 if given.quick else ROUNDS)
    seconds = 3.0 if given.quick else SECONDS
    report("Counting", [counting()], None)
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="monitor-") as folder:
        report(
            "Service, dashboard, loader", list(real_run(Path(folder), rounds, seconds)), None
        )
        counts = QUICK_SHARDS if given.quick else SHARDS
        rows = [many_shards(Path(folder), shards, 5 * rounds) for shards in counts]
        report("Caches of many shards", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
