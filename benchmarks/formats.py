"""Samples of each remote format, against a loop written by hand with fsspec and its library.

2,048 samples of 16 KiB in 8 objects, drawn once each by two samplers of 16 reads in flight, from
an S3 server without and with 50 ms per request. Seconds and CPU are those of `growcache run` from
its start to its end, all processes, cache written. Amplification is the bytes that came over the
link, headers of HTTP, listing and the first look at the objects included, over those of the chunks,
row groups, pages, rows or lines that hold the samples; it is counted where there is latency, by what
makes it.

By hand (benchmarks/formats_cases.py) means: in random order, one after another, and with the 32
threads of a pool, for 1.5 seconds each, without the start of Python and with nothing kept but what
the library keeps. It is the same run, machine and server. LMDB by hand tells of objects
this small only: it downloads whole files first, of 4 MB here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.formats_cases import CASES, SAMPLE_BYTES, SAMPLES, Case
from benchmarks.measure import Child, Run, parser, report, verdict, write_config
from benchmarks.servers import Server, make_bucket, running_server
from growcache.cache.status import read_status
from tests.servers.slowlink import SlowLink, slowlink

BUCKET = "formats"
WORKERS, READS = 2, 16  # samplers, and reads in flight of each
AMPLIFICATION_GOAL = 1.1


@dataclass(frozen=True, slots=True)
class ByHand:
    """What a loop of one's own came to."""

    samples: int
    seconds: float
    cpu: float

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


def fill(server: Server, case: Case, objects: int, directory: Path | None) -> int:
    """Put the objects into the bucket; returns the bytes that hold samples."""
    rng, payload = np.random.default_rng(0), 0
    store = server.bucket(BUCKET)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        for number in range(objects):
            path = Path(scratch) / str(number)
            payload += case.make(path, rng)
            made = next(found for found in Path(scratch).iterdir() if found.stem == path.name)
            store.put(key_of(case, number), made.read_bytes())
            made.unlink()
    return payload


def key_of(case: Case, number: int) -> str:
    """Return the key of an object in the bucket."""
    return f"{case.name.replace(' ', '-')}/{number:03d}.{case.format}"


def drawn(server: Server, case: Case, scratch: Path) -> tuple[Run, int]:
    """Draw each sample once with growcache; returns what it cost, and how many are cached."""
    config, cache = scratch / "config.yaml", scratch / "cache"
    folder = key_of(case, 0).partition("/")[0]
    write_config(
        config,
        source={
            "url": f"s3://{BUCKET}/{folder}/*",
            "format": case.format,
            "options": case.options,
            "storage_options": server.storage_options,
        },
        sampling={"workers": WORKERS, "concurrency": READS},
        cache={"path": str(cache), "max_bytes": "2GB", "min_uses": 0},
    )
    run = Child.growcache("run", str(config), "--until-full", log=scratch / "run.log").wait()
    return run, read_status(cache).samples


def by_hand(
    server: Server, case: Case, objects: int, threads: int, seconds: float, scratch: Path
) -> ByHand:
    """Run the loop in a process of its own."""
    keys = [f"{BUCKET}/{key_of(case, number)}" for number in range(objects)]
    command = [sys.executable, "-m", "benchmarks.by_hand", "--endpoint", server.endpoint]
    command += ["--case", case.name, "--threads", str(threads), "--seconds", str(seconds)]
    run = Child([*command, *keys], scratch / "by-hand.log").wait()
    return ByHand(**json.loads(run.output.splitlines()[-1]))


def row(
    server: Server, case: Case, latency: float, payload: int, objects: int, seconds: float
) -> dict[str, object]:
    """Return the figures of one case at one latency."""
    with far(server, latency) as (reached, link), tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        run, samples = drawn(reached, case, scratch)
        fetched = link.counts().bytes / payload if link else None
        loop = by_hand(reached, case, objects, 1, seconds, scratch)
        pool = by_hand(reached, case, objects, WORKERS * READS, seconds, scratch)
    if samples != objects * SAMPLES:
        sys.exit(f"{case.name}: {samples} samples are cached, not {objects * SAMPLES}")
    speed = samples / run.wall_seconds
    print(f"{case.name}, {latency:g} ms: {speed:.0f}/s, by hand {loop.speed:.0f}", flush=True)
    found: dict[str, object] = {
        "ms": latency,
        "format": case.name,
        "samples/s": speed,
        "MB/s": speed * SAMPLE_BYTES / 1e6,
        "CPU ms": 1000 * run.cpu_seconds / samples,
        "by hand/s": loop.speed,
        "its CPU ms": 1000 * loop.cpu / loop.samples,
        "pool/s": pool.speed,
        "pool's CPU ms": 1000 * pool.cpu / pool.samples,
        "x by hand": speed / loop.speed,
        "x pool": speed / pool.speed,
        "amplification": fetched,
    }
    if fetched is not None:
        found["goal"] = verdict(fetched, AMPLIFICATION_GOAL, at_most=True)
    if case.goal is not None and latency:
        found["speed goal"] = verdict(speed / loop.speed, case.goal, at_most=False)
    return found


@contextmanager
def far(server: Server, latency_ms: float) -> Iterator[tuple[Server, SlowLink | None]]:
    """Put a latency per request before the server; 0: nothing."""
    if not latency_ms:
        yield server, None
        return
    with slowlink(server.endpoint, latency_seconds=latency_ms / 1000) as link:
        yield Server(server.name, link.endpoint), link


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--server", choices=("auto", "juicefs", "moto"), default="auto")
    arguments.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    arguments.add_argument("--latency-ms", type=float, nargs="+", default=[0, 50])
    given = arguments.parse_args()
    objects, seconds = (4, 0.5) if given.quick else (8, 1.5)
    cases = [CASES[name] for name in given.case]
    rows: list[dict[str, object]] = []
    with running_server(given.server) as server:
        make_bucket(server, BUCKET)
        for case in cases:
            if importlib.util.find_spec(case.needs) is None:
                print(f"{case.name}: left out, for it needs {case.needs}")
                continue
            payload = fill(server, case, objects, given.directory)
            for latency in given.latency_ms:
                rows.append(row(server, case, latency, payload, objects, seconds))
    rows.sort(key=lambda found: given.latency_ms.index(found["ms"]))
    report(f"Remote formats from {server.name}, {WORKERS} samplers", rows, given.json)


if __name__ == "__main__":
    main()
