"""How long the dashboard's page takes in a browser: a cache of 10^5 shards, and a week of history.

The page is opened in a headless Chromium with an empty profile, from a `growcache dashboard` on the same
machine. The seconds are the browser's own performance marks, counted from the start of the navigation:
answers in words, all charts, the map with a cell per shard, and the whole page with its samples. Most shards
have only their row in the index, because no other file of theirs is read. The history is what a service
keeps of a record each ten seconds, of two jobs.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Child, median, parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache
from growcache.cache.history import HistoryRecord, JobRecord
from growcache.cache.history_thinning import records_to_drop
from growcache.cache.space import fixed_budget
from growcache.cache.status import write_status
from growcache.cache.status_model import JobStatus, Status, WaitsStatus
from tests.browsers import missing, running_browser

MAX_BYTES = 200_000_000_000
SHARDS, QUICK_SHARDS = 100_000, 5_000
REAL_EVERY = 250  # of the shards have their files
SAMPLES = 4
DAY = 86_400
WEEK, RECORD_SECONDS = 7 * DAY, 10
SAMPLE_BYTES = 8000
START_SECONDS = 60
MARKS = ("answers", "charts", "map", "whole")
GOAL_SECONDS = 1.0


@contextmanager
def running_cache(root: Path, shards: int, span: int) -> Iterator[None]:
    """Write a cache that looks as after ``span`` seconds of a service, which holds its lock."""
    with SyntheticCache(root, "<f4", (8, 250), max_bytes=MAX_BYTES) as cache:
        cache.add_thousands(range(0, shards, REAL_EVERY), SAMPLES)
        fill_index(root, shards, span, time.time())
        yield


def fill_index(root: Path, shards: int, span: int, now: float) -> None:
    """Add rows of shards without files, and the history."""
    with closing(sqlite3.connect(root / "index.sqlite")) as index, index:
        columns = [row[1] for row in index.execute("PRAGMA table_info(shards)")]
        copied = [{"number": "n", "seq": "n", "group_number": "n"}.get(c, c) for c in columns]
        index.execute(
            "WITH RECURSIVE every(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM every WHERE n + 1 < ?) "
            f"INSERT OR IGNORE INTO shards SELECT {', '.join(copied)} FROM every "
            "JOIN shards ON number = n - n % ?",
            [shards, REAL_EVERY],
        )
        index.execute(
            "UPDATE shards SET seq = number, uses = (number * 7919 >> 4) % 6, "
            "drawn_at = ? + number * ?",
            [now - span, span / shards],
        )
        records = ((r.at, json.dumps(r.to_values())) for r in history(now, span, shards))
        index.executemany("INSERT INTO history (at, record) VALUES (?, ?)", records)


def history(now: float, span: int, shards: int) -> list[HistoryRecord]:
    """Return the records that a service keeps."""
    records = list(all_records(now, span, shards))
    keep = fixed_budget(MAX_BYTES).kept_history
    dropped = {*records_to_drop([record.at for record in records], now, keep)}
    return [record for i, record in enumerate(records) if i not in dropped]


RANKS = 4  # of each job


def all_records(now: float, span: int, shards: int) -> Iterator[HistoryRecord]:
    """Yield records of a cache that is full after 60 % of the time, by a rate that comes and goes with the day."""
    drawn, bound = 0.0, float(shards * SAMPLES)
    for k in range(span // RECORD_SECONDS):
        rate = bound / (0.6 * span) * (1 + 0.4 * math.sin(k * RECORD_SECONDS * math.tau / DAY))
        drawn += RECORD_SECONDS * rate
        held = min(drawn, bound)
        jobs = {
            name: JobRecord(
                int(drawn * share),
                k,
                k * 0.02 * share,
                k // 300,
                share,
                0.9 * held,
                {str(rank): k * 0.005 * share * (1 + rank) for rank in range(RANKS)},
            )
            for name, share in (("sweep", 0.8), ("resnet", 1.3))
        }
        yield HistoryRecord(
            at=now - span + k * RECORD_SECONDS, run=now - span, state="running",
            shards=int(held / SAMPLES), samples=int(held), bytes=int(held * SAMPLE_BYTES),
            max_bytes=int(bound * SAMPLE_BYTES), drawn=int(drawn), evicted_samples=int(drawn - held),
            delivered=int(drawn * 2.1), holes=k // 20_000, failures=k // 90,
            egress_bytes=int(drawn * SAMPLE_BYTES), requests=int(drawn), errors=k // 90,
            coverage=drawn / bound / 4, reuse=2.1, age_seconds_mean=min(k * 5.0, 0.3 * span),
            samples_per_second=rate, jobs=jobs,
        )  # fmt: skip


SAME_NAMES = (
    *("state", "shards", "samples", "bytes", "max_bytes", "drawn", "evicted_samples"),
    *("delivered", "holes", "failures", "egress_bytes", "coverage", "reuse"),
    "samples_per_second",
)


def last_status(span: int, shards: int) -> Status:
    """Return the status of the moment after the last record."""
    now = time.time()
    *_, last = all_records(now, span, shards)
    jobs = [
        JobStatus(
            name, job.delivered or 0, job.reuse or 0.0, job.epoch or 0, os.getpid(),
            WaitsStatus(40, job.wait_seconds or 0.0), open=True,
        )
        for name, job in last.jobs.items()
    ]  # fmt: skip
    return replace(
        Status(**{name: getattr(last, name) for name in SAME_NAMES}, jobs=jobs),
        pid=os.getpid(), host="trainer", uptime_seconds=span, full=True, listing_complete=True,
        population_samples=4.0 * shards * SAMPLES, objects=8 * shards, sample_bytes=SAMPLE_BYTES,
        bytes_per_second=8000.0,
    )  # fmt: skip


@contextmanager
def dashboard(root: Path, log: Path) -> Iterator[str]:
    """Run ``growcache dashboard``; yield its address."""
    child = Child.growcache("dashboard", str(root), "--http", "127.0.0.1:0", log=log)
    try:
        while not (found := re.search(r"http://\S+", log.read_text(encoding="utf-8"))):
            child.check(START_SECONDS)
            time.sleep(0.05)
        yield found[0]
    finally:
        child.interrupt()


def open_page(root: Path, url: str, status: Status) -> dict[str, float]:
    """Return the seconds to each mark, in a browser that has seen nothing before."""
    write_status(root, replace(status, updated_at=time.time()))
    with running_browser() as browser:
        browser.resize(1280, 900)
        browser.open(url, "performance.getEntriesByName('growcache:whole').length")
        return {
            name: browser.ask(f"performance.getEntriesByName('growcache:{name}')[0].startTime")
            / 1e3
            for name in MARKS
        }


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--shards", type=int)
    given = arguments.parse_args()
    if why := missing():
        sys.exit(f"the page needs a browser: {why}")
    shards = given.shards or (QUICK_SHARDS if given.quick else SHARDS)
    span = DAY if given.quick else WEEK
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        root, status = Path(folder) / "cache", last_status(span, shards)
        with running_cache(root, shards, span), dashboard(root, Path(folder) / "log") as url:
            open_page(root, url, status)  # the server reads files for the first time, too
            count = given.rounds or (1 if given.quick else 5)
            rounds = [open_page(root, url, status) for _ in range(count)]
    row: dict[str, Any] = {"shards": shards, "days of history": span / DAY}
    row |= {f"{name} s": median([found[name] for found in rounds]) for name in MARKS}
    row["whole page"] = verdict(row["whole s"], GOAL_SECONDS, at_most=True)
    report("Seconds from navigation to what the page shows", [row], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
