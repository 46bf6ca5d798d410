"""The disk's limit: files written from memory past the page cache, as samplers write them.

No cache can be filled faster. benchmarks/ingest.py runs this in a process of its own and
reports the speed next to growcache's.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from growcache.cache.incoming import open_direct, write_direct

THREADS = 2  # as many as two samplers use, or one sampler with two groups
PIECE_BYTES = 256 << 10


def write(path: Path, nbytes: int) -> None:
    """Write one file durably and then remove it, because the disk need not hold all of them."""
    piece = np.random.default_rng(0).integers(0, 256, PIECE_BYTES, np.uint8)
    descriptor = open_direct(path, 0o600)
    if descriptor is None:
        raise SystemExit(f"{path}: its file system has no O_DIRECT; use another --directory")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        write_direct(descriptor, [piece] * (nbytes // PIECE_BYTES), nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    for name in ("--files", "--file-bytes"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    given.directory.mkdir()
    paths = [given.directory / str(number) for number in range(given.files)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda path: write(path, given.file_bytes), paths))


if __name__ == "__main__":
    main()
