"""Small file systems of their own, where this user may mount any."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("tmpfs", "ext4")


@contextmanager
def small_disk(path: Path, nbytes: int, kind: str = "tmpfs") -> Iterator[Path]:
    """Mount an empty file system at a new folder, for as long as the block lasts."""
    path.mkdir()
    words = ["-t", "tmpfs", "-o", f"size={nbytes}", "small-disk"]
    if kind == "ext4":
        image = path.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(nbytes)
        _do("mkfs.ext4", "-q", "-m", "0", str(image))
        words = ["-o", "loop", str(image)]
    _do("mount", *words, str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _do(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"there is no {words[0]} here")
    if done.returncode:
        pytest.skip(f"cannot mount a disk: {done.stderr.strip()}")


def used_bytes(disk: Path) -> int:
    """All that is allocated on the file system."""
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


class Other:
    """Somebody else's file, which takes what it can get."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._file = (disk / "somebody else's").open("wb")
        self._size = 0

    def take_all(self) -> None:
        """Take the rest of the disk, down to the last block."""
        step = 1 << 40
        while step >= 4096:
            found = os.statvfs(self._disk)
            step = min(step, found.f_bfree * found.f_frsize // 4096 * 4096)
            if not step:
                return
            try:
                os.posix_fallocate(self._file.fileno(), self._size, step)
                self._size += step
            except OSError:  # others are quicker, or the file system needs a block for itself
                step //= 2

    def close(self) -> None:
        """Give it all back."""
        (self._disk / "somebody else's").unlink()
        self._file.close()


@contextmanager
def filled_up(disk: Path) -> Iterator[Other]:
    """Somebody else takes the rest of the disk, and goes away with the block."""
    other = Other(disk)
    other.take_all()
    try:
        yield other
    finally:
        other.close()
