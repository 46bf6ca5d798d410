"""The caches of a dashboard: their names, and values that were read recently."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from growcache.cache.files import CacheLayout
from growcache.cache.locks import is_locked
from growcache.cache.status import read_status
from growcache.cache.status_model import Status

T = TypeVar("T")

FRESH_SECONDS = 0.9
COST_SHARE = 0.02  # of the time may go into reading one value
STAMPED_COST_SHARE = 0.004  # the same for a value whose stamp shows a change


def named_caches(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the paths by short, distinct names: the last parts that distinguish them.

    >>> list(named_caches([Path("/a/cache"), Path("/b/cache"), Path("/b/eeg")]))
    ['a/cache', 'b/cache', 'eeg']
    """
    whole = list(dict.fromkeys(path.absolute() for path in paths))
    return {_short_name(path, whole): path for path in whole}


def _short_name(path: Path, others: Sequence[Path]) -> str:
    for count in range(1, len(path.parts)):
        ends = Counter(other.parts[-count:] for other in others)
        if ends[path.parts[-count:]] == 1:
            return "/".join(path.parts[-count:])
    return str(path)


@dataclass(slots=True)
class FreshValue(Generic[T]):
    """A value that is read again after some time, so that several viewers cost as much as one.

    A value that takes long to read, as of a stopped cache with many shards, is read less often,
    unless its ``stamp`` changed.
    """

    read: Callable[[], T]
    stamp: Callable[[], object] = lambda: None
    cost_share: float = COST_SHARE
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last: T | None = None
    _stamp: object = None
    _soon: float = 0.0  # time before which it is never read again
    _due: float = 0.0  # time after which it always is

    def get(self) -> T:
        """Return the value. May raise the errors of ``read``."""
        with self._lock:
            began = self.clock()
            if self._last is None or (began >= self._soon and self._is_old(began)):
                self._stamp = self.stamp()
                self._last = self.read()
                cost = self.clock() - began
                self._soon = began + FRESH_SECONDS
                self._due = began + max(FRESH_SECONDS, cost / self.cost_share)
            return self._last

    def _is_old(self, now: float) -> bool:
        return now >= self._due or self.stamp() != self._stamp


def status_readers(caches: Mapping[str, Path]) -> dict[str, Callable[[], Status]]:
    """Return for each cache a function that reads its status, at most about once a second."""
    return {
        name: FreshValue(
            partial(read_status, path), partial(_service_stamp, path), STAMPED_COST_SHARE
        ).get
        for name, path in caches.items()
    }


def _service_stamp(path: Path) -> object:
    """Return a value that changes if a service runs, starts or ends."""
    layout = CacheLayout(path)
    try:
        written = layout.status.stat().st_mtime_ns
    except OSError:
        written = 0
    try:
        runs = is_locked(layout.supervisor_lock)
    except OSError:  # another user's, or below a file, as the reading will report
        runs = False
    return layout.root, written, runs
