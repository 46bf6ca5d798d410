"""docs/deploy/monitor/report.html: the report of a real run, in which a cache grows and then turns over.

nginx serves recordings of three states behind a link of limited speed; a loader trains on the cache meanwhile. It takes
``--seconds`` (default 300). The plan is made before the service starts, so the report compares the two.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.servers import Server, make_bucket, running_server
from growcache.cli.report import write_report
from growcache.numpy import EpochLoader
from growcache.sampling.serve import serve
from tests.servers.slowlink import slowlink

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "deploy/monitor" / "report.html"
STATES = {"awake": 60, "light": 30, "deep": 10}  # recordings
CHANNELS, ROWS, WINDOW, STRIDE = 8, 60_000, 256, 64
LINK_BYTES_PER_SECOND, LATENCY_SECONDS = 3e6, 0.03
MAX_BYTES = 120_000_000
SAMPLES_PER_SECOND, BATCH = 1000, 50
JOB = "sleep-stages"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=TARGET)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="report-") as name,
        running_server("nginx") as server,
    ):
        write_recordings(server)
        with slowlink(
            server.endpoint,
            bytes_per_second=LINK_BYTES_PER_SECOND,
            latency_seconds=LATENCY_SECONDS,
        ) as link:
            options = {**server.storage_options, "endpoint_url": link.endpoint}
            config = config_of(Path(name) / "cache", options)
            plan = planned(Path(name), config, arguments.seconds)
            with serve(config):
                train(Path(name) / "cache", arguments.seconds)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                pictures = arguments.out.parent / "pictures"
                print(write_report(Path(name) / "cache", arguments.out, pictures, plan))
        page = arguments.out.read_text(encoding="utf-8")
        arguments.out.write_text(page.replace(f" on {socket.gethostname()})", " on gpu7)"))


def write_recordings(server: Server) -> None:
    assert server.folder is not None
    make_bucket(server, "sleep")
    rng = np.random.default_rng(0)
    for state, count in STATES.items():
        folder = server.folder / "sleep" / state
        folder.mkdir()
        for i in range(count):
            rows = rng.normal(size=(ROWS, CHANNELS)).astype("<f4")
            np.save(folder / f"sub-{i:02d}.npy", rows)
    broken = np.zeros((ROWS, CHANNELS), "<f8")  # other numbers than the others have
    np.save(server.folder / "sleep" / "light" / "sub-99.npy", broken)


def config_of(cache: Path, options: dict[str, str]) -> dict[str, Any]:
    return {
        "source": {
            "url": "s3://sleep/**/*.npy",
            "storage_options": options,
            "options": {"window": WINDOW, "stride": STRIDE},
        },
        "sampling": {
            "seed": 7,
            "max_skipped": 0.05,
            "strata": {"by": "(?P<stratum>[^/]+)/[^/]+$", "weights": "balanced"},
        },
        "cache": {"path": str(cache), "max_bytes": MAX_BYTES},
    }


def planned(folder: Path, config: dict[str, Any], seconds: float) -> Path | None:
    """Write the plan of the run, as the command line makes it."""
    file, out = folder / "c.yaml", folder / "plan.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "growcache", "plan", str(file), "--json"]
    command += [f"--consume={SAMPLES_PER_SECOND}/s", f"--horizon={seconds:.0f}"]
    with out.open("wb") as sink:
        done = subprocess.run(command, stdout=sink, check=False)
    return out if done.returncode == 0 else None


def train(cache: Path, seconds: float) -> None:
    """Train at a steady pace, as a model of some size does.

    A gather process knows the loop's position by blocks, of which this small cache has few, so it would take its
    snapshots too early; see docs/guides/plan.md.
    """
    end = time.monotonic() + seconds
    made = EpochLoader(cache, batch_size=BATCH, min_samples=500, job=JOB, gather="thread")
    with made as loader:
        due = 0.0
        while time.monotonic() < end:
            for _ in loader:
                due = max(due, time.monotonic() - 1.0) + BATCH / SAMPLES_PER_SECOND
                time.sleep(max(0.0, due - time.monotonic()))
                if time.monotonic() > end:
                    break


if __name__ == "__main__":
    main()
