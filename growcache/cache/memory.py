"""How much memory there is: of this machine, or of the container, where that has less."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Names(NamedTuple):
    """What a version of control groups calls its files, and the figures of `memory.stat`."""

    limit: str
    used: str
    file_pages: tuple[str, ...]


V1 = Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
V2 = Names("memory.max", "memory.current", ("active_file", "inactive_file"))


def memory_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return all memory that this process could have.

    Args:
        proc: where the kernel tells of processes.
        groups: where it tells of control groups.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_number(where / names.limit) for where, names in _groups(proc, groups))
    return min([machine, *(limit for limit in limits if limit is not None)])


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the memory that could be had: what is free, and page cache, which can go.

    Args:
        proc: where the kernel tells of processes.
        groups: where it tells of control groups.
    """
    machine = _figures(proc / "meminfo").get("MemAvailable:")
    # In KiB; kernels that do not say have all of it.
    found = [memory_bytes(proc, groups) if machine is None else 1024 * machine]
    for where, names in _groups(proc, groups):
        limit, used = _number(where / names.limit), _number(where / names.used)
        if limit is not None and used is not None:
            stat = _figures(where / "memory.stat")
            found.append(limit - used + sum(stat.get(name, 0) for name in names.file_pages))
    return max(0, min(found))


def _groups(proc: Path, groups: Path) -> Iterator[tuple[Path, Names]]:
    """Yield the groups whose limits bind this process: its own and those around it."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [groups, groups / "unified"]
        elif "memory" in controllers.split(","):
            mounts = [groups / "memory"]
        else:
            continue
        for mount in mounts:
            # A container may see its group as the root, and not the path to it.
            for where in _upwards(mount, path):
                yield where, V1 if controllers else V2


def _upwards(mount: Path, path: str) -> Iterable[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no such kernel, group or figure
        return []


def _number(path: Path) -> int | None:
    """Return the number that a file holds; None where it is missing, or says "max"."""
    for line in _lines(path):
        if line.strip().isdigit():
            return int(line)
    return None


def _figures(path: Path) -> dict[str, int]:
    """Return a table of names and numbers."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
