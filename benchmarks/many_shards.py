"""The cost of many shards in the cache to a trainer: 10^7 samples of 64 bytes in 10^4 shards.

Three caches with shards of 1,000 samples, of 100, 1,000 and 10,000 shards. A process of its
own per cache and round takes snapshots, plans a pass, and then goes through the batches of
`EpochLoader`: the whole of one pass, which maps and verifies every shard, and a number of
batches of the next ones that is the same for all. Memory is what the process has for itself
(anonymous pages and page tables; the pages of mapped shards belong to the page cache), beyond
what it had with everything imported, at its most. Batches are gathered by a thread, because `auto`
decides during the first pass, and only in the largest cache does that pass last long enough.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import median, parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache

SHARDS = (100, 1_000, 10_000)
QUICK_SHARDS = (20, 200)
SAMPLES, SHAPE = 1_000, (64,)  # of a shard; of one byte each
BATCH = 64
BATCHES = 30_000  # that are timed
LOOKS = 7  # of snapshot and plan; the median counts
GOAL_MS, GOAL_MB, GOAL_GROWTH = 200.0, 100.0, 1.25


def make(root: Path, shards: int) -> None:
    """Write a cache of that number of shards."""
    with SyntheticCache(root, "|u1", SHAPE) as cache:
        cache.add_thousands(range(shards), SAMPLES)
        cache.complete()


def own_bytes() -> int:
    """Return the bytes that this process has for itself."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(found[name].split()[0]) for name in ("RssAnon", "VmPTE")) * 1024


def look(root: Path, batches: int) -> dict[str, float]:
    """Return the figures of one process."""
    from growcache.loading.options import LoaderOptions
    from growcache.loading.snapshot import Snapshot
    from growcache.loading.windows import plan_snapshot
    from growcache.torch import EpochLoader

    options = LoaderOptions(root, BATCH)
    before = own_bytes()
    taken, planned = [], []
    for number in range(LOOKS):
        began = time.perf_counter()
        with Snapshot.take(root) as snapshot:
            taken.append((time.perf_counter() - began) * 1e3)
            began = time.perf_counter()
            plan_snapshot(options, snapshot, number).windows(options)
            planned.append((time.perf_counter() - began) * 1e3)
    most = own_bytes()
    began = time.perf_counter()
    with EpochLoader(root, batch_size=BATCH, gather="thread") as loader:
        batches_of = iter(_endless(loader))
        next(batches_of)
        first = time.perf_counter() - began
        pass_batches = loader.report.cache_samples // BATCH
        for n in range(1, pass_batches):
            next(batches_of)
            if n % 1000 == 0:
                most = max(most, own_bytes())
        cold = time.perf_counter() - began - first
        wall, cpu = time.perf_counter(), time.process_time()
        for n in range(batches):
            next(batches_of)
            if n % 1000 == 0:
                most = max(most, own_bytes())
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "snapshot ms": statistics.median(taken),
        "plan ms": statistics.median(planned),
        "MB in the trainer": (most - before) / 1e6,
        "first batch ms": first * 1e3,
        "µs per batch, first pass": cold / pass_batches * 1e6,
        "µs per batch": wall / batches * 1e6,
        "CPU µs per batch": cpu / batches * 1e6,
    }


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def look_apart(root: Path, batches: int) -> dict[str, float]:
    """Have a process of its own look."""
    command = [sys.executable, "-m", "benchmarks.many_shards", "--look", str(root)]
    done = subprocess.run(
        [*command, "--batches", str(batches)], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(found: dict[int, list[dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """Yield a line per cache."""
    least = min(found)
    for shards, rounds in found.items():
        line: dict[str, Any] = {"shards": shards}
        line |= {name: median([one[name] for one in rounds]) for name in rounds[0]}
        ratios = [
            b["µs per batch"] / a["µs per batch"]
            for a, b in zip(found[least], rounds, strict=True)
        ]
        line["x the smallest"] = median(ratios)
        if shards == max(found):
            both = line["snapshot ms"] + line["plan ms"]
            line["snapshot + plan"] = verdict(both, GOAL_MS, at_most=True)
            line["memory"] = verdict(line["MB in the trainer"], GOAL_MB, at_most=True)
            line["cost per batch"] = verdict(line["x the smallest"], GOAL_GROWTH, at_most=True)
        yield line


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--batches", type=int, help=f"that are timed (default {BATCHES:,})")
    arguments.add_argument("--cache", type=Path, help="make the caches here, and keep them")
    arguments.add_argument("--look", type=Path, help="be the process that looks (internal)")
    given = arguments.parse_args()
    batches = given.batches or (2_000 if given.quick else BATCHES)
    if given.look is not None:
        print(json.dumps(look(given.look, batches)))
        return 0
    rounds = given.rounds or (1 if given.quick else 3)
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="many-") as folder:
        place = given.cache or Path(folder)
        roots = {n: place / f"cache-{n}" for n in (QUICK_SHARDS if given.quick else SHARDS)}
        for shards, root in roots.items():
            if not root.exists():
                began = time.perf_counter()
                make(root, shards)
                print(
                    f"{shards} shards made in {time.perf_counter() - began:.1f} s", flush=True
                )
        found: dict[int, list[dict[str, float]]] = {shards: [] for shards in roots}
        for _ in range(rounds):
            for shards, root in roots.items():
                found[shards].append(look_apart(root, batches))
    rows = list(table(found))
    report(f"Batches of {BATCH} x 64 bytes, shards of {SAMPLES} samples", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
