"""Purges of random objects, begun at any time, killed at any time, and what they leave nowhere."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growcache.loading.snapshot import Snapshot
from tests.chaos.checks import exported
from tests.chaos.content import key_name
from tests.chaos.processes import send, spawn

SETTLE_SECONDS = 90.0
LARGEST_SHARE = 0.4  # of all objects; the others go on being drawn
DONE = (0, 1)  # exit codes; 1: readers hold retired shards


@dataclass(slots=True)
class _Purge:
    """A command that runs."""

    key: int
    process: subprocess.Popen[Any]
    output: Path

    @property
    def reported(self) -> bool:
        """Whether it printed its report: an error may have the same exit code."""
        return self.process.poll() in DONE and b'{"keys":' in self.output.read_bytes()


class Purges:
    """The objects that were purged.

    Attributes:
        asked: Every object that some command named.
        gone: When the command had ended, by object, in monotonic seconds.
        refused: The number of commands that ended with an error, and were given again.
    """

    def __init__(self, root: Path, folder: Path, objects: int) -> None:
        self.asked: set[int] = set()
        self.gone: dict[int, float] = {}
        self.refused = 0
        self._root = root
        self._folder = folder
        self._said = ""
        self._export = folder / "export"
        self._objects = objects
        self._running: list[_Purge] = []

    def begin(self, luck: float) -> bool:
        """Start a command for another object; return False if enough are gone."""
        if len(self.asked) >= LARGEST_SHARE * self._objects:
            return False
        left = [key for key in range(self._objects) if key not in self.asked]
        key = random.Random(luck).choice(left)
        self.asked.add(key)
        self._spawn(key)
        return True

    def _spawn(self, key: int) -> None:
        command = ["-m", "growcache", "purge", "--json", str(self._root), key_name(key)]
        output = self._folder / f"purge-{key}.out"
        with output.open("wb") as log:
            self._running.append(_Purge(key, spawn(command, log=log), output))

    def kill(self) -> int:
        """Kill all commands wherever they are; return how many still ran."""
        self._reap()
        killed = len(self._running)
        for one in self._running:
            send(one.process.pid, signal.SIGKILL)  # its pid is not free before it is awaited
            one.process.wait()
        self._running.clear()
        return killed

    def wait(self, seconds: float) -> bool:
        """Wait for the commands that run; return whether all have ended."""
        deadline = time.monotonic() + seconds
        while self._reap() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._running

    def _reap(self) -> bool:
        for one in list(self._running):
            if one.process.poll() is None:
                continue
            self._running.remove(one)
            if one.reported:
                self.gone[one.key] = time.monotonic()
            else:
                self._said = one.output.read_text()[-600:]
                self.refused += 1
        return bool(self._running)

    def settle(self) -> list[str]:
        """Finish every purge that was begun, killed or refused, once nothing hinders it."""
        began = time.monotonic()
        self.wait(SETTLE_SECONDS)
        self.kill()
        for key in sorted(self.asked - self.gone.keys()):
            self._spawn(key)
            self.wait(max(1.0, began + SETTLE_SECONDS - time.monotonic()))
            self.kill()
        left = sorted(self.asked - self.gone.keys())
        if not left:
            return []
        return [f"purge: objects {left} cannot be purged: {self._said}"]

    def look(self) -> list[str]:
        """Export the cache and peek into it: neither shows a sample of a purged object."""
        wrong = []
        peeked = self._command("peek", "--json")
        shown = [key for key in self.gone if key_name(key) in peeked.stdout]
        if shown:
            wrong.append(f"purge: peek shows samples of objects {shown}")
        try:
            copied = self._command("export", str(self._export))
            if copied.returncode == 0:
                wrong += exported(_keys_in(self._export), self.gone)
        finally:
            shutil.rmtree(self._export, ignore_errors=True)
        failed = [done for done in (peeked, copied) if done.returncode]
        return wrong + [
            f"purge: exit code {done.returncode} of {done.args[3]}: {done.stderr[-500:]}"
            for done in failed
            if not _is_empty_cache(done.stderr)
        ]

    def _command(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "growcache", name, str(self._root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _is_empty_cache(words: str) -> bool:
    said = " ".join(words.split())
    return "no samples yet" in said or "no sample yet" in said


def _keys_in(folder: Path) -> Iterable[int]:
    """Return the objects of the samples in an export, as its values say."""
    with Snapshot.take(folder, job="harness") as snapshot:
        for row in snapshot.shards:
            shard = snapshot.mapped(row.number)
            for i in range(row.samples):
                yield int(shard[i]["x"].flat[0])
