"""Seconds from the start of `growcache run` to the first 64 samples, with a distant store.

The store answers every request after 50 ms and lists 1,000 keys at a time (benchmarks/synthetic_s3.py
says which parts of it are synthetic). A sample is 256 KiB. The time runs from the start of the
process until a reader of the index would find 64 samples. A store with ten times as many objects
must not take ten times as long.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Child, median, parser, report, verdict, write_config
from benchmarks.synthetic_s3 import BUCKET
from growcache.cache.index.reader import read_index
from growcache.errors import CacheMissingError

SAMPLES = 64
POLL_SECONDS = 0.01
LIMIT_SECONDS = 120


@contextmanager
def far_store(objects: int, latency_ms: float, folders: int = 0) -> Iterator[str]:
    """Run the synthetic store in a process of its own and yield its endpoint."""
    command = [sys.executable, "-m", "benchmarks.synthetic_s3"]
    command += ["--objects", str(objects), "--latency-ms", str(latency_ms)]
    command += ["--folders", str(folders)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def seconds_to_first(endpoint: str, scratch: Path) -> tuple[float, float]:
    """Return the seconds until there are `SAMPLES` samples, and the seconds that stopping takes."""
    config, cache = scratch / "config.yaml", scratch / "cache"
    write_config(
        config,
        source={
            "url": f"s3://{BUCKET}/recordings/*.npy",
            "storage_options": {"endpoint_url": endpoint, "key": "a", "secret": "b"},
        },
        sampling={"workers": 2},
        cache={"path": str(cache), "max_bytes": "2GB"},
    )
    child = Child.growcache("run", str(config), log=scratch / "run.log")
    while samples_in(cache) < SAMPLES:
        child.check(LIMIT_SECONDS)
        time.sleep(POLL_SECONDS)
    first = child.seconds
    return first, child.interrupt().wall_seconds - first


def samples_in(cache: Path) -> int:
    """Return how many samples a reader would find now."""
    try:
        return read_index(cache).totals.samples
    except CacheMissingError:
        return 0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--latency-ms", type=float, default=50)
    arguments.add_argument("--objects", type=int, nargs="+", default=[10_000, 100_000])
    given = arguments.parse_args()
    rounds = given.rounds or (1 if given.quick else 7)

    times: dict[int, list[tuple[float, float]]] = {count: [] for count in given.objects}
    for _ in range(rounds):
        for count in given.objects:
            with (
                far_store(count, given.latency_ms) as endpoint,
                tempfile.TemporaryDirectory(dir=given.directory) as scratch,
            ):
                times[count].append(seconds_to_first(endpoint, Path(scratch)))

    rows: list[dict[str, object]] = []
    for count, measured in times.items():
        first = [seconds for seconds, _ in measured]
        row: dict[str, object] = {"objects": count, "rounds": rounds, "seconds": median(first)}
        row |= {"best": min(first), "worst": max(first)}
        row["stop seconds"] = median([stop for _, stop in measured])
        if not rows:
            row["goal"] = verdict(median(first), 3.0, at_most=True)
        else:
            base = [seconds for seconds, _ in times[given.objects[0]]]
            ratio = median([a / b for a, b in zip(first, base, strict=True)])
            row |= {"ratio": ratio, "goal": verdict(ratio, 1.3, at_most=True)}
        rows.append(row)
    title = f"First {SAMPLES} samples of 256 KiB, {given.latency_ms:g} ms per request"
    report(title, rows, given.json)


if __name__ == "__main__":
    main()
