"""Samples of each remote format, compared with a hand-written loop over fsspec and its library.

Samples of 16 KiB in 8 objects of 16 to 64 MiB, and samples of 1 to 16 KiB in 600 objects of 3 to
96 KiB, are drawn once each by two samplers with 16 reads in flight, from an S3 server without
latency and with 50 ms per request. The speed and CPU time of all processes of `growcache run`,
including the writing of the cache, are taken from the middle of the run; "start" is the time
before its first shard. Amplification divides all bytes that crossed the link during the whole run
by the bytes of the rows, pages, chunks, row groups, lines or records that hold the samples. The
bytes on the link include the listing, the first look at the objects, and HTTP. "First look" is
the bytes of a run that ends after its first few samples. It does not depend on the size of the
source because eight objects are looked at. Both are counted only with latency, by the proxy that
adds it.

The hand-written loop (benchmarks/formats_arrays.py, benchmarks/formats_records.py) reads at
random, one sample after another and with a pool of 32 threads, in one process that lives through
all rounds. Its "start" is the time to open all objects, or to download them if the library reads
only local files; it does not count towards the speed. All variants are interleaved, and ratios
are taken within a round.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.formats_cases import CASES
from benchmarks.formats_page import Figures, write_page
from benchmarks.formats_runs import (
    BUCKET,
    READS,
    WORKERS,
    ByHand,
    Pass,
    Turn,
    draw_all,
    first_look,
    upload,
)
from benchmarks.formats_samples import Case
from benchmarks.measure import median, parser, report, verdict
from benchmarks.servers import Server, make_bucket, remove_objects, running_server
from tests.servers.slowlink import SlowLink, slowlink

SECONDS, SECONDS_NEAR = 8.0, 3.0  # of a turn of the hand-written loop, with and without latency


@dataclass(frozen=True, slots=True)
class Made:
    """The objects of a case in the bucket.

    Attributes:
        case: The case that they belong to.
        objects: Number of objects.
        samples: Number of samples in each object.
        payload: Bytes that hold all samples.
    """

    case: Case
    objects: int
    samples: int
    payload: int

    @property
    def total(self) -> int:
        """The number of samples in all objects."""
        return self.objects * self.samples


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of each variant.

    Attributes:
        ours: growcache's run.
        fetched: Bytes over the link during growcache's run; None without a link.
        loop: The hand-written loop, one sample after another.
        pool: The hand-written loop with as many threads as growcache has reads in flight.
    """

    ours: Pass
    fetched: int | None
    loop: Turn
    pool: Turn


def fill(server: Server, case: Case, *, quick: bool, directory: Path | None) -> Made:
    """Upload the objects of a case to the bucket."""
    objects, samples = case.count, case.samples
    if quick:
        objects, samples = (4, samples // 16) if objects <= 8 else (objects // 10, samples)
    rng, payload = np.random.default_rng(0), 0
    for number in range(objects):
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / "made"
            payload += case.make(made, rng, samples)
            upload(server, case, made, number)
    return Made(case, objects, samples, payload)


@contextmanager
def far(server: Server, latency_ms: float) -> Iterator[tuple[Server, SlowLink | None]]:
    """Add a latency per request in front of the server; 0 adds nothing."""
    if not latency_ms:
        yield server, None
        return
    with slowlink(server.endpoint, latency_seconds=latency_ms / 1000) as link:
        yield Server(server.name, link.endpoint), link


def measured(server: Server, made: Made, link: SlowLink | None, by_hand: ByHand) -> Round:
    """Run all variants, one after the other."""
    seconds = SECONDS if link else SECONDS_NEAR
    before = link.counts().bytes if link else 0
    with tempfile.TemporaryDirectory() as scratch:
        ours = draw_all(server, made.case, Path(scratch))
    if ours.samples != made.total:
        sys.exit(f"{made.case.name}: {ours.samples} samples, not {made.total}")
    fetched = link.counts().bytes - before if link else None
    loop = by_hand.turn(1, seconds)
    return Round(ours, fetched, loop, by_hand.turn(WORKERS * READS, seconds))


def looked(server: Server, made: Made, link: SlowLink | None) -> int | None:
    """Return the bytes of a first look, or None without a link."""
    if link is None:
        return None
    before = link.counts().bytes
    with tempfile.TemporaryDirectory() as scratch:
        first_look(server, made.case, Path(scratch))
    return link.counts().bytes - before


def row(server: Server, made: Made, latency: float, rounds: int) -> Figures:
    """Return the figures of one case at one latency."""
    with far(server, latency) as (reached, link):
        first = looked(reached, made, link)
        with closing(ByHand(reached, made.case, made.objects, made.samples)) as by_hand:
            found = [measured(reached, made, link, by_hand) for _ in range(rounds)]
    figures = figures_of(made, latency, found, first)
    print(json.dumps(figures), flush=True)
    return figures


def figures_of(made: Made, latency: float, found: list[Round], first: int | None) -> Figures:
    """Return medians, with ratios taken within rounds."""
    speed = median([one.ours.speed for one in found])
    download = found[0].loop
    loop = [_speed(made, one.loop, download) for one in found]
    pool = [_speed(made, one.pool, download) for one in found]
    times = median([one.ours.speed / slow for one, slow in zip(found, loop, strict=True)])
    figures: Figures = {
        "ms": latency,
        "format": made.case.name,
        "MB": made.payload / 1e6,
        "objects": made.objects,
        "rounds": len(found),
        "samples/s": speed,
        "MB/s": speed * made.case.sample_bytes / 1e6,
        "CPU ms": median([1000 * one.ours.cpu for one in found]),
        "start s": median([one.ours.start for one in found]),
        "whole run s": median([one.ours.seconds for one in found]),
        "whole run CPU ms": median([1000 * one.ours.all_cpu for one in found]),
        "by hand/s": median(loop),
        "its CPU ms": median([_cpu_ms(made, one.loop, download) for one in found]),
        "its start s": found[0].loop.opening,
        "pool/s": median(pool),
        "pool's CPU ms": median([_cpu_ms(made, one.pool, download) for one in found]),
        "pool's start s": found[0].pool.opening,
        "x by hand": times,
        "x pool": median(
            [one.ours.speed / fast for one, fast in zip(found, pool, strict=True)]
        ),
    }
    fetched = [one.fetched / made.payload for one in found if one.fetched is not None]
    if fetched and first is not None:
        figures["first look MB"] = first / 1e6
        figures["amplification"] = median(fetched)
        figures["goal"] = verdict(median(fetched), made.case.amplification, at_most=True)
    if made.case.goal is not None and latency:
        figures["speed goal"] = verdict(times, made.case.goal, at_most=False)
    return figures


def _speed(made: Made, turn: Turn, download: Turn) -> float:
    """Return samples per second.

    If all objects are downloaded first, the speed is that of one pass including the download.
    """
    first = download.opening if made.case.downloads else 0.0
    return made.total / (first + made.total * turn.seconds / turn.samples)


def _cpu_ms(made: Made, turn: Turn, download: Turn) -> float:
    first = download.opening_cpu if made.case.downloads else 0.0
    return 1000 * (first / made.total + turn.cpu / turn.samples)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--server", choices=("auto", "juicefs", "moto"), default="auto")
    arguments.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    arguments.add_argument("--latency-ms", type=float, nargs="+", default=[0, 50])
    arguments.add_argument(
        "--page",
        type=Path,
        help="also write the figures to this page, including those of --read",
    )
    arguments.add_argument(
        "--read", type=Path, nargs="+", help="measure nothing; read figures that --json wrote"
    )
    arguments.add_argument(
        "--part", default="", help="write between the markers of this part of the page"
    )
    given = arguments.parse_args()
    if given.read:
        write_page(
            given.page, [json.loads(file.read_text()) for file in given.read], given.part
        )
        return
    rounds = given.rounds or (1 if given.quick else 3)
    rows: list[Figures] = []
    with running_server(given.server) as server:
        make_bucket(server, BUCKET)
        for case in [CASES[name] for name in given.case]:
            if importlib.util.find_spec(case.needs) is None:
                print(f"{case.name}: skipped because it requires {case.needs}")
                continue
            made = fill(server, case, quick=given.quick, directory=given.directory)
            rows += [row(server, made, latency, rounds) for latency in given.latency_ms]
            remove_objects(server, BUCKET, f"{case.folder}/")
    rows.sort(key=lambda found: given.latency_ms.index(found["ms"]))
    report(f"Remote formats from {server.name}, {WORKERS} samplers", rows, given.json)


if __name__ == "__main__":
    main()
