"""A service over 100,000 small shards with readers that come and go: what it keeps must not grow.

`growcache run` draws shards of eight samples of 64 bytes from local files into a small cache that
turns over many times. Three readers are always at work. Each goes through three epochs
as one of five jobs; then it closes its loader, or is killed, or is killed after it gave a state,
so that its shards stay protected for some seconds.

Counted are the supervisor and its samplers (private memory, open files, threads), the
index and its write-ahead log, the rows of its history, the leases, and all entries in
the cache's folder. The first quarter is left out, because the cache fills then. Leases and the log come and go with
readers and checkpoints, so their most is bounded instead of their growth.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Child, parser, report, verdict, write_config
from growcache.cache.files import allocated_tree
from growcache.cache.status import read_status
from growcache.numpy import EpochLoader

OBJECTS, SAMPLES, VALUES = 4000, 8, 16
MAX_BYTES = 12_000_000
SHARDS = 100_000
READERS, JOBS, EPOCHS = 3, 5, 3
RESUME_SECONDS = 2
LOOKS = 40
LIMIT_SECONDS = 6 * 3600.0
GOAL_SHARE = 0.05
MOST = {"log kB": 1000, "leases": 4 * READERS}
ENDS = ("close", "kill", "state")
TABLES = ("history", "holes", "jobs", "uses", "finished_leases", "deleted_ranges")


def be_reader(root: str, job: str, end: str) -> None:
    """Go through epochs, then end as told."""
    loader = EpochLoader(root, batch_size=64, min_samples=64, job=job)
    for _ in range(EPOCHS):
        for _batch in loader:
            time.sleep(0.001)
    if end == "state":
        next(iter(loader))
        loader.state_dict()
    if end != "close":
        os.kill(os.getpid(), signal.SIGKILL)
    loader.close()


def make_objects(folder: Path) -> None:
    """Write the store."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(OBJECTS):
        np.save(folder / f"{number:05d}.npy", rng.random((SAMPLES, VALUES), np.float32))


class Readers:
    """Starts a reader whenever one has ended."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rng = random.Random(0)
        self._alive: list[subprocess.Popen[bytes]] = []
        self.started = 0

    def keep_up(self) -> None:
        """Start as many as have ended.

        Raises:
            SystemExit: one of them failed.
        """
        for reader in self._alive:
            if reader.poll() not in (None, 0, -signal.SIGKILL):
                sys.exit(f"a reader ended with {reader.returncode}")
        self._alive = [reader for reader in self._alive if reader.returncode is None]
        while len(self._alive) < READERS:
            self._alive.append(self._start())

    def _start(self) -> subprocess.Popen[bytes]:
        job, end = f"job{self._rng.randrange(JOBS)}", self._rng.choice(ENDS)
        self.started += 1
        words = [sys.executable, "-m", "benchmarks.soak_service"]
        return subprocess.Popen([*words, "--read", str(self._root), job, end])

    def end(self) -> None:
        """Kill those that live."""
        for reader in self._alive:
            reader.kill()
            reader.wait()


def processes(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *(one for child in children for one in processes(int(child)))]


def _own_bytes(pid: int) -> int:
    """Return the bytes of a process's anonymous memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return 1024 * int(values["Anonymous"])


def _entries(folder: Path | str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def look(pid: int, root: Path) -> dict[str, int]:
    """Return what the service keeps at the moment."""
    pids = processes(pid)
    index = root / "index.sqlite"
    wal = root / "index.sqlite-wal"
    with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True, timeout=30)) as connection:
        rows = sum(
            connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            for table in TABLES
        )
        shards = connection.execute("SELECT COUNT(*) FROM shards").fetchone()[0]
    return {
        "supervisor kB": _own_bytes(pid) // 1000,
        "samplers kB": sum(map(_own_bytes, pids[1:])) // 1000,
        "open files": sum(_entries(f"/proc/{one}/fd") for one in pids),
        "threads": sum(_entries(f"/proc/{one}/task") for one in pids),
        "index kB": index.stat().st_size // 1000,
        "log kB": wal.stat().st_size // 1000 if wal.exists() else 0,
        "shard rows": shards,
        "other rows": rows,
        "leases": _entries(root / "leases"),
        "cache kB": allocated_tree(root) // 1000,
    }


def soak(place: Path, shards: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the looks, and what was done meanwhile."""
    make_objects(place / "objects")
    root, config = place / "cache", place / "config.yaml"
    source = {"url": f"{place}/objects/*.npy", "format": "npy", "options": {"axis": 0}}
    sampling = {"shard_samples": SAMPLES, "samples_per_object": SAMPLES, "workers": 2}
    cache: dict[str, Any] = {"path": str(root), "max_bytes": MAX_BYTES, "min_uses": 0}
    cache["resume_seconds"] = RESUME_SECONDS
    write_config(config, source, sampling, cache)
    service = Child.growcache("run", str(config), log=place / "run.log")
    readers, found = Readers(root), list[dict[str, Any]]()
    try:
        for number in range(1, LOOKS + 1):
            while _drawn(root) < number * shards * SAMPLES // LOOKS:
                service.check(LIMIT_SECONDS)
                readers.keep_up()
                time.sleep(0.05)
            with suppress(FileNotFoundError, ProcessLookupError):  # a child that just ended
                found.append(look(service.process.pid, root))
        seconds = service.seconds
    finally:
        readers.end()
    service.process.send_signal(signal.SIGINT)
    service.wait(LIMIT_SECONDS)
    checked = Child.growcache("check", str(root), log=place / "check.log").wait()
    return found, {
        "shards drawn": _drawn(root) // SAMPLES,
        "seconds": round(seconds),
        "readers": readers.started,
        "check": checked.output.strip().splitlines()[-1],
    }


def _drawn(root: Path) -> int:
    return read_status(root).drawn if (root / "status.json").exists() else 0


def rows_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the second quarter of the looks with the last."""
    quarter = len(found) // 4
    early, late = found[quarter : 2 * quarter], found[-quarter:]
    rows = []
    for name in found[0]:
        first = statistics.median(one[name] for one in early)
        last = statistics.median(one[name] for one in late)
        growth = last / first - 1 if first else float(last)
        most = max(one[name] for one in found[quarter:])
        judged = (most, MOST[name]) if name in MOST else (growth, GOAL_SHARE)
        rows.append(
            {
                "what": name,
                "in the second quarter": first,
                "in the last": last,
                "most": most,
                "growth": round(growth, 4),
                "goal": verdict(*judged, at_most=True),
            }
        )
    return rows


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--shards", type=int, help="to draw (default 100,000)")
    arguments.add_argument("--read", nargs=3, help="be a reader (internal)")
    given = arguments.parse_args()
    if given.read:
        be_reader(*given.read)
        return 0
    shards = given.shards or (4000 if given.quick else SHARDS)
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="soak-service-") as place:
        found, done = soak(Path(place), shards)
    title = ", ".join(f"{name} {value}" for name, value in done.items())
    report(f"What a service keeps: {title}", rows_of(found), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
