"""Processes of the harness, none of which outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from tests.servers import die_with_parent


def _be_a_victim() -> None:
    die_with_parent()
    os.nice(2)  # the harness must win the race for moments of a millisecond


def spawn(
    command: Sequence[str],
    *,
    log: IO[bytes],
    stdin: int = subprocess.DEVNULL,
    victim: bool = True,
) -> subprocess.Popen[Any]:
    """Start ``python …`` in a session of its own; the kernel kills it with this process."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=stdin,
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"},
        preexec_fn=_be_a_victim if victim else die_with_parent,
    )


def send(pid: int, number: int) -> bool:
    """Send a signal; return False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def samplers_of(pid: int) -> list[int]:
    """Return the pids of a supervisor's samplers that run or are stopped."""
    try:
        children = psutil.Process(pid).children()
    except psutil.Error:
        return []
    return [child.pid for child in children if _is_sampler(child)]


def _is_sampler(child: psutil.Process) -> bool:
    try:
        return "sampler" in child.cmdline()
    except psutil.Error:  # it has ended
        return False


def wait_for_end(pids: Sequence[int], seconds: float) -> list[int]:
    """Wait for the processes to end; return those that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    left = list(pids)
    while (left := [pid for pid in left if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
