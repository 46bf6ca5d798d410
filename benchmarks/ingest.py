"""How fast `growcache run` fills a cache, against a bare loop of GETs over the same objects.

The bare loop (benchmarks/bare_loop.py) reads every object once, with as many reads in
flight, and throws the bytes away; growcache draws every object once, encodes, checksums,
writes, syncs, indexes and evicts. Both are timed from the start of the process to its end,
so growcache's start and stop count. CPU is the client's, user + system of all its
processes; the server's is not counted, but it shares the machine. With `--link-mb` both
read over a link of that speed: the usual case, in which the network is what limits.
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from obstore.store import S3Store

from benchmarks.measure import Child, Run, median, parser, report, verdict, write_config
from benchmarks.servers import Server, make_bucket, running_server
from tests.servers.slowlink import slowlink

BUCKET = "bench"
WORKERS = 2
CONCURRENCY = 16  # per worker


@dataclass(frozen=True, slots=True)
class Case:
    """Objects of one size.

    Attributes:
        name: of the objects' folder.
        shape: of the float32 array each holds.
        objects: how many.
        max_bytes: bound of the cache; less than all objects, so that eviction is at work.
    """

    name: str
    shape: tuple[int, ...]
    objects: int
    max_bytes: str

    @property
    def megabytes(self) -> float:
        """Return the payload of all objects, in MB."""
        return self.objects * float(np.prod(self.shape)) * 4 / 1e6


FULL = [
    Case("8MiB", (2048, 1024), 640, "4GB"),
    Case("64KiB", (16, 1024), 32_768, "1500MB"),
]
QUICK = [
    Case("8MiB", (2048, 1024), 64, "400MB"),
    Case("64KiB", (16, 1024), 2048, "100MB"),
]


def fill(store: S3Store, case: Case) -> None:
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


def bare(server: Server, case: Case, scratch: Path) -> Run:
    """Run the bare loop over the case's objects."""
    command = [sys.executable, "-m", "benchmarks.bare_loop", "--endpoint", server.endpoint]
    command += ["--bucket", BUCKET, "--prefix", f"{case.name}/"]
    command += ["--objects", str(case.objects), "--concurrency", str(WORKERS * CONCURRENCY)]
    return Child(command, scratch / "bare.log").wait()


def ingest(server: Server, case: Case, scratch: Path) -> Run:
    """Run growcache until it has drawn every object once."""
    config = scratch / "config.yaml"
    write_config(
        config,
        source={
            "url": f"s3://{BUCKET}/{case.name}/*.npy",
            "storage_options": server.storage_options,
        },
        sampling={"workers": WORKERS, "concurrency": CONCURRENCY},
        cache={"path": str(scratch / "cache"), "max_bytes": case.max_bytes, "min_uses": 0},
    )
    arguments = ["run", str(config), "--samples", str(case.objects)]
    return Child.growcache(*arguments, log=scratch / "run.log").wait()


def row(case: Case, rounds: list[tuple[Run, Run]]) -> dict[str, object]:
    """Return the figures of one case: medians, and ratios within each round."""
    floor = [bare_run for bare_run, _ in rounds]
    ours = [run for _, run in rounds]
    speed = median([b.wall_seconds / g.wall_seconds for b, g in rounds])
    cost = median([g.cpu_seconds / b.cpu_seconds for b, g in rounds])
    return {
        "objects": f"{case.objects} x {case.name}",
        "rounds": len(rounds),
        "bare MB/s": median([case.megabytes / run.wall_seconds for run in floor]),
        "growcache MB/s": median([case.megabytes / run.wall_seconds for run in ours]),
        "speed ratio": speed,
        "speed goal": verdict(speed, 0.7, at_most=False),
        "bare CPU s": median([run.cpu_seconds for run in floor]),
        "growcache CPU s": median([run.cpu_seconds for run in ours]),
        "CPU ratio": cost,
        "CPU goal": verdict(cost, 1.5, at_most=True),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--server", choices=("auto", "juicefs", "moto"), default="auto")
    arguments.add_argument("--link-mb", type=float, default=0, help="MB/s of the link")
    given = arguments.parse_args()
    cases = QUICK if given.quick else FULL
    rounds: dict[Case, list[tuple[Run, Run]]] = {case: [] for case in cases}
    with running_server(given.server) as server:
        make_bucket(server, BUCKET)
        for case in cases:
            fill(server.bucket(BUCKET), case)
        with linked(server, given.link_mb) as link:
            for _ in range(given.rounds or (1 if given.quick else 5)):
                for case in cases:
                    with tempfile.TemporaryDirectory(dir=given.directory) as scratch:
                        first = bare(link, case, Path(scratch))
                        rounds[case].append((first, ingest(link, case, Path(scratch))))
    flight = f"{WORKERS} workers x {CONCURRENCY} reads, bare loop {WORKERS * CONCURRENCY}"
    rows = [row(case, measured) for case, measured in rounds.items()]
    report(f"Ingest from {link.name}: {flight}", rows, given.json)


if __name__ == "__main__":
    main()
