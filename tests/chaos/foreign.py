"""Entries of the lease directory that no reader of growcache made."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

MARK = "foreign-"


def put_foreign_lease(root: Path, luck: float) -> Path:
    """Put an entry among the leases; return its path. On a full disk the file may be empty."""
    dice = random.Random(luck)
    path = root / "leases" / f"{MARK}{dice.randrange(10**9):09d}.lease"
    try:
        dice.choice(_MAKERS)(path, dice)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EEXIST):
            raise
    return path


def _garbage(path: Path, dice: random.Random) -> None:
    path.write_bytes(dice.randbytes(dice.randrange(1, 2000)))


def _empty(path: Path, dice: random.Random) -> None:
    path.touch()


def _unreadable(path: Path, dice: random.Random) -> None:
    path.write_bytes(b"GCLEASE1" + dice.randbytes(40))
    os.chown(path, 65534, 65534)
    path.chmod(0)


def _pipe(path: Path, dice: random.Random) -> None:
    os.mkfifo(path)


def _link(path: Path, dice: random.Random) -> None:
    path.symlink_to("/etc/hostname")


_MAKERS: tuple[Callable[[Path, random.Random], None], ...] = (
    _garbage,
    _empty,
    _unreadable,
    _pipe,
    _link,
)
