"""The table of labels counts as egress, and is subject to `max_egress` and the rate limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.accidents.commands import growcache as command
from tests.accidents.commands import running, status, wait_for_status, write_config
from tests.servers.web import web

OBJECTS, OBJECT_BYTES = 16, 20_000
ROW = "{:05d}.npy,{},{}\n"


@contextmanager
def store(folder: Path, table_bytes: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Serve objects and a table of about `table_bytes`; yield the source and the exact size."""
    objects = folder / "objects"
    objects.mkdir()
    for number in range(OBJECTS):
        np.save(objects / f"{number:05d}.npy", np.full(OBJECT_BYTES // 8, number, "<i8"))
    rows = max(OBJECTS, table_bytes // 1000)
    lines = [ROW.format(number, number % 3, "x" * 985) for number in range(rows)]
    (folder / "labels.csv").write_text("name,state,remark\n" + "".join(lines))
    with web(folder) as address:
        labels = {"key": "name", "match": "name", "columns": ["state"]}
        source = {
            "url": f"{address}/objects/*.npy",
            "format": "npy",
            "labels": {"url": f"{address}/labels.csv", **labels},
        }
        yield source, (folder / "labels.csv").stat().st_size


@pytest.mark.slow
def test_the_table_counts_in_egress(tmp_path: Path) -> None:
    with store(tmp_path, 500_000) as (source, table_bytes):
        config = write_config(tmp_path / "cache.yaml", source)
        done = command("run", config, "--until-full")
    assert done.returncode == 0, done.stderr
    found = status(tmp_path / "cache")["egress_bytes"]
    assert found >= table_bytes + OBJECTS * OBJECT_BYTES


@pytest.mark.slow
def test_the_table_uses_up_what_a_run_may_read(tmp_path: Path) -> None:
    with store(tmp_path, 500_000) as (source, table_bytes):
        most = table_bytes + 12 * OBJECT_BYTES  # of which the search for a schema takes most
        config = write_config(
            tmp_path / "cache.yaml", source, sampling={"max_egress": most, "shard_samples": 1}
        )
        with running(config) as service:
            found = wait_for_status(
                tmp_path / "cache", lambda s: "max_egress" in str(s["waiting_for"])
            )
            assert service.alive, service.errors
    assert found["samples"] < OBJECTS
    assert most - OBJECT_BYTES - 200 <= found["egress_bytes"] <= most


@pytest.mark.slow
def test_a_table_that_a_run_may_not_read_is_refused(tmp_path: Path) -> None:
    with store(tmp_path, 500_000) as (source, table_bytes):
        config = write_config(
            tmp_path / "cache.yaml", source, sampling={"max_egress": table_bytes // 2}
        )
        done = command("run", config, "--until-full")
    assert done.returncode == 2
    assert "source.labels" in done.stderr
    assert f"{table_bytes:,} bytes" in done.stderr
    assert "sampling.max_egress" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_table_is_read_no_faster_than_allowed(tmp_path: Path) -> None:
    rate = 4_000_000
    with store(tmp_path, 12_000_000) as (source, table_bytes):
        config = write_config(
            tmp_path / "cache.yaml", source, sampling={"max_bytes_per_second": rate}
        )
        began = time.monotonic()
        done = command("run", config, "--until-full")
        took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "cache")["samples"] == OBJECTS
    assert took >= table_bytes / rate
