"""A trainer logs once that the service of its cache has stopped, and trains on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accidents.commands import (
    growcache,
    rows_of,
    running,
    status,
    wait_for_status,
    wait_until,
    write_config,
    write_objects,
)

TRAINER = """
import sys, time
from growcache.numpy import EpochLoader
with EpochLoader(sys.argv[1], batch_size=8, min_samples=64, gather=sys.argv[2]) as loader:
    for epoch in range(10**6):
        for batch in loader:
            time.sleep(0.002)
        print(epoch, flush=True)
"""


@pytest.mark.parametrize(
    ("gather", "how"),
    [
        ("thread", signal.SIGTERM),
        pytest.param("process", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_it_is_said_once(tmp_path: Path, gather: str, how: signal.Signals) -> None:
    url = write_objects(tmp_path / "in", count=200, rows=16)
    source = rows_of(url)
    limits = {"max_bytes": "3MB", "min_uses": 0}
    config = write_config(
        tmp_path / "c.yaml", source, cache=limits, sampling={"max_bytes_per_second": "100KB"}
    )
    cache, out, said = config.with_suffix(""), tmp_path / "out", tmp_path / "err"
    with running(config) as service, out.open("wb") as printed, said.open("wb") as errors:
        wait_for_status(cache, lambda found: found["samples"] >= 64)
        pid = service.process.pid
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(cache), gather], stdout=printed, stderr=errors
        )
        try:
            wait_until(lambda: out.stat().st_size > 2)
            assert "has stopped" not in said.read_text()
            service.process.send_signal(how)
            service.process.wait(300)
            wait_until(lambda: "has stopped" in said.read_text())
            epochs = len(out.read_text().split())
            wait_until(lambda: len(out.read_text().split()) > epochs + 3)
        finally:
            trainer.kill()
            trainer.wait()
    told = [line for line in said.read_text().splitlines() if "has stopped" in line]
    assert len(told) == 1, told
    assert f"pid {pid} on" in told[0]
    assert "no longer grows" in told[0]
    assert status(cache)["state"] == "stopped"


@pytest.mark.slow
def test_a_complete_cache_misses_nobody(tmp_path: Path) -> None:
    source = {"url": write_objects(tmp_path / "in", count=8), "format": "npy"}
    config = write_config(tmp_path / "c.yaml", {**source, "options": {"axis": 0}})
    assert growcache("run", config, "--until-full").returncode == 0
    program = TRAINER.replace("10**6", "3")
    done = subprocess.run(
        [sys.executable, "-c", program, str(config.with_suffix("")), "thread"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "has stopped" not in done.stderr
