"""Hung samplers of a dead service are ended by the next command, and stopped services are named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.accidents.commands import (
    command,
    growcache,
    is_gone,
    rows_of,
    running,
    status,
    wait_for_status,
    wait_until,
    write_config,
    write_objects,
)

HANGS = """
import ctypes

def keep(sample):
    if {when}:
        ctypes.PyDLL(None).pause()  # with the GIL, so that no thread of the process runs
    return sample
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    source = rows_of(write_objects(tmp_path / "in"))
    return write_config(tmp_path / "c.yaml", source, sampling={"workers": 2})


def samplers(cache: Path) -> list[int]:
    """Return the pids of a service's samplers once all of them run."""
    found = wait_for_status(cache, lambda found: found["workers"] == 2 and found["drawn"])
    return [worker["pid"] for worker in found["worker_states"]]


@contextmanager
def killed_service(config: Path, *, stop: bool = True) -> Iterator[list[int]]:
    """Kill a service after its samplers were stopped by a signal; yield the samplers' pids."""
    pids: list[int] = []
    try:
        with running(config, "--set", "cache.min_uses=0") as service:
            pids = samplers(config.with_suffix(""))
            for pid in pids if stop else ():
                os.kill(pid, signal.SIGSTOP)
            service.process.kill()
        yield pids
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_stopped_samplers_of_a_dead_service_are_ended(config: Path) -> None:
    with killed_service(config) as pids:
        began = time.monotonic()
        done = growcache("run", config, "--until-full")
        # mostly the start of the command on a busy machine
        assert time.monotonic() - began < 30
        assert done.returncode == 0, done.stderr
        assert all(is_gone(pid) for pid in pids)
        assert done.stderr.count("\n") == 1
        assert "killed hung samplers of an earlier service" in done.stderr
    assert status(config.with_suffix(""))["complete"]
    assert growcache("check", config.with_suffix("")).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [["clear", "--yes"], ["check", "--repair"]])
def test_other_commands_end_them_too(words: list[str], config: Path) -> None:
    with killed_service(config) as pids:
        done = growcache(words[0], config.with_suffix(""), *words[1:])
        assert done.returncode == 0, done.stderr
        assert all(is_gone(pid) for pid in pids)


@pytest.mark.slow
def test_a_sampler_that_hangs_in_a_call_is_ended(config: Path, tmp_path: Path) -> None:
    """The sampler notices neither the end of its pipe nor SIGTERM."""
    (tmp_path / "mine.py").write_text(HANGS.format(when="sample['x'].flat[1] == 3"))
    hung = ["--set", "sampling.transform=mine:keep", "--set", "sampling.timeout_seconds=1000"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    cache, pids = config.with_suffix(""), list[int]()
    try:
        with running(config, *hung, env=environment) as service:
            found = wait_for_status(cache, lambda found: found["workers"] == 2)
            pids = [worker["pid"] for worker in found["worker_states"]]
            wait_until(lambda: any(in_pause(pid) for pid in pids))
            service.process.kill()
        wait_until(lambda: sum(not is_gone(pid) for pid in pids) >= 1)
        (tmp_path / "mine.py").write_text(HANGS.format(when=False))
        done = growcache("run", config, *hung, "--samples", "4", env=environment)
        assert done.returncode == 0, done.stderr
        assert all(is_gone(pid) for pid in pids)
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def in_pause(pid: int) -> bool:
    """Return whether a thread of the process waits in `pause`."""
    waits = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/wchan")]
    return any("pause" in text for text in waits) or in_call(pid, "34")


def in_call(pid: int, number: str) -> bool:
    """Return whether a thread is in the system call with this number (x86-64)."""
    calls = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/syscall")]
    return any(call[:1] == [number] for call in calls)


@pytest.mark.slow
def test_no_other_process_is_ended(config: Path, tmp_path: Path) -> None:
    """A pid may have been reused, and a process that holds the lock file need not be a sampler."""
    with killed_service(config, stop=False) as pids:
        wait_until(lambda: all(is_gone(pid) for pid in pids))
        lock = config.with_suffix("") / "samplers.lock"
        hold = (
            "import fcntl, sys, time; f = open(sys.argv[1]); "
            "fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True); time.sleep(300)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", hold, str(lock)], stdout=subprocess.PIPE
        ) as bystander:
            assert bystander.stdout is not None
            bystander.stdout.readline()
            done = growcache("run", config, "--samples", "16")
            assert bystander.poll() is None
            bystander.kill()
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "cannot be seen from here" in done.stderr


@pytest.mark.slow
def test_samplers_in_another_container_are_told_of_in_one_line(config: Path) -> None:
    if shutil.which("unshare") is None or os.geteuid():
        pytest.skip("only root can make a namespace of processes")
    with killed_service(config) as pids:
        words = ["unshare", "--pid", "--fork", "--mount-proc", *command("run", config)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "cannot be seen from here" in done.stderr
        assert not any(is_gone(pid) for pid in pids)


@pytest.mark.slow
def test_a_stopped_service_is_named_to_the_next(config: Path) -> None:
    with running(config) as service:
        cache, pid = config.with_suffix(""), service.process.pid
        samplers(cache)
        service.process.send_signal(signal.SIGSTOP)
        wait_for_status(cache, lambda found: found["state"] == "waiting")
        for words in (["run", str(config)], ["clear", str(cache), "--yes"]):
            done = growcache(*words)
            assert done.returncode == 2
            assert done.stderr.count("\n") == 1
            assert f"stopped by a signal; continue it with: kill -CONT {pid}" in done.stderr
        service.process.send_signal(signal.SIGCONT)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(300) == 0
