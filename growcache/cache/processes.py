"""What the kernel tells about a process of this machine, for messages."""

from __future__ import annotations

from pathlib import Path

STOPPED_STATES = frozenset("tT")  # by a signal, or by a debugger
ENDED_STATES = frozenset("ZX")  # though its parent was not told yet


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
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in parentheses, may hold any character, also spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return fields[0] if fields else ""
