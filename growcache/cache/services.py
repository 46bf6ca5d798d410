"""Services that this process started and that ended by themselves: nobody need wait for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol
from weakref import WeakSet


class Listener(Protocol):
    """Who passes on to another process what it cannot know."""

    def service_failed(self, root: Path, reason: str) -> None:
        """Hear that the service on a cache, by its resolved path, has ended, and why."""


listeners: WeakSet[Listener] = WeakSet()

_reasons: dict[Path, str] = {}  # by the resolved path of the cache


def begun(root: str | os.PathLike[str]) -> None:
    """Note that a service was started on the cache."""
    _reasons.pop(Path(root).resolve(), None)


def failed(root: str | os.PathLike[str], reason: str) -> None:
    """Note that the service on the cache has ended, and why."""
    resolved = Path(root).resolve()
    _reasons[resolved] = reason
    for listener in list(listeners):
        listener.service_failed(resolved, reason)


def reason_of(root: str | os.PathLike[str]) -> str | None:
    """Return why the service that this process started last on the cache ended, if it did."""
    return _reasons.get(Path(root).resolve())
