"""The limit of loaders of large samples: rows copied to buffers in turns, by one or two threads.

Shuffled rows of 256 KiB out of a mapped file are copied to batches of 16.8 MB, and nothing else is
done. With one buffer each batch lies where the one before it lay, which the CPU's cache may still
have: so may do who makes a batch only when it is asked for. Who has one ready before that needs
two, and a third to fill meanwhile. `threads` copy halves of a batch at the same time; `past the
cache` has the C library use stores that leave the cache alone (glibc's tunable, which takes a
process of its own). What none of them reaches no loader does that reads ahead.
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
EPOCHS = 3  # in a process; the first one touches all memory
PAST = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={ROW_BYTES // 4}"}


class Way(NamedTuple):
    """How a process copies.

    Attributes:
        buffers: in turns.
        threads: that copy.
        past_cache: whether stores leave the cache alone.
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
    """Copy rows, by NumPy's concatenate: it lets go of the GIL for each."""
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
    """Return what a process of its own came to."""
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
    arguments.add_argument("--child", type=json.loads, help="used by itself")
    arguments.add_argument("--rows", type=Path, help="used by itself")
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
