"""Whether a service still fills the cache: a trainer is told when it has stopped."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from growcache.cache.files import Layout
from growcache.cache.index import IndexView
from growcache.cache.locks import holder, is_held
from growcache.cache.status import read_status

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_running: dict[Path, dict[str, Any]] = {}  # who filled a cache when somebody looked last


def tell_if_stopped(root: Path, view: IndexView) -> None:
    """Warn, once, where the service that was seen at an earlier look runs no more.

    Args:
        root: of the cache.
        view: the index; of a cache that is complete nobody misses the service.
    """
    layout = Layout(root)
    runs = is_held(layout.supervisor_lock)
    with _lock:
        if runs:
            _running[root] = holder(layout.supervisor_lock)
            return
        stopped = _running.pop(root, None)
    if stopped is None or view.complete:
        return
    at = time.strftime("%H:%M:%S", time.localtime(read_status(root).updated_at))
    _log.warning(
        "the service of the cache %s has stopped (pid %s on %s, at %s): the cache does not grow any "
        "more; start it again with: growcache run CONFIG",
        *(root, stopped.get("pid"), stopped.get("host"), at),
    )
