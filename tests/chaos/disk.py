"""A file system for the cache that can be filled on demand, and a process that watches it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from growcache.cache.files import allocated_tree
from tests.chaos.processes import spawn
from tests.servers import stop

LOOK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Disk:
    """The directory of the cache, and its file system.

    Attributes:
        root: The directory.
        size: The size of its file system in bytes; 0 if it has none of its own.
    """

    root: Path
    size: int

    def fill(self, spare: int = 0) -> bool:
        """Leave only ``spare`` bytes free; return whether that worked.

        The file system shrinks to its contents, so nothing in it is disturbed.
        """
        # A file system cannot shrink below its contents, and other processes write meanwhile.
        return bool(self.size) and any(
            self._resize(max(4096, used_bytes(self.root) + spare + 4096 * n)) for n in range(20)
        )

    def free(self) -> None:
        """Restore the file system's size."""
        if self.size:
            self._resize(self.size)

    def _resize(self, nbytes: int) -> bool:
        command = ["mount", "-o", f"remount,size={nbytes}", str(self.root)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def own_disk(root: Path, size: int) -> Iterator[Disk]:
    """Mount a file system of ``size`` bytes; if mounting is forbidden, use the directory."""
    root.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        yield Disk(root, 0)
        return
    try:
        yield Disk(root, size)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def used_bytes(root: Path) -> int:
    """Return the used bytes of the file system."""
    found = os.statvfs(root)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@dataclass(frozen=True, slots=True)
class Seen:
    """The observations of the watcher.

    Attributes:
        looks: The number of observations.
        longest_gap_seconds: The longest time between two of them.
        most_bytes: The highest usage.
        over: Each observation above the allowed usage: (allowed, found).
    """

    looks: int = 0
    longest_gap_seconds: float = 0.0
    most_bytes: int = 0
    over: tuple[tuple[int, int], ...] = ()


class Watcher:
    """A process that measures the disk's usage every few milliseconds."""

    def __init__(self, disk: Disk, log: IO[bytes], report: Path) -> None:
        self._report = report
        own = "own" if disk.size else "shared"
        command = ["-m", "tests.chaos.disk", str(disk.root), own, str(report)]
        self._process = spawn(command, log=log, stdin=subprocess.PIPE, victim=False)

    def allow(self, nbytes: int) -> None:
        """Set the allowed usage from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{nbytes}\n".encode())
        self._process.stdin.flush()

    def seen(self) -> Seen:
        """Return the observations up to about now."""
        try:
            found = json.loads(self._report.read_text())
        except (FileNotFoundError, ValueError):
            return Seen()
        return Seen(**{**found, "over": tuple(map(tuple, found["over"]))})

    def close(self) -> Seen:
        """End the process; return all its observations."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(300)
        stop(self._process)
        return self.seen()


class _Look:
    """The watcher's measurements, in its own process."""

    def __init__(self, root: Path, *, own: bool) -> None:
        self._root, self._own = root, own
        self._blocks = 0
        self.allowed = sys.maxsize
        self.looks, self.most, self.gap = 0, 0, 0.0
        self.over: list[tuple[int, int]] = []
        self._last = time.monotonic()

    def look(self) -> None:
        if self._own:
            found = os.statvfs(self._root)
            same, self._blocks = found.f_blocks == self._blocks, found.f_blocks
            if not same:  # just resized, so the two counts may be of different sizes
                return
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
        else:
            used = allocated_tree(self._root)
        now = time.monotonic()
        self.looks, self.gap = self.looks + 1, max(self.gap, now - self._last)
        self.most, self._last = max(self.most, used), now
        if used > self.allowed and len(self.over) < 100:
            self.over.append((self.allowed, used))

    def report(self) -> str:
        seen = {"looks": self.looks, "longest_gap_seconds": self.gap, "most_bytes": self.most}
        return json.dumps({**seen, "over": self.over})


def main() -> None:
    """``DIRECTORY own|shared REPORT``: measure until standard input ends."""
    root, own, report = sys.argv[1:4]
    look, written = _Look(Path(root), own=own == "own"), 0.0
    while True:
        if select.select([0], [], [], LOOK_SECONDS)[0]:
            line = sys.stdin.buffer.readline()
            if not line:
                break
            look.allowed = int(line)
        look.look()
        if time.monotonic() - written > 0.2:
            written = time.monotonic()
            _write(Path(report), look.report())
    _write(Path(report), look.report())


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


if __name__ == "__main__":
    main()
