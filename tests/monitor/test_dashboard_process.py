"""The dashboard as a process beside a service: it answers while the service runs, and ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.history import read_history
from tests.sampling.services import drawn, make_source, service, wait_until, write_config


def answer_of(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return json.load(answer)


def is_gone(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=300).close()
    except (urllib.error.URLError, OSError):
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_it_lives_as_long_as_the_service(tmp_path: Path, end: signal.Signals) -> None:
    config = write_config(tmp_path / "cache.yaml", make_source(tmp_path / "source"))
    with service(config, "--http", "127.0.0.1:0") as process:
        assert process.stderr is not None
        url = process.stderr.readline().removeprefix("dashboard: ").strip()
        wait_until(lambda: drawn(tmp_path / "cache") == 120)
        assert answer_of(url + "status.json")["path"] == str(tmp_path / "cache")
        with urllib.request.urlopen(url + "events", timeout=300) as events:
            assert events.readline() == b"event: status\n"
            process.send_signal(end)
            process.wait(20)
        wait_until(lambda: is_gone(url))
        if end == signal.SIGTERM:
            assert process.returncode == 0
            assert read_history(tmp_path / "cache")[-1].state == "stopped"


@pytest.mark.slow
def test_the_command_ends_cleanly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "growcache", "dashboard", str(tmp_path / "none"), "--http", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "shows it once it exists" in process.stderr.readline()
    url = process.stderr.readline().removeprefix("dashboard: ").strip()
    assert answer_of(url + "caches.json")[0]["name"] == "none"
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")
