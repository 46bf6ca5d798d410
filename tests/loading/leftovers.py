"""What this process holds open, by kind, so that a test can say what it left.

It may be less than before, because garbage of an earlier test is closed whenever Python comes to it.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path


def descriptors() -> Counter[str]:
    """Count the descriptors by what they are of: a path, or "socket", "pipe", "anon_inode"."""
    found = Counter[str]()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since: that of the list itself, for one
            found[_kind(os.readlink(path))] += 1  # noqa: PTH115 - of a socket it is no path
    return found


def _kind(target: str) -> str:
    return target if target.startswith("/") else target.partition(":")[0]


def memory_files() -> int:
    """Count the maps of memory that loaders share."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:growcache")


def held() -> Counter[str]:
    """Count descriptors and maps."""
    return descriptors() + Counter({"maps of shared memory": memory_files()})


def more_than(before: Counter[str]) -> dict[str, int]:
    """Return what is held beyond what was, by kind.

    Without one pair of pipes: watchdog 7.1 loses it where an observer is stopped before its thread first reads.
    """
    found = dict(held() - before)
    if found.get("pipe") == 2:
        del found["pipe"]
    return found
