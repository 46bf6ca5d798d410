"""The training loop, as a program in the environment of one loader; it also writes its format.

It appends a line per batch to a file: when the loop asked for it (monotonic seconds), how long
it waited, and the number of samples.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BATCH = 16
SHAPE = (64, 1024)  # float32: 256 KiB, so a batch has 4 MB
SAMPLE_BYTES = 262_144
STEP_SECONDS = 0.04


@dataclass(frozen=True, slots=True)
class Places:
    """Where a loader finds its samples and its disk.

    Attributes:
        endpoint: URL of the S3 server.
        bucket: of the samples, in every loader's format.
        folder: for the loader's own files.
        disk_bytes: how many bytes it may keep there.
    """

    endpoint: str
    bucket: str
    folder: Path
    disk_bytes: int


def steps(batches: Iterator[int], file: Path) -> None:
    """Take batches (their numbers of samples) and compute, until the process is ended."""
    with file.open("w", buffering=1) as out:
        while True:
            asked = time.monotonic()
            samples = next(batches)
            waited = time.monotonic() - asked
            out.write(f"{asked:.6f} {waited:.6f} {samples}\n")
            time.sleep(STEP_SECONDS)


def main() -> None:
    do, arm, *given = sys.argv[1:]
    module = importlib.import_module(f"benchmarks.slow_link.arms.{arm}")
    if do == "write":
        module.write(*given)
        return
    places, file = json.loads(given[0]), Path(given[1])
    made = Places(**{**places, "folder": Path(places["folder"])})
    steps(module.batches(made), file)


if __name__ == "__main__":
    main()
