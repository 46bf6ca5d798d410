"""Waiting until a cache holds enough, woken by changes in its directory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from growcache.cache.files import Layout
from growcache.cache.index import IndexView, read_index
from growcache.cache.locks import is_held
from growcache.cache.services import reason_of
from growcache.cache.status import read_status
from growcache.cache.watching import watched
from growcache.errors import (
    CacheError,
    CacheFullError,
    CacheMissingError,
    ConfigError,
    LeasesFullError,
)
from growcache.loading.snapshot import mean_bytes

POLL_SECONDS = 1.0
SOON_SECONDS = 0.05
FULL_SECONDS = 3.0  # that a cache stays full before it counts as all there will be

T = TypeVar("T")

_log = logging.getLogger(__name__)


def samples_wanted(view: IndexView, min_samples: int) -> int:
    """Return how many samples a reader that asked for ``min_samples`` must wait for.

    Nobody can wait for more than there will be: the population bounds it once it is
    known, and what is there once the cache is complete.
    """
    if view.complete:
        return min(min_samples, view.totals.samples)
    if view.population_samples is not None:
        return min(min_samples, max(1, int(view.population_samples)))
    return min_samples


def wait_for_samples(
    path: str | os.PathLike[str],
    min_samples: int,
    *,
    complete: bool = False,
    wake: threading.Event | None = None,
    stopped: Callable[[], bool] = lambda: False,
    known: bool = False,
) -> IndexView:
    """Return the index once the cache holds ``min_samples``, however long that takes.

    The cache need not exist yet. What is waited for is logged once, as a warning.

    Args:
        path: of the cache directory.
        min_samples: capped by the population, once that is known.
        complete: wait until the whole population is cached.
        wake: set from outside, it makes the wait look at ``stopped`` at once.
        stopped: whether to give up and return what is there.
        known: whether the caller has read from it: then its folder must be there.

    Raises:
        CacheMissingError: the folder of a cache that was read from is gone.
        ConfigError: the cache can never hold so many.
        CacheError: the cache is complete without a sample, or the service that this process
            started has failed.
    """
    layout, told, brim = Layout(path), False, _Brim()
    with closing(looks(path, wake or threading.Event(), stopped)) as views:
        for view in views:
            if _enough(view, min_samples, complete):
                break
            if known and not layout.root.is_dir():
                raise CacheMissingError(
                    f"the cache at {layout.root} was removed while it was read; fill one with: "
                    "growcache run CONFIG"
                )
            refuse_orphaned(layout, view)
            _refuse_impossible(layout, view, min_samples)
            brim.refuse_more(layout, view, min_samples, complete=complete)
            if not told:
                _log.warning("%s", _event(layout, view, min_samples, complete))
                told = True
    return view


def looks(
    path: str | os.PathLike[str], wake: threading.Event, stopped: Callable[[], bool]
) -> Generator[IndexView]:
    """Yield the index now, and again after every change in the directory; close it after use.

    Args:
        path: of the cache directory, which need not exist yet.
        wake: set at every change, and from outside to look at ``stopped`` at once.
        stopped: ends it, after the first look at the earliest.
    """
    layout, pause = Layout(path), Pause(wake)
    yield _look(layout)
    with woken(layout.root, wake):
        while True:
            wake.clear()
            if stopped():
                return
            yield _look(layout)
            pause.wait()


def when_room(
    make: Callable[[], T], wake: threading.Event, stopped: Callable[[], bool]
) -> T | None:
    """Return what the call makes, once the disk has room for it; None where it was stopped."""
    told = False
    while not stopped():
        wake.clear()
        try:
            return make()
        except CacheFullError as error:
            if not told:
                full = isinstance(error, LeasesFullError)
                what = "other readers to let go" if full else "free space on the disk"
                _log.warning("waiting for %s: %s", what, error)
                told = True
        wake.wait(POLL_SECONDS)
    return None


def _look(layout: Layout) -> IndexView:
    try:
        return read_index(layout.root)
    except CacheMissingError:
        return IndexView()


def _enough(view: IndexView, min_samples: int, complete: bool) -> bool:
    if view.complete and not view.totals.samples:
        raise CacheError(
            "the cache is complete but holds no sample: every draw was skipped or empty; "
            "growcache status and growcache check say why"
        )
    if complete and not view.complete:
        return False
    return 0 < samples_wanted(view, min_samples) <= view.totals.samples


def refuse_orphaned(layout: Layout, view: IndexView) -> None:
    """Refuse to wait for a service of this process that has failed.

    Raises:
        CacheError: nothing comes any more.
    """
    reason = reason_of(layout.root)
    if reason is not None and not is_held(layout.supervisor_lock):
        raise CacheError(
            f"{layout.root} has {view.totals.samples} samples and gets no more, for its service "
            f"failed: {reason}"
        )


def _refuse_impossible(layout: Layout, view: IndexView, min_samples: int) -> None:
    if view.schema is None or view.population_samples is None:
        return  # a population that is not known yet may be all there is to wait for
    nbytes = mean_bytes(view.schema, view.shards)
    wanted = samples_wanted(view, min_samples) * nbytes
    max_bytes = read_status(layout.root).max_bytes
    if max_bytes and wanted > max_bytes:
        raise ConfigError(
            f"min_samples {min_samples} of {nbytes:,} bytes need {wanted:,} bytes, "
            f"but cache.max_bytes is {max_bytes:,}; lower one or raise the other"
        )


class _Brim:
    """Notices that a cache stays full with fewer samples than are waited for."""

    def __init__(self) -> None:
        self._samples = -1
        self._since = 0.0

    def refuse_more(
        self, layout: Layout, view: IndexView, min_samples: int, *, complete: bool
    ) -> None:
        """Look once more.

        Raises:
            ConfigError: the cache has been full, with so few samples, for some time.
        """
        now, samples = time.monotonic(), view.totals.samples
        if not samples or read_status(layout.root).state != "full" or samples != self._samples:
            self._samples, self._since = samples, now
        elif now - self._since > FULL_SECONDS and complete:
            raise ConfigError(
                f"the cache {layout.root} is full and evicts, so it is never complete; a fixed "
                "loader needs one with eviction: none, or with a cache.max_bytes for all samples"
            )
        elif now - self._since > FULL_SECONDS:
            raise ConfigError(
                f"the cache {layout.root} is full with {samples} samples, fewer than "
                f"min_samples {min_samples}; lower min_samples or raise cache.max_bytes"
            )


def _event(layout: Layout, view: IndexView, min_samples: int, complete: bool) -> str:
    if not layout.index.exists():
        return f"waiting for a cache at {layout.root}; fill one with: growcache run CONFIG"
    wanted = samples_wanted(view, min_samples)
    event = "all samples" if complete else f"{wanted} sample{'s' * (wanted != 1)}"
    running = read_status(layout.root).state != "stopped"
    hint = "" if running else "; the service is stopped, start it with: growcache run CONFIG"
    return f"waiting for {event} in {layout.root}, {view.totals.samples} are there{hint}"


class Pause:
    """The time to the next look: short after a change, and then longer and longer.

    A change is seen before it is there: SQLite writes a commit, and shows it once it is synced.

    Args:
        wake: set at every change; the caller clears it before each look.
    """

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._seconds = SOON_SECONDS

    def wait(self) -> None:
        """Return when it is time for the next look."""
        changed = self._wake.wait(self._seconds)
        self._seconds = SOON_SECONDS if changed else min(POLL_SECONDS, 2 * self._seconds)


@contextmanager
def woken(folder: Path, wake: threading.Event) -> Iterator[None]:
    """Set ``wake`` at every change in the directory; polling is what is left without."""
    # The index and its WAL lie in the root itself; before it exists, its parent says so.
    existing = next(p for p in (folder, *folder.parents) if p.is_dir())
    watch = watched(existing, wake.set)
    try:
        yield
    finally:
        watch.stop()
