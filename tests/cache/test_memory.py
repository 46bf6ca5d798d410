"""How much memory there is, as kernels of each kind say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from growcache.cache.system import available_memory_bytes, memory_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 1 << 20


def kernel(root: Path, groups: str, **files: str) -> tuple[Path, Path]:
    """Write what a kernel tells; a file's name has ``__`` for ``/``."""
    texts = {
        "proc/meminfo": f"MemTotal: {MACHINE // 1024} kB\nMemAvailable: 512000 kB\n",
        "proc/self/cgroup": groups,
        **{name.replace("__", "/"): text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


def test_without_a_group_it_is_that_of_the_machine(tmp_path: Path) -> None:
    where = kernel(tmp_path, "")
    assert memory_bytes(*where) == MACHINE
    assert available_memory_bytes(*where) == 512_000 * 1024


def test_the_second_version_of_groups_bounds_it(tmp_path: Path) -> None:
    stat = f"anon {90 * MIB}\nactive_file {20 * MIB}\ninactive_file {10 * MIB}\n"
    where = kernel(
        tmp_path,
        "0::/outer/inner\n",
        **{
            "cgroup/memory.stat": "",
            "cgroup/outer/memory.max": f"{200 * MIB}\n",
            "cgroup/outer/memory.current": f"{120 * MIB}\n",
            "cgroup/outer/memory.stat": stat,
            "cgroup/outer/inner/memory.max": "max\n",
            "cgroup/outer/inner/memory.current": f"{120 * MIB}\n",
        },
    )
    assert memory_bytes(*where) == 200 * MIB
    assert available_memory_bytes(*where) == (200 - 120 + 30) * MIB


@pytest.mark.parametrize("seen", ["memory", "memory/docker/ab"])
def test_the_first_version_bounds_it_whether_its_path_is_seen_or_not(
    tmp_path: Path, seen: str
) -> None:
    stat = f"active_file 1\ntotal_active_file {5 * MIB}\ntotal_inactive_file {MIB}\n"
    where = kernel(
        tmp_path,
        "11:pids:/docker/ab\n4:memory:/docker/ab\n0::/\n",
        **{
            f"cgroup/{seen}/memory.limit_in_bytes": f"{100 * MIB}\n",
            f"cgroup/{seen}/memory.usage_in_bytes": f"{98 * MIB}\n",
            f"cgroup/{seen}/memory.stat": stat,
        },
    )
    assert memory_bytes(*where) == 100 * MIB
    assert available_memory_bytes(*where) == 8 * MIB


def test_a_group_without_a_bound_bounds_nothing(tmp_path: Path) -> None:
    where = kernel(
        tmp_path,
        "4:memory:/\n",
        **{
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "1000\n",
        },
    )
    assert memory_bytes(*where) == MACHINE
    assert available_memory_bytes(*where) == 512_000 * 1024


def test_this_machine_says_something_sensible() -> None:
    assert 0 < available_memory_bytes() <= memory_bytes() <= MACHINE
