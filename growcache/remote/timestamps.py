"""How long a file's time of change stays ambiguous. Pure.

A file that is written twice within one tick of its file system's clock keeps its time. Only a
read that begins after the tick is over, and finds the same time afterwards, is of one version.
"""

from __future__ import annotations

# Kernels stamp files by a clock that ticks every 1 to 10 ms.
TICK_SECONDS = 0.02
# Some file systems and protocols (SFTP, HTTP, FAT) tell whole seconds; the clock is a server's.
WHOLE_TICK_SECONDS = 2.0


def settling_seconds(changed: float | None, now: float) -> float:
    """Return how long to wait until no further change can have the same time.

    Nothing follows from a time in the future, because the clocks differ then.

    Args:
        changed: time of the last change, seconds since the epoch; None where it is unknown.
        now: likewise.

    >>> settling_seconds(100.25, 100.5), settling_seconds(101.0, 102.5)
    (0.0, 0.5)
    >>> settling_seconds(900.0, 100.0)
    0.0
    """
    if changed is None or (age := now - changed) >= WHOLE_TICK_SECONDS:
        return 0.0
    tick = WHOLE_TICK_SECONDS if changed == int(changed) else TICK_SECONDS
    return tick - age if -tick < age < tick else 0.0
