"""How many samples a second `growcache run` draws from a store that misbehaves, against a bare loop of as many readers.

The store (benchmarks/bad_store.py) has objects of 64 KiB and answers after 44 ms; each case adds its trouble. The bare
loop is what one would write by hand: as many independent readers as growcache has reads in flight, each of which takes
the next key when it has the last one, and tries again after a failure. Both run in the same round, one after the other,
and are counted over the same number of seconds, after some seconds to settle. growcache's samples are the committed ones.

- `healthy`: no trouble.
- `slow 2 % of 8 s`, `slow 0.5 % of 4 s`: such a share of the requests takes so much longer.
- `takes 8`: more than 8 requests at a time are refused with 503. The bare loop has 8 readers, so it is never refused.
- `refuses 5 %`: at random, however few there are.
- `breaks 5 %`, `stalls 0.2 %`: answers end in a reset, or stop for good, after half of their bytes.
- `link of 5 MB/s`: the bandwidth of all answers together.
- `storm`: the store refuses everything for 60 s. Shown: seconds from its end to nine tenths of the rate before it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import S3Store

from benchmarks.bad_store import BadStore, Counts, bad_store
from benchmarks.measure import Child, median, parser, report, verdict, write_config
from benchmarks.synthetic_s3 import BUCKET, Recordings
from growcache.cache.index.reader import read_index
from growcache.errors import CacheMissingError

OBJECTS = 100_000
OBJECT_BYTES = 65_536
LATENCY_SECONDS = 0.044
WORKERS, CONCURRENCY = 2, 8
SHARD_SAMPLES = 128
LIMIT_SECONDS = 120
STORM_SECONDS = 60.0
RATE_SECONDS = 2.0  # over which the rate after a storm is taken


@dataclass(frozen=True, slots=True)
class Case:
    """A trouble, and what it is compared with."""

    name: str
    troubles: dict[str, Any] = field(default_factory=dict)
    goal: float | None = None  # of the bare loop's rate
    concurrency: int = CONCURRENCY  # of each of `WORKERS` samplers
    bare_readers: int = WORKERS * CONCURRENCY
    most_refused: float | None = None  # share of growcache's requests


CASES = [
    Case("healthy", goal=0.9),
    Case("slow 2 % of 8 s", {"slow": [[0.02, 8.0]]}, goal=0.8),
    Case("slow 0.5 % of 4 s", {"slow": [[0.005, 4.0]]}, goal=0.8),
    Case("takes 8", {"takes": 8}, 0.9, concurrency=16, bare_readers=8, most_refused=0.05),
    Case("refuses 5 %", {"refuses": 0.05}),
    Case("breaks 5 %", {"breaks": 0.05}),
    Case("stalls 0.2 %", {"stalls": 0.002}),
    Case("link of 5 MB/s", {"bytes_per_second": 5e6}),
]
STORM = "storm"
NAMES = [*(case.name for case in CASES), STORM]


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one of the two over its seconds."""

    rate: float  # samples a second
    refused: float  # share of the requests


def bare(store: BadStore, readers: int, seconds: float) -> Measured:
    client = S3Store(
        BUCKET,
        endpoint=store.endpoint,
        access_key_id="a",
        secret_access_key="b",
        region="us-east-1",
        client_options={"allow_http": True, "read_timeout": "15s"},
        retry_config={"max_retries": 0},
    )
    return asyncio.run(_bare(client, store, readers, seconds))


async def _bare(client: S3Store, store: BadStore, readers: int, seconds: float) -> Measured:
    keys = Recordings(OBJECTS)
    numbers = list(range(OBJECTS))
    random.Random(0).shuffle(numbers)
    pending, done = itertools.cycle(numbers), 0

    async def read() -> None:
        nonlocal done
        for number in pending:
            failures = 0
            while True:
                try:
                    await (await client.get_async(keys[number])).bytes_async()
                    break
                except (BaseError, OSError):
                    failures += 1
                    await asyncio.sleep(random.uniform(0, min(8.0, 0.2 * 2**failures)))
            done += 1

    tasks = [asyncio.create_task(read()) for _ in range(readers)]
    await asyncio.sleep(_settling(seconds))
    before, counts, began = done, store.counts(), time.monotonic()
    await asyncio.sleep(seconds)
    rate = (done - before) / (time.monotonic() - began)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Measured(rate, _refused(counts, store.counts()))


def _settling(seconds: float) -> float:
    """Return the seconds before the count begins, so that the slow reads are in flight."""
    return min(10.0, seconds / 2)


def _refused(before: Counts, after: Counts) -> float:
    return (after.refused - before.refused) / max(1, after.requests - before.requests)


@contextmanager
def service(store: BadStore, concurrency: int, directory: Path | None) -> Iterator[Path]:
    """Run growcache on the store, and yield its cache once the first samples are there."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        config, cache = Path(scratch) / "config.yaml", Path(scratch) / "cache"
        write_config(
            config,
            source={"url": store.url, "storage_options": store.storage_options},
            sampling={
                "workers": WORKERS,
                "concurrency": concurrency,
                "shard_samples": SHARD_SAMPLES,
            },
            cache={"path": str(cache), "max_bytes": "1GB", "min_uses": 0},
        )
        child = Child.growcache("run", str(config), log=Path(scratch) / "run.log")
        try:
            wait_for(child, lambda: drawn(cache) > 0)
            yield cache
        finally:
            child.process.send_signal(signal.SIGINT)
            child.wait()


def wait_for(child: Child, is_so: Callable[[], bool]) -> None:
    while not is_so():
        child.check(LIMIT_SECONDS)
        time.sleep(0.02)


def drawn(cache: Path) -> int:
    try:
        return read_index(cache).totals.drawn
    except CacheMissingError:
        return 0


def ours(store: BadStore, case: Case, seconds: float, directory: Path | None) -> Measured:
    with service(store, case.concurrency, directory) as cache:
        time.sleep(_settling(seconds))
        before, began = next_commit(cache)
        counts = store.counts()
        time.sleep(seconds)
        after, ended = next_commit(cache)
        rate = (after - before) / (ended - began)
        return Measured(rate, _refused(counts, store.counts()))


def next_commit(cache: Path) -> tuple[int, float]:
    """Return the samples drawn after the next commit, and its time: samples come by the shard."""
    before = drawn(cache)
    while (found := drawn(cache)) == before:
        time.sleep(0.02)
    return found, time.monotonic()


def row(case: Case, rounds: list[tuple[Measured, Measured]]) -> dict[str, Any]:
    ratio = median([mine.rate / loop.rate for loop, mine in rounds])
    refused = median([100 * mine.refused for _, mine in rounds])
    found: dict[str, Any] = {
        "case": case.name,
        "bare readers": case.bare_readers,
        "bare/s": median([loop.rate for loop, _ in rounds]),
        "reads in flight": WORKERS * case.concurrency,
        "growcache/s": median([mine.rate for _, mine in rounds]),
        "ratio": ratio,
    }
    if case.goal is not None:
        found["goal"] = verdict(ratio, case.goal, at_most=False)
    found["refused %"] = refused
    if case.most_refused is not None:
        found["most refused"] = verdict(refused, 100 * case.most_refused, at_most=True)
    return found


def storm(seconds: float, directory: Path | None) -> dict[str, Any]:
    with (
        bad_store(OBJECTS, OBJECT_BYTES, latency_seconds=LATENCY_SECONDS) as store,
        service(store, CONCURRENCY, directory),
    ):
        time.sleep(2)
        before = _served_rate(store, 10.0)
        store.set(refuses=1.0)
        time.sleep(seconds)
        store.set(refuses=0.0)
        ended = time.monotonic()
        while _served_rate(store, RATE_SECONDS) < 0.9 * before:
            if time.monotonic() - ended > LIMIT_SECONDS:
                break
        back = time.monotonic() - ended - RATE_SECONDS
    return {
        "case": f"{STORM} of {seconds:g} s",
        "reads in flight": WORKERS * CONCURRENCY,
        "growcache/s": median([before]),
        "seconds to full rate": back,
        "goal": verdict(back, 30, at_most=True),
    }


def _served_rate(store: BadStore, seconds: float) -> float:
    before, began = store.counts().served, time.monotonic()
    time.sleep(seconds)
    return (store.counts().served - before) / (time.monotonic() - began)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--case", nargs="+", choices=NAMES, default=NAMES)
    arguments.add_argument("--seconds", type=float, help="that each is counted (default: 40)")
    given = arguments.parse_args()
    seconds = given.seconds or (5.0 if given.quick else 40.0)
    rows = []
    for case in CASES:
        if case.name not in given.case:
            continue
        rounds = []
        with bad_store(
            OBJECTS, OBJECT_BYTES, latency_seconds=LATENCY_SECONDS, **case.troubles
        ) as store:
            for _ in range(given.rounds or 1):
                loop = bare(store, case.bare_readers, seconds)
                rounds.append((loop, ours(store, case, seconds, given.directory)))
        rows.append(row(case, rounds))
    if STORM in given.case:
        rows.append(storm(10.0 if given.quick else STORM_SECONDS, given.directory))
    report("Samples a second from a store that misbehaves", rows, given.json)


if __name__ == "__main__":
    main()
