"""A hand-written loop over remote samples, which benchmarks/formats.py compares growcache with.

benchmarks/formats.py starts it as a process that stays. It reads lines ``THREADS SECONDS`` from
standard input and answers each with a line of JSON. Samples are drawn at random from all
objects, either one after another or by the threads of a pool, each of which takes one sample at
a time. A thread opens its files before the clock starts, and keeps them open.
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
    """Takes samples at random for a given time.

    Args:
        take: Reads one sample.
        keys: The objects' keys.
        samples: Number of samples in each object.
        opens: Whether the loop opens every object and keeps it open.
    """

    def __init__(self, take: Take, keys: list[str], samples: int, *, opens: bool) -> None:
        self._take = take
        self._keys = keys
        self._samples = samples
        self._opens = opens
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def run(self, threads: int, seconds: float) -> dict[str, float]:
        """Run for `seconds` and return the counts; the cost of opening is reported separately."""
        opening = opening_cpu = 0.0
        if threads not in self._pools:
            self._pools[threads] = ThreadPoolExecutor(threads)
            _, opening, opening_cpu = self._each(threads, self._open)
        until = time.perf_counter() + seconds
        samples, took, cpu = self._each(threads, lambda number: self._work(number, until))
        spent = {"samples": samples, "seconds": took, "cpu": cpu}
        return {**spent, "opening": opening, "opening_cpu": opening_cpu}

    def _each(self, threads: int, work: Callable[[int], int]) -> tuple[int, float, float]:
        """Run work once in each thread of a pool; return samples, seconds and CPU time."""
        barrier = threading.Barrier(threads)

        def start_together(number: int) -> int:
            barrier.wait()
            return work(number)

        began, cpu = time.perf_counter(), time.process_time()
        samples = sum(self._pools[threads].map(start_together, range(threads)))
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
    # s3fs manages keep-alive and the connection pool. Its default of ten connections would
    # make the threads wait for each other.
    files = fsspec.filesystem(
        "s3",
        key=KEY,
        secret=SECRET,
        endpoint_url=given.endpoint,
        config_kwargs={"max_pool_connections": MOST_THREADS},
    )
    with tempfile.TemporaryDirectory() as place:
        tempfile.tempdir = place  # so that downloads are removed with it
        loop = Loop(case.by_hand(files), given.keys, given.samples, opens=case.opens)
        for line in sys.stdin:
            threads, seconds = line.split()
            print(json.dumps(loop.run(int(threads), float(seconds))), flush=True)
    os._exit(0)  # because threads of the libraries may still be running


if __name__ == "__main__":
    main()
