"""Locks: between processes by flock, and between a thread and a fork.

Only flock decides which process lives. The text in a lock file is for messages. A lock is
released by closing its descriptor, never by LOCK_UN. A forked child shares the open file
description, and an unlock there would free the parent's lock.

A fork copies every lock as it is, including those of C libraries, but only the forking thread.
A lock that another thread held stays locked in the child forever. So forks wait for the blocks
of `fork_lock`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock, get_ident
from typing import Any

from growcache.cache.files import unusable_path_error
from growcache.errors import CacheError, CachePathError, ErrorCode
from growcache.modes import FILE_MODE, share_if_folder_is

PROC_LOCKS = Path("/proc/locks")
PID_NAMESPACE = Path("/proc/self/ns/pid")
# The kernel's number of the root namespace, which sees all processes.
INITIAL_PID_NAMESPACE = 4026531836

# `1: FLOCK  ADVISORY  WRITE 4711 08:01:393231 0 EOF`; an arrow before FLOCK marks a waiting
# process.
_FLOCK = re.compile(r"^\d+: FLOCK\s+ADVISORY\s+WRITE\s+(-?\d+)\s+\S+:(\d+)\s", re.MULTILINE)


def flock_state(status: os.stat_result, known: Path) -> tuple[bool | None, int | None]:
    """Return (whether a process holds a flock on a file, its pid), without opening the file.

    A missing entry in the kernel's list counts only if all processes are visible, and if the
    list uses the device numbers of `stat`, which the ``known`` lock file shows. Otherwise the
    result is None.
    """
    text = _proc_locks()
    if (pid := flock_holder(status.st_ino, text)) is not None:
        return True, pid if pid > 0 else None
    return (False if _lists_all_locks(text, known) else None), None


def _lists_all_locks(text: str, known: Path) -> bool:
    try:
        return (
            pid_namespace() == INITIAL_PID_NAMESPACE
            and is_locked(known)
            and flock_holder(known.stat().st_ino, text) is not None
        )
    except OSError:
        return False


def flock_holder(inode: int, text: str) -> int | None:
    """Return the pid that holds a flock on a file with this inode number, or None.

    >>> flock_holder(42, "1: FLOCK  ADVISORY  WRITE 4711 08:01:42 0 EOF")
    4711
    >>> flock_holder(42, "1: -> FLOCK  ADVISORY  WRITE 4711 08:01:42 0 EOF")
    """
    found = (int(pid) for pid, number in _FLOCK.findall(text) if int(number) == inode)
    return next(found, None)


def _proc_locks() -> str:
    try:
        return PROC_LOCKS.read_text()
    except OSError:
        return ""


HIDDEN_SECRET = "HIDDEN"  # letters only, so that a shell needs no quotes around it

_OVERRIDE = re.compile(r"(?:--[\w-]+=)?[^=]*=")
# A password that is not quoted properly may contain "/" and "@". Hiding too much is better than
# too little.
_USERINFO = re.compile(r"(?<=://)(?:[^/\s:]*:\S*|[^/\s]*)@")
_SIGNED = re.compile(
    r"([?&][^=&\s]*(?:sig|token|secret|password|credential|key)[^=&\s]*=)[^&\s]+", re.IGNORECASE
)


def readable_command(arguments: Sequence[str]) -> str:
    """Return a command line without secrets, because lock files are copied with a cache.

    >>> readable_command(["run", "--set", "source.storage_options.secret=x", "s3://k:s@b/**"])
    "run --set source.storage_options.secret=HIDDEN 's3://HIDDEN@b/**'"
    """
    if arguments[1:2] == ["purge"]:  # keys may be personal data
        arguments = [*arguments[:2], HIDDEN_SECRET]
    return shlex.join(map(_without_secrets, [Path(arguments[0]).name, *arguments[1:]]))


def _without_secrets(argument: str) -> str:
    if "storage_options" in argument and (override := _OVERRIDE.match(argument)):
        return f"{override[0]}{HIDDEN_SECRET}"
    argument = _USERINFO.sub(f"{HIDDEN_SECRET}@", argument)
    return _SIGNED.sub(rf"\1{HIDDEN_SECRET}", argument) if "://" in argument else argument


FORK_WAIT_SECONDS = 10.0  # then a child that may hang is better than a parent that does
FORK_PAUSE_SECONDS = 0.002
FORK_MOST_HELD_SECONDS = 0.1

# A thread in a block holds a lock of its own, because `with` takes and releases a lock in C. No
# signal handler can interrupt that, as it could in Python code.
_lock_of_thread: dict[int, RLock] = {}  # of each thread that was ever in a block
_new_lock_gate = RLock()  # held while one is added
_taken_by_forking: dict[int, list[RLock]] = {}  # by threads that fork
_postponed_errors: list[BaseException] = []


def fork_lock() -> RLock:
    """Return the context of a block in which no other thread forks. Blocks may overlap."""
    me = get_ident()
    own = _lock_of_thread.get(me)
    if own is None:
        with _new_lock_gate:
            own = _lock_of_thread.setdefault(me, RLock())
    return own


def _before_fork() -> None:
    """Take the locks of all other threads, or give up after a time.

    Exceptions of signal handlers are raised after the fork, because Python prints those that a
    hook raises, and forks anyway.
    """
    deadline, seconds = time.monotonic() + FORK_WAIT_SECONDS, FORK_PAUSE_SECONDS
    while time.monotonic() < deadline:
        try:
            if _take_all_locks(seconds):
                return
            # A thread in a block may wait for a thread that is about to enter one.
            _release_all_locks()
            time.sleep(FORK_PAUSE_SECONDS)
            seconds = min(2 * seconds, FORK_MOST_HELD_SECONDS)
        except BaseException as error:  # noqa: BLE001 - see _raise_postponed
            _postponed_errors.append(error)
            _release_all_locks()


def _take_all_locks(seconds: float) -> bool:
    until, me = time.monotonic() + seconds, get_ident()
    if not _take_lock(_new_lock_gate, until):
        return False
    # All of them, because the gate is held.
    others = [lock for thread, lock in _lock_of_thread.items() if thread != me]
    return all(_take_lock(lock, until) for lock in others)


def _take_lock(lock: RLock, until: float) -> bool:
    # Recorded first, because releasing a lock that was not taken is harmless.
    _taken_by_forking.setdefault(get_ident(), []).append(lock)
    return lock.acquire(timeout=max(0.0, until - time.monotonic()))


def _release_all_locks() -> None:
    taken = _taken_by_forking.get(get_ident(), [])
    while taken:
        with suppress(RuntimeError):  # it was not taken, or was released before
            taken[-1].release()
        taken.pop()


def _raise_postponed() -> None:
    if _postponed_errors:
        raise _postponed_errors.pop()


def _reset_in_child() -> None:
    global _new_lock_gate
    _new_lock_gate = RLock()
    for state in (_lock_of_thread, _taken_by_forking, _postponed_errors):
        state.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_release_all_locks, after_in_child=_reset_in_child
)
# Once more, because a signal handler may have run before the first one, and raised.
os.register_at_fork(after_in_parent=_release_all_locks)
os.register_at_fork(after_in_parent=_raise_postponed)


POLL_SECONDS = 0.02
LEASES_VERSION = 2  # latest layout of leases that the holder of a lock can read
NO_FLOCK_ERRORS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

# Descriptors that a forked child must not keep open.
_owned_descriptors: set[int] = set()


def open_owned(path: Path, flags: int, mode: int = FILE_MODE) -> int:
    """Return a descriptor that children do not inherit, even by fork.

    No symbolic link is followed.
    """
    with fork_lock():
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        _owned_descriptors.add(descriptor)
    if flags & os.O_CREAT:
        try:
            share_if_folder_is(descriptor, path.parent)
        except BaseException:
            close_owned(descriptor)
            raise
    return descriptor


def close_owned(descriptor: int) -> None:
    with fork_lock(), suppress(KeyError):  # a forked child has closed it already
        _owned_descriptors.remove(descriptor)
        os.close(descriptor)


def _close_owned_in_child() -> None:
    for descriptor in _owned_descriptors:
        os.close(descriptor)
    _owned_descriptors.clear()


os.register_at_fork(after_in_child=_close_owned_in_child)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; return False if another process holds it.

    May raise CachePathError.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_FLOCK_ERRORS:
            raise CachePathError(
                "the file system of the cache does not support locks (flock: "
                f"{error.strerror}), which processes need to share it; choose a cache.path on "
                "a local disk",
                code="GC407",
            ) from error
        raise
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file exclusively; False without the file.

    The test takes a shared lock, so that several tests do not see each other.
    """
    try:
        descriptor = open_owned(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise unusable_path_error(path, error) from error
        raise
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        close_owned(descriptor)


class LockedError(CacheError):
    """Another process holds a lock."""

    code: ErrorCode = "GC404"


class FileLock:
    """A lock file that is locked while the object is open, and never unlinked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path, *, shared: bool = False, seconds: float = 0.0) -> FileLock:
        """Return the lock, or raise LockedError. A shared lock needs an existing file."""
        try:
            descriptor = open_owned(path, os.O_RDWR | (0 if shared else os.O_CREAT))
        except OSError as error:
            raise unusable_path_error(path, error) from error
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
            told = {
                **this_process(),
                "pid_namespace": pid_namespace(),
                "since": time.time(),
                "leases": LEASES_VERSION,
            }
            os.pwrite(descriptor, json.dumps(told).encode(), 0)
        return lock

    @classmethod
    def of_directory(cls, path: Path, seconds: float) -> FileLock:
        """Return the lock of a directory, which needs no file."""
        descriptor = open_owned(path, os.O_RDONLY | os.O_DIRECTORY)
        deadline = time.monotonic() + seconds
        while not try_lock(descriptor):
            if time.monotonic() >= deadline:
                close_owned(descriptor)
                raise CacheError(f"{path} is locked by another process", code="GC404")
            time.sleep(POLL_SECONDS / 10)
        return cls(path, descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            close_owned(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def this_process() -> dict[str, Any]:
    command = readable_command([sys.argv[0] or sys.executable, *sys.argv[1:]])
    return {"host": socket.gethostname(), "pid": os.getpid(), "command": command[:200]}


def pid_namespace() -> int:
    """Return the kernel's number of this process's pid namespace, or 0 if unknown."""
    try:
        return PID_NAMESPACE.stat().st_ino
    except OSError:
        return 0


def are_pids_ours(host: str, namespace: int | None) -> bool:
    """Whether pids that were written in that namespace are valid here.

    Containers of one Kubernetes pod share a host name, but have separate pids. Earlier versions
    wrote no namespace.
    """
    return host == socket.gethostname() and namespace in (None, pid_namespace())


def lock_holder(path: Path) -> dict[str, Any]:
    """Return the text that the holder wrote into a lock file as values; empty if unreadable."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
