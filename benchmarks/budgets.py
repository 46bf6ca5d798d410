"""How exactly a run keeps its budgets: bytes, bytes per second, samples of a fixed set, samples of a run.

The store (benchmarks/bad_store.py) has objects of 64 KiB and answers after 44 ms. The store counts the bytes it
sends: whole answers, and half of each answer that it breaks off. Two samplers, sixteen reads in flight each.

- `max_egress`: 10 MB. At most that and one read less, also where the store refuses 5 % of the requests. Where it breaks off
  5 % of its answers it sends less, because each of those counts whole.
- `max_bytes_per_second`: 2 MB/s, counted over 30 s, after the first 4 MB.
- `max_samples`: 1,000; then with a transform that passes over one object in three.
- `--samples`: 1,000; shards have 64 samples.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.bad_store import BadStore, bad_store
from benchmarks.measure import Child, parser, report, verdict, write_config
from growcache.cache.index.reader import read_index
from growcache.cache.status import read_status
from growcache.schema import Origin

OBJECTS, OBJECT_BYTES = 20_000, 65_536
READ_BYTES = OBJECT_BYTES + 128  # with the header
LATENCY_SECONDS = 0.044
MOST, RATE, SAMPLES, SHARD_SAMPLES = 10_000_000, 2_000_000, 1000, 64
LIMIT_SECONDS = 120


def two_of_three(sample: dict[str, Any], origin: Origin) -> dict[str, Any] | None:
    """A transform that passes over a third of the objects."""
    return sample if crc32(origin.key.encode()) % 3 else None


@contextmanager
def started(
    store: BadStore,
    arguments: tuple[str, ...] = (),
    sampling: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
    directory: Path | None = None,
) -> Iterator[tuple[Child, Path]]:
    """Run growcache on the store; yield the child and its cache."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        config, path = Path(scratch) / "config.yaml", Path(scratch) / "cache"
        write_config(
            config,
            source={"url": store.url, "storage_options": store.storage_options},
            sampling={"workers": 2, "shard_samples": SHARD_SAMPLES, **(sampling or {})},
            cache={"path": str(path), "max_bytes": "1GB", "min_uses": 0, **(cache or {})},
        )
        child = Child.growcache("run", str(config), *arguments, log=Path(scratch) / "run.log")
        yield child, path
        if child.process.returncode is None:
            child.process.send_signal(signal.SIGINT)
            child.wait(LIMIT_SECONDS)


def egress(name: str, directory: Path | None, **troubles: Any) -> dict[str, Any]:
    with bad_store(OBJECTS, OBJECT_BYTES, latency_seconds=LATENCY_SECONDS, **troubles) as store:
        limits = {"max_egress": MOST}
        with started(store, ("--until-full",), limits, directory=directory) as (child, cache):
            child.wait(LIMIT_SECONDS)
            told = read_status(cache).egress_bytes
        found = store.counts().payload
    # The bytes sent before an answer broke off are unknown here, so the attempt counts whole.
    exact = verdict(abs(found - MOST), max(MOST // 100, READ_BYTES), at_most=True)
    return {
        "budget": f"max_egress, {name}",
        "given": MOST,
        "status": told,
        "store": found,
        "off": abs(found - MOST) / MOST,
        "goal": verdict(found, MOST, at_most=True) if "breaks" in troubles else exact,
    }


def rate(name: str, seconds: float, directory: Path | None, **troubles: Any) -> dict[str, Any]:
    with bad_store(OBJECTS, OBJECT_BYTES, latency_seconds=LATENCY_SECONDS, **troubles) as store:
        limits = {"max_bytes_per_second": RATE}
        with started(store, sampling=limits, directory=directory) as (child, _):
            while store.counts().payload < 2 * RATE:
                child.check(LIMIT_SECONDS)
                time.sleep(0.05)
            before, began = store.counts().payload, time.monotonic()
            time.sleep(seconds)
            found = (store.counts().payload - before) / (time.monotonic() - began)
    off = abs(found - RATE) / RATE
    return {
        "budget": f"max_bytes_per_second, {name}",
        "given": RATE,
        "store": round(found),
        "off": off,
        "goal": verdict(off, 0.02, at_most=True),
    }


def fixed(name: str, directory: Path | None, **sampling: Any) -> dict[str, Any]:
    bounds = {"max_samples": SAMPLES, "eviction": "none"}
    with (
        bad_store(OBJECTS, OBJECT_BYTES, latency_seconds=LATENCY_SECONDS) as store,
        started(store, ("--until-full",), sampling, bounds, directory) as (child, cache),
    ):
        child.wait(LIMIT_SECONDS)
        found, told = read_index(cache).totals.samples, read_status(cache).egress_bytes
    return {
        "budget": f"max_samples, {name}",
        "given": SAMPLES,
        "status": found,
        "store": told // READ_BYTES,
        "off": abs(found - SAMPLES) / SAMPLES,
        "goal": verdict(abs(found - SAMPLES), 0, at_most=True),
    }


def run_samples(directory: Path | None) -> dict[str, Any]:
    with (
        bad_store(OBJECTS, OBJECT_BYTES, latency_seconds=LATENCY_SECONDS) as store,
        started(store, ("--samples", str(SAMPLES)), directory=directory) as (child, cache),
    ):
        child.wait(LIMIT_SECONDS)
        found = read_index(cache).totals.drawn
    beyond = found - SAMPLES if found >= SAMPLES else SHARD_SAMPLES
    return {
        "budget": "--samples",
        "given": SAMPLES,
        "status": found,
        "off": abs(found - SAMPLES) / SAMPLES,
        "goal": verdict(beyond, SHARD_SAMPLES - 1, at_most=True),
    }


def main() -> None:
    arguments = parser(__doc__)
    given = arguments.parse_args()
    seconds, where = (5.0 if given.quick else 30.0), given.directory
    rows = [
        egress("healthy", where),
        egress("5 % refused", where, refuses=0.05),
        egress("5 % broken off", where, breaks=0.05),
        rate("healthy", seconds, where),
        rate("5 % refused", seconds, where, refuses=0.05),
        fixed("healthy", where),
        fixed("a third passed over", where, transform="benchmarks.budgets:two_of_three"),
        run_samples(where),
    ]
    report("Budgets, and what was read or drawn", rows, given.json)


if __name__ == "__main__":
    main()
