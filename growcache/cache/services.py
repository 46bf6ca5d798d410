"""Services that this process started and that ended by themselves: nobody need wait for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol
from weakref import WeakSet


class Listener(Protocol):
    """Who passes on to another process what it cannot know."""

    def service_changed(self, root: Path, reason: str | None) -> None:
        """Hear why the service on a cache, by its resolved path, has ended; None: it began."""


listeners: WeakSet[Listener] = WeakSet()

_reasons: dict[Path, str] = {}  # by the resolved path of the cache


def begun(root: str | os.PathLike[str]) -> None:
    """Note that a service was started on the cache."""
    note(root, None)


def failed(root: str | os.PathLike[str], reason: str) -> None:
    """Note that the service on the cache has ended, and why."""
    note(root, reason)


def note(root: str | os.PathLike[str], reason: str | None) -> None:
    """Note why the service on the cache has ended; None: one was started anew."""
    resolved = Path(root).resolve()
    if reason is None:
        _reasons.pop(resolved, None)
    else:
        _reasons[resolved] = reason
    for listener in list(listeners):
        listener.service_changed(resolved, reason)


def reason_of(root: str | os.PathLike[str]) -> str | None:
    """Return why the service that this process started last on the cache ended, if it did."""
    return _reasons.get(Path(root).resolve())
