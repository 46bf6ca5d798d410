"""A cache whose every text is an attempt to run a script in the page that shows it."""

from __future__ import annotations

import io
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from growcache.cache.history import HistoryRecord, JobRecord
from growcache.cache.incoming import bytes_to_reserve, encode_shard, write_incoming
from growcache.cache.lease_views import WAIT_BUCKETS
from growcache.cache.metrics_file import JobMetrics, Metrics, RankMetrics, write_metrics
from growcache.cache.sidecar import Hole, Origins, SampleOrigin, Sidecar
from growcache.cache.status import write_status
from growcache.cache.status_model import (
    ForeignLeaseStatus,
    JobStatus,
    LeaseStatus,
    MovedStatus,
    SetAsideStatus,
    SourceStatus,
    Status,
    SubsetStatus,
    WaitsStatus,
    WorkerStatus,
)
from growcache.schema import Sample
from growcache.store.counts import Counts
from tests.filled import FINGERPRINT, PERMIT, Filled

RAN = "window.ran"  # what each attempt would set
ATTEMPTS = (
    f"<script>{RAN}=1</script>",
    f"</script><script>{RAN}=1</script>",
    f"<img src=x onerror={RAN}=1>",
    f"javascript:{RAN}=1",
    f"\"'><svg onload={RAN}=1>",
    f"${{{RAN}=1}} {{{{{RAN}=1}}}}",
    f"\u202e<b>reversed</b>\u2066\x00\x1b[31m\u2028{RAN}=1",
    "https://elsewhere.invalid/x.png",
)
ALL = " ".join(ATTEMPTS)


def attempt(i: int) -> str:
    return ATTEMPTS[i % len(ATTEMPTS)]


def encoded_image() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)).save(file, "PNG")
    return file.getvalue()


def sample(i: int) -> Sample:
    """A value of every kind that the page shows, under names that are attempts, too."""
    waves = np.sin(np.arange(2000, dtype="<f4").reshape(4, 500) / (20 + i % 7))
    waves[0, 3] = np.nan
    return {
        "waves": waves,
        "grid": np.hypot(*np.meshgrid(np.arange(40.0), np.arange(30.0))),
        "photo": encoded_image(),
        "broken": b"\x89PNG\r\n\x1a\n" + ALL.encode(),
        "raw": ALL.encode() + b"\xff",
        f"{attempt(2)}": attempt(i),
        "text": f"line {i}\n{ALL}",
        "y": np.array(i % 5),
    }


def hostile_status(root: Path, *, running: bool) -> Status:
    now = time.time()
    jobs = [JobStatus(text, 500, 1.5, 2, 7, WaitsStatus(3, 1.0), True) for text in ATTEMPTS[:3]]
    return Status(
        state="waiting" if running else "stopped",
        waiting_for=f"the store to answer ({ALL})",
        waiting_reason="store",
        path=str(root),
        pid=os.getpid() if running else None,
        host=attempt(0),
        samples=60,
        shards=6,
        bytes=10**8,
        max_bytes=10**9,
        drawn=100,
        population=10,
        population_samples=1e4,
        coverage=0.1,
        listing_complete=True,
        objects=9,
        delivered=1500,
        reuse=15.0,
        holes=8,
        failures=3,
        fingerprint=attempt(1),
        updated_at=now,
        uptime_seconds=100,
        last_errors=list(ATTEMPTS[:5]),
        jobs=jobs,
        leases=[LeaseStatus("l", attempt(2), attempt(0), 7, ALL, 3.0, 2, True)],
        foreign_leases=[ForeignLeaseStatus(attempt(0), ALL, 0, 1, True, ALL)],
        worker_states=[WorkerStatus(0, 5, attempt(0), attempt(1), 1, 4)],
        sources=[SourceStatus(ALL, 1.0, 9, 1e4, 0.1)],
        subsets=[SubsetStatus(attempt(2), True, 9, 9, 1e4)],
        left_out={attempt(0): 3},
        set_aside=SetAsideStatus(2, 1, attempt(0), ALL, 5.0),
        moved=MovedStatus(5, 3),
    )


def write_history(filled: Filled, seconds: int = 600, step: int = 10) -> None:
    """Append records with times of their own."""
    now = time.time()
    for k in range(seconds // step):
        ranks = {"0": k / 9, "1": 2.0 * k, ATTEMPTS[0]: 5.0, "__proto__": 0.5 * k}
        jobs = {
            text: JobRecord(10 * k, k, k / 9, 1, 0.5, 5.0 * k, ranks) for text in ATTEMPTS[:3]
        }
        record = HistoryRecord(
            at=now - seconds + k * step, run=1.0, state=attempt(k), waiting_for=attempt(k),
            samples=k, bytes=1000 * k, max_bytes=10**6, drawn=2 * k, evicted_samples=k,
            delivered=3 * k, holes=k // 9, failures=k // 5, egress_bytes=900 * k, requests=4 * k,
            errors=k // 7, coverage=k / 1000, reuse=1.5, age_seconds_mean=2.0 * k, jobs=jobs,
        )  # fmt: skip
        filled.cache.index_writer.append_history(record.to_values())
    _spread_times(filled, now - seconds, step)


def _spread_times(filled: Filled, first: float, step: int) -> None:
    with closing(sqlite3.connect(filled.layout.index)) as index, index:
        index.execute("UPDATE history SET at = ? + id * ?", [first, step])


def fill_hostile(root: Path) -> Filled:
    """Return the writer of a new cache of six shards, each of ten samples; the caller closes it."""
    filled = Filled(root, sample, min_uses=0)
    for number in range(6):
        add_hostile_shard(filled, number)
    write_history(filled)
    write_status(root, hostile_status(root, running=True))
    write_metrics(filled.layout, hostile_metrics(), 1_000_000)
    return filled


def hostile_metrics() -> Metrics:
    late = [0] * WAIT_BUCKETS
    late[0], late[-1] = 8, 2
    soon = [4, *[0] * (WAIT_BUCKETS - 1)]
    ranks = {"0": RankMetrics(0.1, soon), "1": RankMetrics(3.0, late)}
    counts: Counts = {
        "group_seconds": {attempt(0): [1, 0, 0.5], "fetch": [2, 1, 9.0]},
        "requests": {"get": {"ok": 7}},
        "waiting_seconds": {attempt(2): 3.0},
    }
    return Metrics(counts=counts, jobs={attempt(0): JobMetrics(open=True, ranks=ranks)})


def add_hostile_shard(filled: Filled, number: int) -> None:
    samples = filled.samples(number, 10)
    packed = encode_shard(filled.format, filled.schema, samples)
    origins = Origins.pack(
        SampleOrigin(f"{attempt(number)}/{i}", attempt(i), 1, None, 0, 1, i, i + 1)
        for i in range(10)
    )
    facts: dict[str, Any] = packed.facts
    sidecar = Sidecar(
        fingerprint=FINGERPRINT, edition=0, round=0, number=number, group=number, parts=11,
        origins=origins, **facts,
    )  # fmt: skip
    holes = tuple(Hole(f"{attempt(k)}/{number}", k, f"{attempt(k)}: {ALL}") for k in range(2))
    sidecar = replace(sidecar, holes=holes)
    filled.cache.meta.issue(number)
    assert filled.cache.reserve(PERMIT, bytes_to_reserve(sidecar))
    filled.cache.commit(PERMIT, [write_incoming(filled.layout, PERMIT, sidecar, packed.files)])
