"""A loop of one's own over remote samples: what benchmarks/formats.py compares growcache with.

Started by it, as a process of its own. Samples of all objects in a random order, for some seconds;
one after another, or by the threads of a pool, each of which takes one at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec

from benchmarks.formats_cases import CASES, SAMPLES
from benchmarks.servers import KEY, SECRET


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--endpoint", "--case"):
        parser.add_argument(name, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("keys", nargs="+")
    given = parser.parse_args()
    # The store's keep-alive and pool are s3fs's; ten connections would hold the threads up.
    files = fsspec.filesystem(
        "s3",
        key=KEY,
        secret=SECRET,
        endpoint_url=given.endpoint,
        config_kwargs={"max_pool_connections": given.threads + 10},
    )
    take = CASES[given.case].by_hand(files)
    wanted = list(itertools.product(given.keys, range(SAMPLES)))
    random.Random(0).shuffle(wanted)
    left, done = iter(wanted), itertools.count()
    began, cpu = time.perf_counter(), time.process_time()
    until = began + given.seconds

    def work(_: int) -> None:
        for key, number in left:  # list iterators are safe among threads
            take(key, number)
            next(done)
            if time.perf_counter() > until:
                return

    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(given.threads) as pool:
        tempfile.tempdir = place  # what is downloaded goes with it
        list(pool.map(work, range(given.threads)))
    samples = next(done)
    spent = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    print(json.dumps({"samples": samples, **spent}), flush=True)
    os._exit(0)  # libraries' threads may still be at work


if __name__ == "__main__":
    main()
