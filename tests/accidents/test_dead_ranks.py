"""Ranks of a job without a process group: the surviving ranks name the rank that died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.accidents.commands import (
    growcache,
    rows_of,
    running,
    wait_until,
    write_config,
    write_objects,
)

TRAINER = """
import sys, time
from growcache.numpy import EpochLoader
with EpochLoader(sys.argv[1], batch_size=8, min_samples=1) as loader:
    for epoch in range(10**6):
        for batch in loader:
            time.sleep(0.002)
        print(epoch, flush=True)
"""


@contextmanager
def job(cache: Path, folder: Path, ranks: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks of a job with their output in files; kill the survivors at the end."""
    launched = {**os.environ, "MASTER_PORT": "29517", "WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        found = []
        for rank in range(ranks):
            out = stack.enter_context((folder / f"{rank}.out").open("wb"))
            errors = stack.enter_context((folder / f"{rank}.err").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-c", TRAINER, str(cache)],
                env={**launched, "RANK": str(rank)},
                stdout=out,
                stderr=errors,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            found.append(process)
        wait_until(lambda: all((folder / f"{r}.out").stat().st_size > 2 for r in range(ranks)))
        yield found


@pytest.mark.parametrize(
    ("killed", "serves"),
    [
        (1, True),
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in ((1, False), (0, True), (0, False))
        ),
    ],
)
def test_the_others_end_and_name_it(tmp_path: Path, killed: int, serves: bool) -> None:
    url = write_objects(tmp_path / "in", count=200, rows=16)
    source = rows_of(url)
    cache = {"max_bytes": "3MB", "min_uses": 0}
    config = write_config(tmp_path / "c.yaml", source, cache=cache)
    assert growcache("run", config, "--samples", "64").returncode == 0
    with ExitStack() as stack:
        if serves:
            stack.enter_context(running(config))
        ranks = stack.enter_context(job(config.with_suffix(""), tmp_path, 2))
        ranks[killed].send_signal(signal.SIGKILL)
        left = 1 - killed
        assert ranks[left].wait(60) != 0
        said = (tmp_path / f"{left}.err").read_text()
        assert f"rank {killed} of job default (pid {ranks[killed].pid}" in said
        assert "start all ranks of the job again" in said
