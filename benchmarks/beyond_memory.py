"""A cache twice the size of memory: loading speed, and the effect on the page cache.

Every variant runs in a process of its own, in a control group of bounded memory. Making one
takes root; without it the bound is the machine's memory, and only the cold speeds are
meaningful. Each process reads a bystander, which is a file that another program would want to
keep in memory, and then the cold cache:

- `sequential`: reads the shards' files one after the other; this is the disk's speed;
- `gather cold`: copies rows in random order out of cold maps, as a loader without read-ahead
  does; it covers only a part of the cache because it is slow;
- `nothing let go`: growcache's loader, made to believe that memory is unlimited, two epochs;
- `growcache`: the loader as it is, two epochs.

`page cache` is the size of the files that the group holds in memory at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import median, parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache, random_samples
from growcache.cache.formats.mapped import drop_from_page_cache, is_in_page_cache, map_file
from growcache.loading import maps
from growcache.numpy import EpochLoader

SHAPE, SHARD_SAMPLES = (64, 1024), 256  # 256 KiB each, 64 MiB a shard
BATCH = 64
GATHERED_SHARDS = 2  # shards that the slow variant reads
GOAL_SEQUENTIAL, GOAL_BYSTANDER = 0.9, 0.9
READ_BYTES = 8 << 20
PAGES_BYTES = 1 << 16  # the bystander's residency is checked in steps of this size
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """The sizes of a measurement.

    Attributes:
        shards: Number of shards in the cache.
        memory_bytes: Memory limit of the control group.
        bystander_bytes: Size of the bystander file.
    """

    shards: int
    memory_bytes: int
    bystander_bytes: int


FULL = Case(48, 1536 * MIB, 200 * MIB)
QUICK = Case(12, 1024 * MIB, 100 * MIB)


@dataclass(slots=True)
class Figures:
    """The figures of one variant; sizes are in MB.

    Attributes:
        cold: MB/s over the cold cache.
        again: MB/s over the cache in the second epoch; None if it was read only once.
        bystander: Share of the bystander that is still in memory.
        page_cache: Files that the group holds in memory; None without a group.
        rss: Resident memory of the process.
    """

    cold: float
    again: float | None
    bystander: float
    page_cache: float | None
    rss: float


def shard_files(root: Path) -> list[Path]:
    """Return the shards' sample files in the order of their numbers."""
    return sorted((root / "shards").glob("*.tfrecord"))


def sequential(root: Path) -> int:
    """Read all files, and return the bytes read."""
    buffer, total = np.empty(READ_BYTES, np.uint8), 0
    for path in shard_files(root):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer.data):
                total += count
    return total


def gather_cold(root: Path) -> int:
    """Copy the rows of some shards out of their maps in random order; return the bytes copied."""
    out, total = np.empty(SHAPE, "<f4"), 0
    maps = [map_file(path) for path in shard_files(root)[:GATHERED_SHARDS]]
    order = np.random.default_rng(0).permutation(GATHERED_SHARDS * SHARD_SAMPLES)
    for place, row in zip(*divmod(order, SHARD_SAMPLES), strict=True):
        start = int(row) * (len(maps[place]) // SHARD_SAMPLES)
        out.reshape(-1).view(np.uint8)[:] = maps[place][start : start + out.nbytes]
        total += out.nbytes
    return total


def epoch(loader: EpochLoader) -> int:
    """Read an epoch and access one element of each batch; return the bytes delivered."""
    total = 0
    for batch in loader:
        total += batch["x"].nbytes
        batch["x"].reshape(-1)[-1].item()
    return total


PLAIN: dict[str, Callable[[Path], int]] = {
    "sequential": sequential,
    "gather cold": gather_cold,
}
VARIANTS = (*PLAIN, "nothing let go", "growcache")


def measured(variant: str, root: Path) -> tuple[float, float | None]:
    """Return the MB/s of the first epoch and of the second, if there is one."""
    if (run := PLAIN.get(variant)) is not None:
        began = time.perf_counter()
        total = run(root)
        return total / (time.perf_counter() - began) / 1e6, None
    if variant == "nothing let go":
        vars(maps)["available_memory_bytes"] = lambda: 1 << 60
    rates = []
    with EpochLoader(root, batch_size=BATCH, min_samples=BATCH, gather="thread") as loader:
        for _ in range(2):
            began = time.perf_counter()
            rates.append(epoch(loader) / (time.perf_counter() - began) / 1e6)
    return rates[0], rates[1]


def child(variant: str, root: Path, bystander: Path, group: str) -> None:
    """Run a variant inside the group and print its figures."""
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    bystander.read_bytes()
    cold, again = measured(variant, root)
    found = Figures(cold, again, share_in_memory(bystander), group_files(group), own_rss())
    print(json.dumps(asdict(found)))


def share_in_memory(path: Path) -> float:
    """Return the share of a file that is in the page cache."""
    memory = map_file(path)
    pages = np.split(
        memory[: len(memory) // PAGES_BYTES * PAGES_BYTES], len(memory) // PAGES_BYTES
    )
    return float(np.mean([is_in_page_cache(part) for part in pages]))


def group_files(group: str) -> float | None:
    """Return the MB of files that the group holds in memory."""
    if not group:
        return None
    lines = Path(group, "memory.stat").read_text(encoding="ascii").splitlines()
    stat = {name: int(value) for name, value in map(str.split, lines)}
    return stat.get("total_cache", stat.get("file", 0)) / 1e6


def own_rss() -> float:
    """Return the resident memory of this process in MB, including mapped files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmRSS:")[2].split()[0]) / 1e6


@contextmanager
def memory_group(limit: int) -> Iterator[str]:
    """Make a control group with a memory limit; yield its path, or "" if that is impossible."""
    for mount, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        where = Path(mount, f"growcache-benchmark-{os.getpid()}")
        try:
            where.mkdir()
        except OSError:
            continue
        try:
            (where / name).write_text(str(limit), encoding="ascii")
            yield str(where)
            return
        except OSError:
            continue
        finally:
            with suppress(OSError):
                where.rmdir()
    print("cannot make a control group with bounded memory here (this requires root)")
    yield ""


def run(variant: str, root: Path, bystander: Path, case: Case) -> Figures:
    """Run a variant with a cold cache and return its figures."""
    for path in (*shard_files(root), bystander):
        drop_from_page_cache(path)
    with memory_group(case.memory_bytes) as group:
        command = [sys.executable, "-m", "benchmarks.beyond_memory", "--child", variant]
        command += [str(root), str(bystander), group]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return Figures(**json.loads(found.stdout))


def prepare(case: Case, directory: Path) -> tuple[Path, Path]:
    """Write the cache and the bystander, and return their paths."""
    rng = np.random.default_rng(0)
    rows = random_samples(rng, "<f4", (SHARD_SAMPLES, *SHAPE))
    with SyntheticCache(directory / "cache", "<f4", SHAPE) as cache:
        for number in range(case.shards):
            cache.add_arrays(number, rows)
    bystander = directory / "bystander"
    with bystander.open("wb") as file:
        file.write(rng.bytes(case.bystander_bytes))
        os.fsync(file.fileno())
    return directory / "cache", bystander


def table(taken: dict[str, list[Figures]]) -> Iterator[dict[str, Any]]:
    """Yield a row per variant; ratios are medians over rounds."""
    for name, found in taken.items():
        again = [figures.again for figures in found if figures.again is not None]
        files = [f.page_cache for f in found if f.page_cache is not None]
        pairs = zip(found, taken["sequential"], strict=True)
        line: dict[str, Any] = {
            "variant": name,
            "cold MB/s": median([figures.cold for figures in found]),
            "x sequential": median([one.cold / other.cold for one, other in pairs]),
            "again MB/s": median(again) if again else None,
            "bystander left": median([figures.bystander for figures in found]),
            "page cache MB": median(files) if files else None,
            "RSS MB": median([figures.rss for figures in found]),
        }
        if name == "growcache":
            speed, left = line["x sequential"], line["bystander left"]
            line["speed goal"] = verdict(speed, GOAL_SEQUENTIAL, at_most=False)
            line["bystander goal"] = verdict(left, GOAL_BYSTANDER, at_most=False)
        yield line


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        variant, cache, other, group = sys.argv[2:]
        child(variant, Path(cache), Path(other), group)
        return 0
    given = parser(__doc__).parse_args()
    case = QUICK if given.quick else FULL
    taken: dict[str, list[Figures]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="beyond-") as place:
        root, bystander = prepare(case, Path(place))
        for _ in range(given.rounds or (1 if given.quick else 3)):
            for name in VARIANTS:
                taken[name].append(run(name, root, bystander, case))
    nbytes = case.shards * SHARD_SAMPLES * int(np.prod(SHAPE)) * 4
    title = (
        f"A cold cache of {nbytes / 1e6:,.0f} MB in {case.memory_bytes / 1e6:,.0f} MB of memory"
    )
    report(title, list(table(taken)), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
