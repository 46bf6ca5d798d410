"""The least that reading a bucket can cost: GETs of whole objects, the bytes thrown away.

What benchmarks/ingest.py compares growcache with; started by it, as a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Iterator

from obstore.store import S3Store

from benchmarks.servers import Server


async def _reader(store: S3Store, keys: Iterator[str]) -> int:
    total = 0
    for key in keys:
        answer = await store.get_async(key)
        total += len(await answer.bytes_async())
    return total


async def read_all(store: S3Store, keys: list[str], concurrency: int) -> int:
    """Read every key with so many reads in flight; returns the bytes."""
    waiting = iter(keys)
    return sum(await asyncio.gather(*(_reader(store, waiting) for _ in range(concurrency))))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--endpoint", "--bucket", "--prefix"):
        parser.add_argument(name, required=True)
    for name in ("--objects", "--concurrency"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    # One thread per process is obstore's cheapest setting on few cores (its default, one
    # per core, costs up to a third more CPU): leaving it out would lower the bar.
    os.environ["TOKIO_WORKER_THREADS"] = "1"
    keys = [f"{given.prefix}{number:06d}.npy" for number in range(given.objects)]
    random.Random(0).shuffle(keys)
    store = Server("bare", given.endpoint).bucket(given.bucket)
    print(asyncio.run(read_all(store, keys, given.concurrency)))


if __name__ == "__main__":
    main()
