"""Real services for tests: sources on disk, `growcache run` as a process."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from growcache.cache.index.reader import read_index
from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.errors import CacheError

SAMPLER = b"sampler"


def make_source(folder: Path, count: int = 120, shape: tuple[int, ...] = (16, 64)) -> str:
    """Write npy objects whose content tells which one it is; return the URL of all."""
    folder.mkdir(parents=True)
    for number in range(count):
        values = np.random.default_rng(number).random(shape).astype(np.float32)
        values.flat[0] = number
        np.save(folder / f"{number:05d}.npy", values)
    return f"{folder}/*.npy"


def write_config(path: Path, url: str, **sections: dict[str, Any]) -> Path:
    """Write a config; keyword arguments are sections, merged over small defaults."""
    values: dict[str, dict[str, Any]] = {
        "source": {"url": url, "format": "npy"},
        "sampling": {"workers": 1, "shard_samples": 8, "timeout_seconds": 10},
        "cache": {"path": str(path.with_suffix("")), "max_bytes": "20MB", "min_free": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path.write_text(yaml.safe_dump(values))
    return path


@contextmanager
def service(config: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`growcache run` as a child that does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "growcache", "run", str(config), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run(config: Path, *arguments: str, seconds: float = 300) -> tuple[int, str]:
    """Run the service to its end; return (exit code, what it said on stderr)."""
    with service(config, *arguments) as process:
        _, errors = process.communicate(timeout=seconds)
        return process.returncode, errors


def wait_until(condition: Any, seconds: float = 300, every: float = 0.02) -> None:
    """Return once the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(every)


def drawn(cache: Path) -> int:
    """Samples ever drawn into a cache that need not exist yet."""
    try:
        return read_index(cache).totals.drawn
    except CacheError:
        return 0


def status(cache: Path) -> Status:
    """The status as `growcache status` would show it."""
    return read_status(cache)


def samplers_of(parent: int) -> list[int]:
    """Process ids of a supervisor's samplers."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and SAMPLER in command:
            found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def digests(cache: Path) -> dict[str, str]:
    """Every shard file and sidecar with its hash."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((cache / "shards").iterdir())
    }
