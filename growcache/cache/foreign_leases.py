"""What lies among the leases and cannot be read: another user's, another version's, or none.

Nobody can say which shards such a lease names. Where a process holds it, or nobody can tell
whether one does, it protects all that was there when it was first seen, for its reader cannot
have taken more. Nothing is opened that could block, and no link is followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from growcache.cache.locks import is_held

LOCKS = Path("/proc/locks")
NAMESPACE = Path("/proc/self/ns/pid")
INITIAL_NAMESPACE = (
    "pid:[4026531836]"  # the kernel's number of the namespace that sees them all
)

# `1: FLOCK  ADVISORY  WRITE 4711 08:01:393231 0 EOF`; who waits has an arrow before FLOCK.
_FLOCK = re.compile(r"^\d+: FLOCK\s+ADVISORY\s+WRITE\s+(-?\d+)\s+\S+:(\d+)\s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ForeignLease:
    """A lease, by its name, that this process cannot read.

    Attributes:
        path: of it.
        reason: why it cannot be read, in words.
        uid: of its owner.
        pid: of who holds it, where the kernel tells.
        held: whether a process holds it; None: nobody here can tell.
        opened: whether its content could be read, and says nothing.
    """

    path: Path
    reason: str
    uid: int
    pid: int | None
    held: bool | None
    opened: bool = False

    @property
    def protects(self) -> bool:
        """Whether there may be a reader, whose shards nobody knows."""
        return self.held is not False

    @property
    def advice(self) -> str:
        """What to do about it, in words."""
        if not self.protects:
            return "it protects nothing and may be removed"
        ending = "it protects all that was cached when it came, until its reader ends"
        if self.uid != os.geteuid():
            ending += (
                f"; run reader and service as one user (this is uid {os.geteuid()}, not "
                f"{self.uid})"
            )
        if self.held is None:
            ending += f"; if its reader is gone, remove it: rm {self.path}"
        return ending

    def __str__(self) -> str:
        pid = f", pid {self.pid}" if self.pid is not None else ""
        return (
            f"the lease {self.path.name} of uid {self.uid}{pid} cannot be read ({self.reason})"
        )


def refused(path: Path, error: OSError, known: Path) -> ForeignLease | None:
    """Return what is known of a lease that could not be opened; None where it is gone.

    Args:
        path: of the lease.
        error: why.
        known: a lock file in the same file system, see `holder_of`.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return no_file(path, status)
    held, pid = holder_of(status, known)
    reason = "no permission" if error.errno in _REFUSALS else os.strerror(error.errno or 0)
    return ForeignLease(path, reason, status.st_uid, pid, held)


_REFUSALS = (errno.EACCES, errno.EPERM)


def unintelligible(path: Path, status: os.stat_result, *, held: bool) -> ForeignLease:
    """Return what is known of a file that was read, and says nothing."""
    pid = _flock_holder(status.st_ino, _locks()) if held else None
    reason = (
        "its content is of another version, or damaged" if status.st_size else "it is empty"
    )
    return ForeignLease(path, reason, status.st_uid, pid, held, opened=True)


def no_file(path: Path, status: os.stat_result) -> ForeignLease:
    """Return what is known of something that is no file: no reader makes such."""
    return ForeignLease(path, _kind(status.st_mode), status.st_uid, None, False)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "it is a symbolic link",
        stat.S_IFDIR: "it is a directory",
        stat.S_IFIFO: "it is a pipe",
    }
    return kinds.get(stat.S_IFMT(mode), "it is no file")


def holder_of(status: os.stat_result, known: Path) -> tuple[bool | None, int | None]:
    """Return (whether a process holds a file by flock, its pid), without opening the file.

    The kernel lists the locks of the processes that can be seen from here. That a lock is not
    listed tells something only where all processes can be seen, and where the list names files
    of this file system by the numbers that `stat` gives. Another lock there shows that.

    Args:
        status: of the file.
        known: a lock file in the same file system.
    """
    text = _locks()
    if (pid := _flock_holder(status.st_ino, text)) is not None:
        return True, pid if pid > 0 else None
    return (False if _tells_all(text, known) else None), None


def _tells_all(text: str, known: Path) -> bool:
    try:
        sees_all = str(NAMESPACE.readlink()) == INITIAL_NAMESPACE
        return (
            sees_all and is_held(known) and _flock_holder(known.stat().st_ino, text) is not None
        )
    except OSError:
        return False


def _flock_holder(inode: int, text: str) -> int | None:
    """Return the pid that holds a file of that number.

    >>> _flock_holder(42, "1: FLOCK  ADVISORY  WRITE 4711 08:01:42 0 EOF")
    4711
    >>> _flock_holder(42, "1: -> FLOCK  ADVISORY  WRITE 4711 08:01:42 0 EOF")
    """
    found = (int(pid) for pid, number in _FLOCK.findall(text) if int(number) == inode)
    return next(found, None)


def _locks() -> str:
    try:
        return LOCKS.read_text()
    except OSError:
        return ""


def said_of(foreign: Sequence[ForeignLease]) -> str:
    """Return in words which of them hold shards back; empty where none does."""
    holding = [lease for lease in foreign if lease.protects]
    if not holding:
        return ""
    more = f" (and {len(holding) - 1} more like it)" if len(holding) > 1 else ""
    return f"{holding[0]}{more}: {holding[0].advice}"
