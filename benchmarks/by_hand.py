"""A loop of one's own over remote samples: what benchmarks/formats.py compares growcache with.

Started by it, as a process of its own that stays: a line ``THREADS SECONDS`` on its input, a line
of JSON on its output. Samples of all objects at random; one after another, or by the threads of a
pool, each of which takes one at a time. What a thread opens it opens before, and keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import fsspec

from benchmarks.formats_cases import CASES
from benchmarks.formats_samples import Take
from benchmarks.servers import KEY, SECRET

MOST_THREADS = 64


class Loop:
    """Takes samples until it is told to stop.

    Args:
        take: one of them.
        keys: of the objects.
        samples: of each.
        opens: whether something is opened and kept of each object.
    """

    def __init__(self, take: Take, keys: list[str], samples: int, *, opens: bool) -> None:
        self._take = take
        self._keys = keys
        self._samples = samples
        self._opens = opens
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def run(self, threads: int, seconds: float) -> dict[str, float]:
        """Return what so many seconds came to; what comes first, at the first time, is apart."""
        opening = opening_cpu = 0.0
        if threads not in self._pools:
            self._pools[threads] = ThreadPoolExecutor(threads)
            _, opening, opening_cpu = self._each(threads, self._open)
        until = time.perf_counter() + seconds
        samples, took, cpu = self._each(threads, lambda number: self._work(number, until))
        spent = {"samples": samples, "seconds": took, "cpu": cpu}
        return {**spent, "opening": opening, "opening_cpu": opening_cpu}

    def _each(self, threads: int, work: Callable[[int], int]) -> tuple[int, float, float]:
        """Run work in all threads of a pool, in each once; return samples, seconds and CPU time."""
        together = threading.Barrier(threads)

        def begun(number: int) -> int:
            together.wait()
            return work(number)

        began, cpu = time.perf_counter(), time.process_time()
        samples = sum(self._pools[threads].map(begun, range(threads)))
        return samples, time.perf_counter() - began, time.process_time() - cpu

    def _open(self, number: int) -> int:
        for key in self._keys if self._opens else self._keys[:1]:
            self._take(key, number % self._samples)
        return 0

    def _work(self, number: int, until: float) -> int:
        rng, count = random.Random(number + until), 0
        while time.perf_counter() < until:
            self._take(rng.choice(self._keys), rng.randrange(self._samples))
            count += 1
        return count


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--endpoint", "--case"):
        parser.add_argument(name, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("keys", nargs="+")
    given = parser.parse_args()
    case = CASES[given.case]
    # The store's keep-alive and pool are s3fs's; ten connections would hold the threads up.
    files = fsspec.filesystem(
        "s3",
        key=KEY,
        secret=SECRET,
        endpoint_url=given.endpoint,
        config_kwargs={"max_pool_connections": MOST_THREADS},
    )
    with tempfile.TemporaryDirectory() as place:
        tempfile.tempdir = place  # what is downloaded goes with it
        loop = Loop(case.by_hand(files), given.keys, given.samples, opens=case.opens)
        for line in sys.stdin:
            threads, seconds = line.split()
            print(json.dumps(loop.run(int(threads), float(seconds))), flush=True)
    os._exit(0)  # libraries' threads may still be at work


if __name__ == "__main__":
    main()
