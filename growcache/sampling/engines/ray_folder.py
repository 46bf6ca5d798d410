"""The folder of a Ray that a service starts, and the folders that killed services left."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from growcache.cache.locks import FileLock, is_locked

PREFIX = "gcray-"
MOST_PARENT_CHARACTERS = 25  # because a socket's path in it may have 107
LEFT_SECONDS = 60.0  # a younger folder may not have its lock yet


class RayFolder:
    """A temporary folder that is locked while this process lives."""

    def __init__(self) -> None:
        usual = tempfile.gettempdir()
        parent = Path(usual if len(usual) <= MOST_PARENT_CHARACTERS else "/tmp")
        for left in _left_folders(parent, time.time()):
            shutil.rmtree(left, ignore_errors=True)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        self._lock = FileLock.of_directory(Path(self.path), 0.0)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _left_folders(parent: Path, now: float) -> Iterator[Path]:
    """Yield this user's folders of services that were killed together with their writers."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = path.lstat()
            is_old = found.st_mtime < now - LEFT_SECONDS
            if (
                path.is_dir()
                and found.st_uid == os.geteuid()
                and is_old
                and not is_locked(path)
            ):
                yield path
