"""The minimal cost of reading a bucket: GET every object and discard the bytes.

``--write-to`` adds the minimal cost of keeping them: files of 64 MB that are synced, with the
oldest unlinked beyond a bound, and without checksum, index or order. benchmarks/ingest.py
runs this loop in a process of its own and compares growcache with it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.store import S3Store

from benchmarks.servers import Server

if TYPE_CHECKING:
    from obstore import Bytes

FILE_BYTES = 64_000_000


class Files:
    """A bounded list of files that hold the objects; the oldest file is removed first."""

    def __init__(self, directory: Path, keep_bytes: int) -> None:
        self._directory = directory
        self._keep = max(1, keep_bytes // FILE_BYTES)
        self._written: deque[Path] = deque()
        self._waiting: list[Bytes] = []
        self._lock = threading.Lock()
        self._count = 0

    def add(self, data: Bytes) -> None:
        """Keep one object. A file is written once enough bytes have accumulated."""
        with self._lock:
            self._waiting.append(data)
            if sum(map(len, self._waiting)) >= FILE_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write the accumulated objects to one file, after removing old files to make room."""
        while len(self._written) >= self._keep:
            self._written.popleft().unlink()
        path = self._directory / str(self._count)
        with path.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, sum(map(len, self._waiting))))
            for data in self._waiting:
                file.write(data)
            os.fsync(file.fileno())
        self._written.append(path)
        self._waiting, self._count = [], self._count + 1


async def _reader(store: S3Store, keys: Iterator[str], files: Files | None) -> int:
    total = 0
    for key in keys:
        answer = await store.get_async(key)
        data = await answer.bytes_async()
        total += len(data)
        if files is not None:
            await asyncio.to_thread(files.add, data)
    return total


async def read_all(
    store: S3Store, keys: list[str], concurrency: int, files: Files | None
) -> int:
    """Read every key with `concurrency` reads in flight, and return the bytes read."""
    pending = iter(keys)
    readers = (_reader(store, pending, files) for _ in range(concurrency))
    return sum(await asyncio.gather(*readers))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--endpoint", "--bucket", "--prefix"):
        parser.add_argument(name, required=True)
    for name in ("--objects", "--concurrency"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--write-to", type=Path)
    parser.add_argument("--keep-bytes", type=int, default=0)
    given = parser.parse_args()
    # One thread per process is obstore's cheapest setting on a machine with few cores. Its
    # default, one thread per core, costs up to a third more CPU and would lower the bar.
    os.environ["TOKIO_WORKER_THREADS"] = "1"
    keys = [f"{given.prefix}{number:06d}.npy" for number in range(given.objects)]
    random.Random(0).shuffle(keys)
    store = Server("bare", given.endpoint).bucket(given.bucket)
    files = Files(given.write_to, given.keep_bytes) if given.write_to else None
    print(asyncio.run(read_all(store, keys, given.concurrency, files)), flush=True)
    if files is not None:
        files.flush()
    # obstore's thread may still be releasing the last responses. If the interpreter shuts
    # down meanwhile, one exit in five aborts (obstore 0.12, Python 3.11).
    os._exit(0)


if __name__ == "__main__":
    main()
