"""The limit for loaders of large samples: the speed of copying rows into rotating buffers.

Shuffled rows of 256 KiB are copied out of a mapped file into batches of 16.8 MB, and nothing
else is done. With one buffer, each batch overwrites the one before, which may still be in the
CPU's cache; only a loader that makes a batch on demand can work that way. A loader that keeps
one batch ready needs a second buffer, and a third to fill meanwhile. `threads` is the number of
threads that copy parts of a batch at the same time. `past the cache` makes the C library use
stores that bypass the CPU's cache (a glibc tunable, which requires a process of its own). No
loader that reads ahead can exceed these speeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import median, parser, report
from benchmarks.synthetic_cache import random_samples
from growcache.schema import Array

BATCH = 64
ROW_BYTES = 256 * 1024
ROWS, QUICK_ROWS = 2048, 512
EPOCHS = 3  # per process; the first epoch touches all memory and the last one is timed
PAST = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={ROW_BYTES // 4}"}


class Way(NamedTuple):
    """How a process copies.

    Attributes:
        buffers: Number of rotating buffers.
        threads: Number of copying threads.
        past_cache: Whether stores bypass the CPU's cache.
    """

    buffers: int
    threads: int = 1
    past_cache: bool = False


WAYS = [
    *(Way(buffers) for buffers in (1, 2, 3, 4, 8)),
    *(Way(buffers, 2) for buffers in (1, 3, 8)),
    *(Way(buffers, past_cache=True) for buffers in (1, 3, 8)),
]
BASE = Way(8)  # `memcpy` of benchmarks.peers


def copy(rows: Array, chosen: Sequence[int], out: Array) -> None:
    """Copy rows, by NumPy's concatenate because it releases the GIL."""
    np.concatenate([rows[i] for i in chosen], out=out)


def run(path: Path, buffers: int, threads: int) -> float:
    """Return the bytes copied per second."""
    rows = np.load(path, mmap_mode="r")
    batches = [np.zeros((BATCH, ROW_BYTES), np.uint8) for _ in range(buffers)]
    rng, part = np.random.default_rng(0), BATCH // threads
    with ThreadPoolExecutor(threads) as pool:
        for _epoch in range(EPOCHS):
            order = rng.permutation(len(rows))
            began = time.perf_counter()
            for number, chosen in enumerate(order.reshape(-1, threads, part).tolist()):
                out = batches[number % buffers].reshape(threads, -1)
                list(pool.map(copy, [rows] * threads, chosen, out))
            seconds = time.perf_counter() - began
    return float(rows.nbytes / seconds)


def measured(path: Path, way: Way) -> float:
    """Return the speed measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.copy_limit", "--child", json.dumps(way[:2])]
    done = subprocess.run(
        [*command, "--rows", path],
        env={**os.environ, **(PAST if way.past_cache else {})},
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(done.stdout)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--child", type=json.loads, help="be the process that copies (internal)"
    )
    arguments.add_argument("--rows", type=Path, help="file of the rows to copy (internal)")
    given = arguments.parse_args()
    if given.child:
        print(run(given.rows, *given.child))
        return 0
    speeds: dict[int, list[float]] = {number: [] for number in range(len(WAYS))}
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="copy-limit-") as place:
        path = Path(place) / "rows.npy"
        count = QUICK_ROWS if given.quick else ROWS
        np.save(path, random_samples(np.random.default_rng(0), "|u1", (count, ROW_BYTES)))
        for _round in range(given.rounds or (1 if given.quick else 7)):
            for number, way in enumerate(WAYS):
                speeds[number].append(measured(path, way))
    base = speeds[WAYS.index(BASE)]
    table: list[dict[str, Any]] = [
        {
            "buffers": way.buffers,
            "threads": way.threads,
            "past the cache": "yes" if way.past_cache else "",
            "MB/s": median([s / 1e6 for s in speeds[number]]),
            "x 8 buffers": median([s / b for s, b in zip(speeds[number], base, strict=True)]),
        }
        for number, way in enumerate(WAYS)
    ]
    report("Rows of 256 KiB copied to batches of 16.8 MB", table, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
