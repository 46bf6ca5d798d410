"""What the kernel tells about the processes of this machine, and how hung samplers end.

A pid that somebody wrote down may be another process's by now. So the kernel is asked which
processes have a lock file open, and the one that is ended is held by a descriptor meanwhile.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STOPPED_STATES = frozenset("tT")  # by a signal, or by a debugger
ENDED_STATES = frozenset("ZX")  # though its parent was not told yet
SAMPLER = [b"-m", b"growcache", b"sampler"]  # how its command line ends
DEATH_SECONDS = 1.0  # that a killed process needs to be gone, with room for a busy machine

_PROC = Path("/proc")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; False where that cannot be seen."""
    return _state(pid) in STOPPED_STATES


def is_running(pid: int) -> bool:
    """Return whether there is such a process, and it has not ended."""
    state = _state(pid)
    return bool(state) and state not in ENDED_STATES


def _state(pid: int) -> str:
    """Return the letter of a process's state; empty where there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in parentheses, may hold any character, also spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return fields[0] if fields else ""


def has_open(pid: int, path: Path) -> bool:
    """Return whether a process has the file open; False where that cannot be seen."""
    with suppress(OSError):
        wanted = path.stat()
        return any(os.path.samestat(found, wanted) for found in _open_files(pid))
    return False


def end_samplers(lock: Path) -> tuple[int, ...]:
    """Kill the samplers that have a lock file open; return their pids once they are gone.

    Only who holds ``supervisor.lock`` may call this: then all of them are of a service that
    died. Those of other users, and of other hosts and containers, are not seen.
    """
    return tuple(pid for pid in _pids() if _end_sampler(pid, lock))


def _end_sampler(pid: int, lock: Path) -> bool:
    if not _is_sampler(pid, lock):  # most are not, and cost no descriptor
        return False
    try:
        process = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel is older than these descriptors
        return False
    try:
        if not _is_sampler(pid, lock):  # the same process as before, from here on
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], DEATH_SECONDS)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _is_sampler(pid: int, lock: Path) -> bool:
    """Whether it is a sampler of this user's, of the cache whose samplers lock that file."""
    try:
        if (_PROC / str(pid)).stat().st_uid != os.geteuid():
            return False
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[-4:-1] == SAMPLER and has_open(pid, lock)


def _pids() -> Iterator[int]:
    for path in _PROC.iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            yield int(path.name)


def _open_files(pid: int) -> Iterator[os.stat_result]:
    for descriptor in (_PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            yield descriptor.stat()
