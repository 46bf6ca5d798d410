"""Whether files are still those that were looked at, as far as the file system tells."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

# Of each file what becomes another one where it is written to, or replaced.
Stamp: TypeAlias = tuple[tuple[int, int, int, int], ...]

# What changes twice within a tick of the kernel's clock may have one time for both.
TICK_NS = 20_000_000
SECOND_NS = 1_000_000_000


def stamp_of(paths: Iterable[Path]) -> Stamp | None:
    """Return what files have as long as nobody touches them; None where that is not sure.

    It is not of files that changed a moment ago, nor where times are whole seconds.
    """
    now, found = time.time_ns(), []
    for path in paths:
        try:
            file = path.stat()
        except OSError:
            return None
        changed = file.st_ctime_ns
        if not changed % SECOND_NS or changed > now - TICK_NS:
            return None
        found.append((file.st_dev, file.st_ino, file.st_size, changed))
    return tuple(found) or None
