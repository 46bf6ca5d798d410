"""`growcache run` over 10^6 images in folders: the first samples, and the cost of the listing.

The store answers every request after 50 ms and lists 1,000 keys at a time (benchmarks/synthetic_s3.py
says which parts of it are synthetic). It holds a million images in a thousand folders, with MD5
sums as ETags and with random-looking sizes and times. Two times are measured from the start of
the process: until a reader of the index would find 64 samples, and until the listing is complete.
Then the process is stopped and started with ``--refresh``, which lists everything again.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_samples import SAMPLES, far_store, samples_in
from benchmarks.measure import Child, median, parser, report, verdict, write_config
from benchmarks.synthetic_s3 import BUCKET, IMAGES, REQUESTS
from growcache.cache.files import CacheLayout
from growcache.cache.status import read_status
from growcache.errors import CacheError

POLL_SECONDS = 0.02
LIMIT_SECONDS = 280


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round.

    Attributes:
        first: Seconds until the first samples.
        listed: Seconds until the listing is complete.
        refreshed: Seconds until the second listing is complete.
        requests: List requests of the first listing.
        nbytes: Bytes of the catalog per key.
        memory: Peak memory of the supervisor until the listing was complete, in MiB.
    """

    first: float
    listed: float
    refreshed: float
    requests: int
    nbytes: float
    memory: float


def measure(endpoint: str, objects: int, scratch: Path) -> Round:
    """Run a service until its listing is complete, twice."""
    config, cache = scratch / "config.yaml", scratch / "cache"
    write_config(
        config,
        source={
            "url": f"s3://{BUCKET}/{IMAGES}**/*.jpg",
            "format": "bytes",
            "storage_options": {"endpoint_url": endpoint, "key": "a", "secret": "b"},
        },
        sampling={"workers": 2},
        cache={"path": str(cache), "max_bytes": "4GB"},
    )
    child = Child.growcache("run", str(config), log=scratch / "run.log")
    while samples_in(cache) < SAMPLES:
        child.check(LIMIT_SECONDS)
        time.sleep(POLL_SECONDS)
    first = child.seconds
    listed = seconds_to_end(child, cache)
    memory = peak_mib(child.process.pid)
    child.interrupt()
    requests = int(urllib.request.urlopen(f"{endpoint}/{BUCKET}/{REQUESTS}").read())
    nbytes = CacheLayout(cache).catalog.stat().st_size / objects
    child = Child.growcache("run", str(config), "--refresh", log=scratch / "run.log")
    refreshed = seconds_to_end(child, cache)
    child.interrupt()
    return Round(first, listed, refreshed, requests, nbytes, memory)


def seconds_to_end(child: Child, cache: Path) -> float:
    """Return how long a service took to list its source."""
    while not is_listed(time.time() - child.seconds, cache):
        child.check(LIMIT_SECONDS)
        time.sleep(POLL_SECONDS)
    return child.seconds


def is_listed(since: float, cache: Path) -> bool:
    """Whether a service started after `since` reports that its listing is complete."""
    try:
        status = read_status(cache)
    except CacheError:
        return False
    return (status.started_at or 0) > since and status.listing_complete


def peak_mib(pid: int) -> float:
    """Return the peak memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--latency-ms", type=float, default=50)
    arguments.add_argument("--objects", type=int, nargs="+", default=[10_000, 1_000_000])
    given = arguments.parse_args()
    rounds = given.rounds or (1 if given.quick else 3)
    counts = given.objects[:1] if given.quick else given.objects

    found: dict[int, list[Round]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            with (
                far_store(count, given.latency_ms, max(1, count // 1000)) as endpoint,
                tempfile.TemporaryDirectory(dir=given.directory) as scratch,
            ):
                found[count].append(measure(endpoint, count, Path(scratch)))

    rows = [row(count, measured) for count, measured in found.items()]
    report(f"Listing, {given.latency_ms:g} ms per request", rows, given.json)


def row(count: int, measured: list[Round]) -> dict[str, object]:
    """Return the medians over the rounds."""
    first = median([one.first for one in measured])
    nbytes = median([one.nbytes for one in measured])
    return {
        "objects": count,
        "rounds": len(measured),
        "first samples, s": first,
        "goal": verdict(first, 3.0, at_most=True),
        "listed, s": median([one.listed for one in measured]),
        "refreshed, s": median([one.refreshed for one in measured]),
        "pages asked for": median([one.requests for one in measured]),
        "bytes per key": nbytes,
        "at most 32": verdict(nbytes, 32, at_most=True),
        "supervisor, MiB": median([one.memory for one in measured]),
    }


if __name__ == "__main__":
    main()
