"""`status` of a service that is stopped, grows again, or needs a restart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.accidents.commands import (
    edit_config,
    growcache,
    rows_of,
    running,
    status,
    wait_for_status,
    write_config,
    write_objects,
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    url = write_objects(tmp_path / "in", count=100, rows=64, columns=1024)
    return write_config(
        tmp_path / "c.yaml",
        rows_of(url),
        # Without a limit, a service that draws without end takes a whole core.
        sampling={"shard_samples": 32, "max_bytes_per_second": "10MB"},
        cache={"max_bytes": "4MB", "min_uses": 0},
    )


def test_a_stopped_process_is_not_running(config: Path) -> None:
    cache = config.with_suffix("")
    with running(config) as service:
        wait_for_status(cache, lambda found: found["drawn"] > 0)
        service.process.send_signal(signal.SIGSTOP)
        found = wait_for_status(cache, lambda found: found["state"] == "waiting")
        assert f"kill -CONT {service.process.pid}" in found["waiting_for"]
        assert found["samples_per_second"] == 0
        service.process.send_signal(signal.SIGCONT)
        wait_for_status(cache, lambda now: now["state"] in ("running", "full"))


@pytest.mark.slow
def test_a_raised_bound_is_not_called_full(config: Path) -> None:
    cache = config.with_suffix("")
    with running(config):
        wait_for_status(cache, lambda found: found["evicted_samples"] > 0)
        assert status(cache)["full"]
        assert "at its bound" in growcache("status", cache).stdout
        edit_config(config, cache__max_bytes="3GB")
        wait_for_status(cache, lambda found: found["max_bytes"] == 3_000_000_000)
        before = wait_for_status(cache, lambda found: not found["full"])
        assert "at its bound" not in growcache("status", cache).stdout
        wait_for_status(cache, lambda found: found["bytes"] > before["bytes"])


@pytest.mark.slow
def test_settings_that_need_a_restart_are_shown(config: Path) -> None:
    cache = config.with_suffix("")
    with running(config):
        assert wait_for_status(cache, lambda found: found["drawn"] > 0)["restart_for"] == []
        edit_config(config, sampling__workers=3, cache__min_uses=2)
        found = wait_for_status(cache, lambda found: found["restart_for"])
        assert found["restart_for"] == ["sampling.workers"]
        shown = growcache("status", cache, env={"COLUMNS": "200", "PATH": "/usr/bin"}).stdout
        assert "restart the service for sampling.workers" in shown
        edit_config(config, sampling__workers=1)
        wait_for_status(cache, lambda found: not found["restart_for"])


@pytest.mark.slow
def test_advice_can_be_followed_as_it_stands(config: Path) -> None:
    assert growcache("run", config, "--samples", "10").returncode == 0
    edit_config(config, sampling__seed=7)
    refused = growcache("run", config)
    assert refused.returncode == 2
    advice = refused.stderr.rpartition("empty it with: growcache ")[2].split()
    assert advice == ["clear", str(config.with_suffix(""))]
    assert growcache(*advice, "--yes").returncode == 0
    assert growcache("run", config, "--samples", "10").returncode == 0
