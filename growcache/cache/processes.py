"""What the kernel tells about a process of this machine, for messages."""

from __future__ import annotations

from pathlib import Path

STOPPED_STATES = frozenset("tT")  # by a signal, or by a debugger


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; False where that cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The name, in parentheses, may hold any character, also spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return bool(fields) and fields[0] in STOPPED_STATES
