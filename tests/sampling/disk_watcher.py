"""A process that looks at a disk every few milliseconds, until its input ends.

``python -m tests.sampling.disk_watcher DISK CACHE`` puts out a line when it begins and, at the
end, a JSON object: the most that was allocated on the whole file system beyond what it had at
first, the most that the blocks of all files under the cache summed up to, and how often and at
what intervals it looked.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from growcache.cache.files import allocated_tree
from tests.disks import used_bytes

PAUSE_SECONDS = 0.002
TREE_EVERY = 4  # looks; a walk through all files takes longer


@contextmanager
def watching(disk: Path, cache: Path) -> Iterator[dict[str, Any]]:
    """Watch for as long as the block lasts; then the dictionary has the findings."""
    found: dict[str, Any] = {}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(disk), str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield found
    finally:
        output, _ = process.communicate()
        found |= json.loads(output)


def main() -> None:
    """Watch."""
    disk, cache = map(Path, sys.argv[1:3])
    empty = used_bytes(disk)
    print("watching", flush=True)
    most = most_blocks = looks = 0
    times = [time.monotonic()]
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        most = max(most, used_bytes(disk) - empty)
        times.append(time.monotonic())
        if looks % TREE_EVERY == 0:
            most_blocks = max(most_blocks, allocated_tree(cache))
        looks += 1
    gaps = [b - a for a, b in pairwise(times)]
    found = {
        "most": most,
        "most_blocks": most_blocks,
        "looks": looks,
        "median_ms": round(1e3 * statistics.median(gaps), 2) if gaps else None,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
