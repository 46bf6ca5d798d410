"""Room that is given up when the disk is full, so that shards can be evicted even then.

An eviction has to commit before it may unlink; without a little room kept back, that
commit is what fails on a full disk, and nothing could ever be freed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from growcache.cache.files import FILE_MODE, allocated
from growcache.errors import CacheFullError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


def is_full_disk(error: OSError) -> bool:
    """Return whether the error says that the disk, or a quota, has no room."""
    return error.errno in _NO_ROOM


class Ballast:
    """A file of nothing.

    Attributes:
        path: of the file.
        size: its bytes, while it is there.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size

    def drop(self) -> bool:
        """Give the room up; False where that was done already."""
        there = allocated(self.path) > 0
        self.path.unlink(missing_ok=True)
        return there

    def restore(self) -> bool:
        """Make the file if it is missing and the disk has room to spare; True if it is there."""
        if self.path.exists() and self.path.stat().st_size == self.size:
            return True
        self.path.unlink(missing_ok=True)
        if free_bytes(self.path.parent) < 2 * self.size:
            return False
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, FILE_MODE)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            if not is_full_disk(error):
                raise
            return False
        finally:
            os.close(descriptor)
        return True


@contextmanager
def full_disk_named(what: str) -> Iterator[None]:
    """Turn the operating system's word for a full disk into ours.

    Raises:
        CacheFullError: there was no room for ``what``.
    """
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise CacheFullError(
            f"no room on the disk for {what}; free some, or lower cache.max_bytes"
        ) from error


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the path's file system."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize
