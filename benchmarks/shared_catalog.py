"""10^6 images: a listing, one that is published as a shared catalog, and a service that reads that.

The store answers every request after 50 ms and lists 1,000 keys at a time, as for the benchmark `listing`. One after
the other, three services with empty caches run until their listing is complete: without `source.catalog`, with one that
does not exist yet, and with the one that the second has published. A fourth is refreshed a moment later.
Requests are those that the supervisors counted, bytes those of the catalog's answers or files.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_samples import far_store
from benchmarks.listing import LIMIT_SECONDS, peak_mib, seconds_to_end
from benchmarks.measure import Child, median, parser, report, write_config
from benchmarks.synthetic_s3 import BUCKET, IMAGES
from growcache.cache.metrics_file import read_metrics
from growcache.store.counts import number_in
from growcache.store.request_counts import OPS

ARMS = ("listed", "listed and published", "read")
CATALOG = f"s3://{BUCKET}/.growcache"


@dataclass(frozen=True, slots=True)
class Run:
    """One service: seconds until its listing was complete, CPU of its supervisor till then, and its requests."""

    seconds: float
    cpu_seconds: float
    mib: float
    requests: dict[str, int]


def run(endpoint: str, arm: str, scratch: Path) -> Run:
    """Run a service until its listing is complete."""
    config, cache = scratch / f"{arm}.yaml", scratch / arm.replace(" ", "-")
    source = {
        "url": f"s3://{BUCKET}/{IMAGES}**/*.jpg",
        "format": "bytes",
        "storage_options": {"endpoint_url": endpoint, "key": "a", "secret": "b"},
    }
    if arm != ARMS[0]:
        source["catalog"] = CATALOG
    write_config(
        config,
        source=source,
        # Nothing is drawn until the end of the listing but the first groups.
        sampling={"workers": 1, "max_bytes_per_second": "200KB"},
        cache={"path": str(cache), "max_bytes": "4GB"},
    )
    child = Child.growcache("run", str(config), log=scratch / "run.log")
    seconds = seconds_to_end(child, cache)
    cpu, mib = cpu_seconds(child.process.pid), peak_mib(child.process.pid)
    child.process.send_signal(signal.SIGINT)
    child.wait(LIMIT_SECONDS)
    found = read_metrics(cache)
    counts = {} if found is None else found.counts
    requests = {op: int(number_in(counts, "requests", op, "ok")) for op in OPS}
    return Run(seconds, cpu, mib, requests)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--latency-ms", type=float, default=50)
    arguments.add_argument("--objects", type=int, default=1_000_000)
    given = arguments.parse_args()
    objects = 20_000 if given.quick else given.objects

    found: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for _ in range(given.rounds or (1 if given.quick else 3)):
        with (
            far_store(objects, given.latency_ms, max(1, objects // 1000)) as endpoint,
            tempfile.TemporaryDirectory(dir=given.directory) as scratch,
        ):
            for arm in ARMS:
                found[arm].append(run(endpoint, arm, Path(scratch)))
    rows = [row(arm, measured) for arm, measured in found.items()]
    report(f"{objects:,} objects, {given.latency_ms:g} ms per request", rows, given.json)


def row(arm: str, measured: list[Run]) -> dict[str, object]:
    """Return the medians over the rounds."""
    return {
        "service": arm,
        "seconds": median([one.seconds for one in measured]),
        "supervisor's CPU, s": median([one.cpu_seconds for one in measured]),
        "its MiB": median([one.mib for one in measured]),
        **{f"{op}s": median([one.requests[op] for one in measured]) for op in ("list", "put")},
    }


if __name__ == "__main__":
    main()
