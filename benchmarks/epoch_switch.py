"""The gap between the last batch of an epoch and the first of the next, while the cache grows.

The loop holds each batch for a step of a given length (sleeping, as one that waits for a
GPU does) and measures how long the loader then takes to hand over the next: within an
epoch, and across the switch to a new one, with its snapshot, plan and maps. All the while
a writer in a process of its own commits shards, and evicts old ones past its bound, so
that every epoch finds another cache.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache, random_samples
from growcache.torch import EpochLoader

BATCH = 32
SHAPE = (64, 1024)  # 256 KiB
SHARD_SAMPLES = 64
GOAL_MS = 5.0


def write(root: Path, interval: float, live_shards: int) -> None:
    """Commit shards until standard input ends, each after ``interval`` seconds."""
    import select

    rng = np.random.default_rng(1)
    with SyntheticCache(root, "<f4", SHAPE, max_bytes=20_000_000_000) as cache:
        first, number = 0, 0
        while not select.select([sys.stdin], [], [], interval if number >= live_shards else 0)[
            0
        ]:
            cache.add_arrays(number, random_samples(rng, "<f4", (SHARD_SAMPLES, *SHAPE)))
            number += 1
            while number - first > live_shards + 2:
                cache.cache.retire([first])
                first += 1
            cache.cache.poll_leases(time.monotonic())
            cache.cache.maintain()


@contextmanager
def writer(root: Path, interval: float, live_shards: int) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.epoch_switch", "--write", str(root)]
    command += ["--interval", str(interval), "--live-shards", str(live_shards)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)


def gaps(loader: EpochLoader, switches: int, step: float) -> tuple[list[float], list[float]]:
    """Return milliseconds from asking to having, within epochs and across switches."""
    within: list[float] = []
    across: list[float] = []
    asked = time.perf_counter()
    for epoch in range(switches + 1):
        first = True
        for batch in loader:
            waited = (time.perf_counter() - asked) * 1e3
            if not first:
                within.append(waited)
            elif epoch:
                across.append(waited)
            first = False
            batch["x"][-1, -1, -1].item()
            time.sleep(step)
            asked = time.perf_counter()
    return within, across


def line(name: str, values: list[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(values, [50, 99])
    return {
        "gap": name,
        "measured": len(values),
        "p50 ms": round(float(p50), 3),
        "p99 ms": round(float(p99), 3),
        "max ms": round(max(values), 3),
    }


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--switches", type=int, help="epochs to go through (default 200)")
    arguments.add_argument("--step-ms", type=float, default=10.0, help="length of a step")
    arguments.add_argument("--interval", type=float, default=0.1, help="seconds between shards")
    arguments.add_argument("--live-shards", type=int, default=12, help="that the writer keeps")
    arguments.add_argument("--write", type=Path, help="be the writer (internal)")
    given = arguments.parse_args()
    if given.write is not None:
        write(given.write, given.interval, given.live_shards)
        return 0
    switches = given.switches or (20 if given.quick else 200)
    samples = given.live_shards * SHARD_SAMPLES
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="switch-") as place:
        root = Path(place) / "cache"
        with (
            writer(root, given.interval, given.live_shards),
            EpochLoader(root, batch_size=BATCH, min_samples=samples) as loader,
        ):
            within, across = gaps(loader, switches, given.step_ms / 1e3)
            done = loader.report
    rows = [line("batch to batch", within), line("epoch to epoch", across)]
    rows[1]["goal p99"] = verdict(rows[1]["p99 ms"], GOAL_MS, at_most=True)
    report(
        f"Gaps seen by a loop with steps of {given.step_ms:g} ms, batches of {BATCH} x 256 KiB, "
        f"on a cache of {done.cache_samples} that changes (reuse {done.reuse:.1f})",
        rows,
        given.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
