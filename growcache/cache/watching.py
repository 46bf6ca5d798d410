"""Being told when something changes in a directory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver

_CHANGES = frozenset({"created", "deleted", "modified", "moved"})

_log = logging.getLogger(__name__)


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out what watchdog says of an event that comes while it is being stopped."""
    return "when the thread is inactive" not in record.msg


class Watch:
    """A watch, which ends with `stop`."""

    def __init__(self, observer: BaseObserver | None) -> None:
        self._observer = observer

    def stop(self) -> None:
        """End it; nothing is told afterwards."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()


def watched(directory: Path, told: Callable[[], None]) -> Watch:
    """Watch a directory, without what lies deeper.

    Where the system's limit on watches is reached, nothing is ever told: whoever watches has
    to look by himself now and then, too.

    Args:
        directory: that exists.
        told: called from another thread at every change.
    """
    from watchdog.events import DirModifiedEvent, FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    class Tell(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            # To look opens and closes files, SQLite's with their attributes set anew; who
            # is told of that looks again, for ever.
            if event.event_type in _CHANGES and type(event) is not DirModifiedEvent:
                told()

    logging.getLogger("watchdog.observers.inotify").addFilter(_is_news)  # once, if repeated
    observer = Observer()
    try:
        observer.schedule(Tell(), str(directory))
        observer.start()
    except OSError as error:
        _log.info("no file events (%s): polling", error)
        return Watch(None)
    return Watch(observer)
