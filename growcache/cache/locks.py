"""Advisory locks whose holder the kernel frees when it dies.

Only flock decides who lives; the text inside a lock file is for messages. A lock is
released by closing its descriptor, never by LOCK_UN: a forked child shares the open file
description, and an unlock there would free it under the parent.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from growcache.cache.command import readable_command
from growcache.cache.files import unusable
from growcache.cache.undivided import undivided
from growcache.errors import CacheError, CachePathError

POLL_SECONDS = 0.02
LEASES_VERSION = 2  # the latest layout of leases that who holds a lock can read
NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

# Descriptors that a forked child must not keep alive.
_owned: set[int] = set()


def open_owned(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor that children of this process will not inherit, even by fork.

    The file itself is opened, never what a symbolic link in its place leads to.
    """
    with undivided():
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        _owned.add(descriptor)
        return descriptor


def close_owned(descriptor: int) -> None:
    """Close a descriptor of `open_owned`, and so release its lock."""
    with undivided(), suppress(KeyError):  # in a forked child it is closed already
        _owned.remove(descriptor)
        os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in _owned:
        os.close(descriptor)
    _owned.clear()


os.register_at_fork(after_in_child=_close_in_child)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; False where another holds it.

    Raises:
        CachePathError: the file system has no such locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise CachePathError(
                f"the file system of the cache has no locks (flock: {error.strerror}), without "
                "which processes cannot share it; choose a cache.path on a local disk"
            ) from error
        raise
    return True


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file exclusively; False where there is no file.

    The probe is a shared lock, so that any number of probes never see one another.
    """
    try:
        descriptor = open_owned(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise unusable(path, error) from error
        raise
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        close_owned(descriptor)


class LockedError(CacheError):
    """Another process holds a lock."""


class FileLock:
    """A lock file that is created, locked for as long as the object is open, never unlinked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path, *, shared: bool = False, seconds: float = 0.0) -> FileLock:
        """Return the held lock, waiting for at most ``seconds``.

        A shared lock is of a file that is there: who shares it made none of the cache.

        Raises:
            LockedError: another process kept it for that long.
            CachePathError: the file cannot be opened, or its file system has no locks.
        """
        try:
            descriptor = open_owned(path, os.O_RDWR | (0 if shared else os.O_CREAT))
        except OSError as error:
            raise unusable(path, error) from error
        deadline = time.monotonic() + seconds
        try:
            while not try_lock(descriptor, shared=shared):
                if time.monotonic() >= deadline:
                    raise LockedError(f"{path} is locked by another process")
                time.sleep(POLL_SECONDS)
        except BaseException:
            close_owned(descriptor)
            raise
        lock = cls(path, descriptor)
        if not shared:
            os.ftruncate(descriptor, 0)
            told = {**this_process(), "leases": LEASES_VERSION}
            os.pwrite(descriptor, json.dumps(told).encode(), 0)
        return lock

    @classmethod
    def of_directory(cls, path: Path, seconds: float) -> FileLock:
        """Return the held lock of a directory, which takes no file of its own.

        Raises:
            CacheError: another process kept it for so long.
        """
        descriptor = open_owned(path, os.O_RDONLY | os.O_DIRECTORY)
        deadline = time.monotonic() + seconds
        while not try_lock(descriptor):
            if time.monotonic() >= deadline:
                close_owned(descriptor)
                raise CacheError(f"{path} is locked by another process")
            time.sleep(POLL_SECONDS / 10)
        return cls(path, descriptor)

    def close(self) -> None:
        """Release the lock; twice is harmless."""
        if self._descriptor is not None:
            close_owned(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def this_process() -> dict[str, Any]:
    """Return who this is, for messages: host, pid and command, which holds no secret."""
    command = readable_command([sys.argv[0] or sys.executable, *sys.argv[1:]])
    return {"host": socket.gethostname(), "pid": os.getpid(), "command": command[:200]}


def holder(path: Path) -> dict[str, Any]:
    """Return what the holder of a lock file wrote into it; empty where that is unreadable."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
