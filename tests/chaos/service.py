"""The supervisor as a process that is started, killed, paused and stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from growcache.cache.files import CacheLayout
from growcache.cache.status_model import Status
from tests.chaos.processes import is_running, samplers_of, send, spawn, wait_for_end

READY_SECONDS = 60.0
STOP_SECONDS = 20.0


class Service:
    """``growcache run``, again and again on the same cache.

    Attributes:
        root: The cache's directory.
        max_bytes: The bound in the config file.
        starts: The number of starts.
    """

    def __init__(
        self, folder: Path, root: Path, source: dict[str, Any], max_bytes: int
    ) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.starts = 0
        self._source = source
        self._config = folder / "config.yaml"
        self._output = folder / "service.out"
        self._process: subprocess.Popen[Any] | None = None
        self.write_config(max_bytes)

    def write_config(self, max_bytes: int) -> None:
        """Write the config with this bound, by replacing the file as an editor does."""
        self.max_bytes = max_bytes
        whole_objects = not self._source["options"]
        values = {
            "source": self._source,
            "sampling": {
                "workers": 2,
                "concurrency": 8,
                "samples_per_object": "auto" if whole_objects else 4,
                "shard_samples": 32,
                "timeout_seconds": 5,
                "max_skipped": 1.0,
            },
            "cache": {
                "path": str(self.root),
                "max_bytes": max_bytes,
                "min_uses": 0,
                "min_free": 0,
                "resume_seconds": 600,
            },
        }
        temporary = self._config.with_suffix(".new")
        temporary.write_text(yaml.safe_dump(values))
        temporary.rename(self._config)

    def start(self) -> float:
        """Start it; return the seconds until it owned the cache (see `ready`)."""
        began = time.monotonic()
        with self._output.open("ab") as log:
            command = ["-m", "growcache", "run", str(self._config)]
            self._process = spawn(command, log=log)
        self.starts += 1
        while not self.ready and self.alive and time.monotonic() - began < READY_SECONDS:
            time.sleep(0.01)
        return time.monotonic() - began

    @property
    def pid(self) -> int:
        """The pid of the latest process."""
        assert self._process is not None
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether it has written its status, which it does once it owns the cache."""
        told = self.status()
        return self.alive and told is not None and told.pid == self.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the latest process; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def status(self) -> Status | None:
        """Return its last status; None before the first."""
        try:
            return Status.from_json(CacheLayout(self.root).status.read_bytes())
        except (OSError, ValueError, TypeError):
            return None

    def samplers(self) -> list[int]:
        """Return the pids of its samplers."""
        return samplers_of(self.pid) if self.alive else []

    def kill(self) -> list[int]:
        """Kill it; return the samplers that have not ended in time."""
        samplers = self.samplers()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for pid in samplers:
            send(
                pid, signal.SIGCONT
            )  # a stopped sampler cannot notice the end of its supervisor
        return wait_for_end(samplers, STOP_SECONDS)

    def stop(self) -> tuple[int, list[int]]:
        """Ask it to end; return its exit code and the samplers that still run."""
        assert self._process is not None
        samplers = self.samplers()
        self._process.terminate()
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return code, [pid for pid in samplers if is_running(pid)]

    def last_words(self) -> str:
        """Return the end of its output, without the status lines."""
        lines = self._output.read_bytes()[-6000:].decode(errors="replace").splitlines()
        return "\n".join(line[:400] for line in lines if not _is_status(line))[-1500:]


def _is_status(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
