"""Functions of C libraries that torch loaded, which it does not offer in Python."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


def call_loaded(names: str, function: str, *arguments: int) -> None:
    """Call a function of each library of that name in this process which has it.

    By the files that are mapped: another copy of a library, loaded by its name, would have
    a state of its own.

    Args:
        names: what follows ``lib`` in the libraries' names; a regular expression.
        function: of C.
        arguments: for it.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for path in sorted(set(re.findall(rf"(/.*/lib(?:{names})\b[^/\n]*)$", maps, re.MULTILINE))):
        try:
            found = getattr(ctypes.CDLL(path), function)
        except (OSError, AttributeError):
            continue
        found(*arguments)
