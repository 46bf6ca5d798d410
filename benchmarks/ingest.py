"""How fast `growcache run` fills a cache, against a bare loop of GETs over the same objects.

The bare loop (benchmarks/bare_loop.py) reads every object once, with as many reads in
flight, and throws the bytes away; "+ files" also keeps them, in plain files. growcache
draws every object once, encodes, checksums, writes, syncs and indexes: with one sampler of as
many reads in flight as the bare loop ("growcache"), and with the two samplers of the default,
which share them ("2 samplers"), both with a bound that memory could not hold, so that they
write past the page cache; and with a small bound that makes one sampler evict and write
through the page cache ("in memory"). "disk" writes as many bytes in the same way out of memory
(benchmarks/disk.py): no cache fills faster. All are timed from the start of the process to its end, so growcache's start and stop count. CPU is
the client's, user + system of all its processes; the server's is not counted, but it
shares the machine. With `--link-mb` all read over a link of that speed: the usual case, in
which the network is what limits.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from obstore.store import ObjectStore

from benchmarks.measure import Child, Run, median, parser, report, verdict, write_config
from benchmarks.servers import Server, make_bucket, running_server
from growcache.cache.system import memory_bytes
from tests.servers.slowlink import slowlink

BUCKET = "bench"
READS = 32  # in flight, of the bare loop and of all samplers together
CPU_GOAL = 1.3  # times the bare loop's, with one sampler


@dataclass(frozen=True, slots=True)
class Case:
    """Objects of one size.

    Attributes:
        name: of the objects' folder.
        shape: of the float32 array each holds.
        objects: their number. A run must take long compared with its start, and the bound must hold
            all of them, because a full cache has nothing to do.
        cache_mb: bound of the cache "in memory". A fraction of the objects, because that is the service
            at work (room comes from eviction), and because on a virtual machine memory that
            a growing page cache takes from the host for the first time costs several times
            the write: the comparison would be with the host.
        shard_samples: such that a shard is a few dozen MB, as with a cache of common size.
        goal: of the bare loop's speed.
    """

    name: str
    shape: tuple[int, ...]
    objects: int
    cache_mb: int
    shard_samples: int
    goal: float

    @property
    def megabytes(self) -> float:
        """Return the payload that is read, in MB."""
        return self.objects * float(np.prod(self.shape)) * 4 / 1e6


FULL = [
    Case("8MiB", (2048, 1024), 1536, 1200, 8, 0.9),
    Case("64KiB", (16, 1024), 65_536, 800, 768, 0.8),
]
QUICK = [
    Case("8MiB", (2048, 1024), 64, 300, 2, 0.9),
    Case("64KiB", (16, 1024), 2048, 100, 128, 0.8),
]
NAMES = [case.name for case in FULL]


def fill(store: ObjectStore, case: Case) -> None:
    """Write the objects: incompressible, and no two alike."""
    whole = io.BytesIO()
    np.save(whole, np.random.default_rng(0).random(case.shape, dtype=np.float32))
    template = whole.getvalue()

    async def write(numbers: Iterator[int]) -> None:
        for number in numbers:
            tail = np.float32(number).tobytes()
            body = template[: -len(tail)] + tail
            await store.put_async(f"{case.name}/{number:06d}.npy", body, use_multipart=False)

    async def write_all() -> None:
        numbers = iter(range(case.objects))
        await asyncio.gather(*(write(numbers) for _ in range(8)))

    asyncio.run(write_all())


@contextmanager
def linked(server: Server, megabytes_per_second: float) -> Iterator[Server]:
    """Put a link of a limited speed before the server; 0: none."""
    if not megabytes_per_second:
        yield server
        return
    with slowlink(server.endpoint, bytes_per_second=megabytes_per_second * 1e6) as link:
        name = f"{server.name} over {megabytes_per_second:g} MB/s"
        yield Server(name, link.endpoint)


def bare(server: Server, case: Case, scratch: Path, *, writing: bool = False) -> Run:
    """Run the bare loop over the case's objects."""
    command = [sys.executable, "-m", "benchmarks.bare_loop", "--endpoint", server.endpoint]
    command += ["--bucket", BUCKET, "--prefix", f"{case.name}/"]
    command += ["--objects", str(case.objects), "--concurrency", str(READS)]
    if writing:
        kept = scratch / "kept"
        kept.mkdir()
        command += ["--write-to", str(kept), "--keep-bytes", str(case.cache_mb * 10**6)]
    run = Child(command, scratch / "bare.log").wait()
    if writing:
        shutil.rmtree(kept)
    return run


def disk(case: Case, scratch: Path) -> Run:
    """Write what growcache writes, in files as large as its shards."""
    file_bytes = int(case.megabytes * 1e6) * case.shard_samples // case.objects
    command = [sys.executable, "-m", "benchmarks.disk", "--directory", str(scratch / "disk")]
    command += ["--files", str(case.objects // case.shard_samples)]
    run = Child([*command, "--file-bytes", str(file_bytes)], scratch / "disk.log").wait()
    shutil.rmtree(scratch / "disk")
    return run


def ingest(server: Server, case: Case, scratch: Path, max_bytes: int, workers: int = 1) -> Run:
    """Run growcache until it has drawn every object once."""
    config = scratch / "config.yaml"
    write_config(
        config,
        source={
            "url": f"s3://{BUCKET}/{case.name}/*.npy",
            "storage_options": server.storage_options,
        },
        sampling={
            "workers": workers,
            "concurrency": READS // workers,
            "shard_samples": case.shard_samples,
        },
        cache={
            "path": str(scratch / "cache"),
            "max_bytes": max_bytes,
            "min_uses": 0,
        },
    )
    arguments = ["run", str(config), "--samples", str(case.objects)]
    run = Child.growcache(*arguments, log=scratch / "run.log").wait()
    shutil.rmtree(scratch / "cache")
    return run


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of each."""

    bare: Run
    writing: Run
    disk: Run
    ours: Run
    two: Run
    in_memory: Run


def measure(server: Server, case: Case, directory: Path | None) -> Round:
    """Run them all, one after the other."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        place = Path(scratch)
        reading = bare(server, case, place)
        writing = bare(server, case, place, writing=True)
        alone = disk(case, place)
        ours = ingest(server, case, place, memory_bytes())
        two = ingest(server, case, place, memory_bytes(), workers=2)
        in_memory = ingest(server, case, place, case.cache_mb * 10**6)
        return Round(reading, writing, alone, ours, two, in_memory)


def row(case: Case, rounds: list[Round]) -> dict[str, object]:
    """Return the figures of one case: medians, and ratios within each round."""

    def speed(runs: list[Run]) -> float:
        return median([case.megabytes / run.wall_seconds for run in runs])

    faster = median([r.bare.wall_seconds / r.ours.wall_seconds for r in rounds])
    dearer = median([r.ours.cpu_seconds / r.bare.cpu_seconds for r in rounds])
    return {
        "objects": f"{case.objects} x {case.name}",
        "rounds": len(rounds),
        "bare MB/s": speed([r.bare for r in rounds]),
        "+ files": speed([r.writing for r in rounds]),
        "disk": speed([r.disk for r in rounds]),
        "growcache": speed([r.ours for r in rounds]),
        "ratio": faster,
        "speed goal": verdict(faster, case.goal, at_most=False),
        "bare CPU s": median([r.bare.cpu_seconds for r in rounds]),
        "+ files CPU s": median([r.writing.cpu_seconds for r in rounds]),
        "growcache CPU s": median([r.ours.cpu_seconds for r in rounds]),
        "CPU ratio": dearer,
        "CPU goal": verdict(dearer, CPU_GOAL, at_most=True),
        "2 samplers MB/s": speed([r.two for r in rounds]),
        "2 samplers ratio": median([r.bare.wall_seconds / r.two.wall_seconds for r in rounds]),
        "2 samplers CPU ratio": median(
            [r.two.cpu_seconds / r.bare.cpu_seconds for r in rounds]
        ),
        "in memory MB/s": speed([r.in_memory for r in rounds]),
        "in memory CPU ratio": median(
            [r.in_memory.cpu_seconds / r.bare.cpu_seconds for r in rounds]
        ),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--server", choices=("auto", "juicefs", "moto", "nginx"), default="auto"
    )
    arguments.add_argument("--case", nargs="+", choices=NAMES, default=NAMES)
    arguments.add_argument("--link-mb", type=float, default=0, help="MB/s of the link")
    given = arguments.parse_args()
    cases = [case for case in (QUICK if given.quick else FULL) if case.name in given.case]
    rounds: dict[Case, list[Round]] = {case: [] for case in cases}
    with running_server(given.server) as server:
        make_bucket(server, BUCKET)
        for case in cases:
            fill(server.writing(BUCKET), case)
        with linked(server, given.link_mb) as link:
            for _ in range(given.rounds or (1 if given.quick else 5)):
                for case in cases:
                    rounds[case].append(measure(link, case, given.directory))
    rows = [row(case, measured) for case, measured in rounds.items()]
    report(f"Ingest from {link.name}, {READS} reads in flight", rows, given.json)


if __name__ == "__main__":
    main()
