"""Wait until the cache holds enough samples, or until the disk has room for a lease.

Changes in the cache's directory wake the wait. A pass reads the newest generation that holds enough.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from growcache.cache.files import (
    FIRST_GENERATION,
    CacheLayout,
    generation_in,
    generation_numbers,
    generation_path,
)
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.locks import is_locked
from growcache.cache.side_files import read_identity
from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.cache.system import service_end_reason, watch_directory
from growcache.errors import (
    CacheError,
    CacheFullError,
    CacheMissingError,
    ConfigError,
    LeasesFullError,
)
from growcache.loading.bound_check import BoundCheck, is_stuck
from growcache.loading.options import LoaderOptions
from growcache.loading.snapshot import mean_sample_bytes
from growcache.loading.wait_progress import WaitLine, WaitProgress, wait_line

POLL_SECONDS = 1.0
FIRST_POLL_SECONDS = 0.05
GENERATION_END_SECONDS = 5.0  # a generation without an index is removed within this time
VANISHING_SECONDS = 2.0  # a cache that is being removed may lose its schema before its samples
REPEAT_SECONDS = 60.0  # between two messages of one wait

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WaitControl:
    wake: threading.Event
    stopped: Callable[[], bool]
    on_long_wait: Callable[[], None] = lambda: None
    unread_shards: Callable[[], Mapping[str, Iterable[int]]] = dict


def samples_wanted(view: IndexView, min_samples: int) -> int:
    """Return the samples to wait for: ``min_samples``, or fewer if the population is smaller."""
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
    on_wait: Callable[[], None] = lambda: None,
    rank: int = 0,
) -> IndexView:
    """Return the index after the cache holds ``min_samples``, however long that takes.

    On a terminal or in a notebook, rank 0 shows the progress. Otherwise the log says what the
    wait is for.

    Args:
        path: Path of the cache directory.
        min_samples: Samples to wait for.
        complete: Wait for the whole population.
        wake: Event that makes the wait call ``stopped`` at once.
        stopped: Tells whether to give up.
        known: The caller has read from the cache, so it must exist already.
        on_wait: Called at each look that does not find enough, because shards that the caller
            holds may take the room of new ones.
        rank: Rank of this process.

    Raises:
        CacheMissingError: A known cache is gone.
        ConfigError: The cache can never hold that many samples.
        CacheError: The cache is complete and has no samples, or the service of this process has
            failed.
    """
    layout, bound = CacheLayout(path), BoundCheck()
    vanished_at = math.inf
    views = index_views(path, wake or threading.Event(), stopped)
    with closing(views), wait_line(rank) as line:
        notice = WaitNotice(line)
        for view in views:
            if _has_enough(view, min_samples, complete):
                if view.schema is not None or time.monotonic() > vanished_at:
                    break
                vanished_at = min(vanished_at, time.monotonic() + VANISHING_SECONDS)
            on_wait()
            if known and not layout.root.is_dir():
                raise CacheMissingError(
                    f"the cache at {layout.directory} was removed while it was read; fill one with: "
                    "growcache run CONFIG"
                )
            refuse_failed_service(layout, view)
            status = status_of(layout)
            _refuse_impossible(status, view, min_samples)
            _refuse_small_bound(bound, status, view, min_samples, complete=complete)
            wanted = 0 if complete else samples_wanted(view, min_samples)
            line.update(WaitProgress.of(status, view.totals.samples, wanted))
            notice.say(_describe_wait(layout, status, view, min_samples, complete), status)
    return view


def cached_classes(path: str | os.PathLike[str]) -> dict[str, list[str]]:
    """Return the names of classes by field, after the schema of the samples is known."""
    identity = read_identity(shown_generation(CacheLayout(path).root))
    identity = identity or wait_for_samples(path, 1).identity
    return {} if identity is None else identity.schema.classes


def index_views(
    path: str | os.PathLike[str], wake: threading.Event, stopped: Callable[[], bool]
) -> Generator[IndexView]:
    """Yield the index now and after each change in the directory.

    Close the iterator after use.
    """
    pause = Backoff(wake)
    yield _read_view(CacheLayout(path))
    with waking_on_change(CacheLayout(path).root, wake):
        while True:
            wake.clear()
            if stopped():
                return
            yield _read_view(CacheLayout(path))  # there may be a new generation
            pause.wait()


def wait_for_room(
    make: Callable[[], T], wake: threading.Event, stopped: Callable[[], bool]
) -> T | None:
    """Return the call's result after the disk has room for it, or None if stopped."""
    warned = False
    while not stopped():
        wake.clear()
        try:
            return make()
        except CacheFullError as error:
            if not warned:
                full = isinstance(error, LeasesFullError)
                what = (
                    "other readers to release their leases"
                    if full
                    else "free space on the disk"
                )
                _log.warning("loader waits for %s: %s", what, error)
                warned = True
        wake.wait(POLL_SECONDS)
    return None


def _read_view(layout: CacheLayout) -> IndexView:
    try:
        return read_index(layout.root)
    except CacheMissingError:
        return IndexView()


def _has_enough(view: IndexView, min_samples: int, complete: bool) -> bool:
    if view.complete and not view.totals.samples:
        raise CacheError(
            "the cache is complete but holds no sample: every draw was skipped or empty; "
            "growcache status and growcache check say why",
            code="GC603",
        )
    if complete and not view.complete:
        return False
    return 0 < samples_wanted(view, min_samples) <= view.totals.samples


def refuse_failed_service(layout: CacheLayout, view: IndexView) -> None:
    reason = service_end_reason(layout.root)
    if reason is not None and not is_locked(layout.supervisor_lock):
        raise CacheError(
            f"{layout.directory} has {view.totals.samples} samples and gets no more, because "
            f"its service failed: {reason}",
            code="GC603",
        )


def status_of(layout: CacheLayout) -> Status:
    try:
        return read_status(layout.root)
    except CacheMissingError:
        return Status()


def _refuse_impossible(status: Status, view: IndexView, min_samples: int) -> None:
    if view.schema is None or view.population_samples is None:
        return  # an unknown population may be all there is to wait for
    nbytes = mean_sample_bytes(view.schema, view.shards)
    wanted = samples_wanted(view, min_samples) * nbytes
    max_bytes = status.max_bytes
    if max_bytes and wanted > max_bytes:
        raise ConfigError(
            f"min_samples {min_samples} of {nbytes:,} bytes need {wanted:,} bytes, "
            f"but cache.max_bytes is {max_bytes:,}; lower one or raise the other",
            code="GC602",
        )


def _refuse_small_bound(
    bound: BoundCheck, status: Status, view: IndexView, min_samples: int, *, complete: bool
) -> None:
    totals = view.totals
    stuck = status.state == "full" if complete else is_stuck(status)
    if not bound.is_endless(
        *(time.monotonic(), totals.samples, totals),
        stuck=stuck and totals.samples > 0,
        ramping=status.ramping,
    ):
        return
    if complete:
        raise ConfigError(
            f"the cache {status.path} is full and evicts, so it is never complete; a fixed "
            "loader needs one with eviction: none, or with a cache.max_bytes for all samples",
            code="GC602",
        )
    raise ConfigError(
        f"the cache {status.path} is full with {bound.most} samples, fewer than the "
        f"{samples_wanted(view, min_samples)} of min_samples or of a batch; lower min_samples or "
        "batch_size, or raise cache.max_bytes",
        code="GC602",
    )


class WaitNotice:
    """Logs what a wait is for: at its start, when its service ends, and from time to time.

    If a line shows the progress, only a missing service is worth a message.
    """

    def __init__(self, line: WaitLine) -> None:
        self._line = line
        self._ended_by: str | None = None
        self._due = -math.inf  # monotonic seconds

    def say(self, text: str, status: Status) -> None:
        now = time.monotonic()
        told = self._line.is_shown and status.state != "stopped"
        due = now >= self._due and not told
        if due or status.ended_by not in (None, self._ended_by):
            self._line.clear()
            _log.warning("loader is %s", text)
            self._ended_by, self._due = status.ended_by, now + REPEAT_SECONDS


def _describe_wait(
    layout: CacheLayout, status: Status, view: IndexView, min_samples: int, complete: bool
) -> str:
    if not layout.index.exists():
        return f"waiting for a cache at {layout.directory}; fill one with: growcache run CONFIG"
    wanted = samples_wanted(view, min_samples)
    event = "all samples" if complete else f"{wanted} sample{'s' * (wanted != 1)}"
    return (
        f"waiting for {event} in {layout.directory}, which has {view.totals.samples} so "
        f"far{service_hint(status)}"
    )


def service_hint(status: Status) -> str:
    """Return what the service waits for, or why it does not run, for the end of a message."""
    if status.state != "stopped":
        return f"; its service waits for {status.waiting_for}" if status.waiting_for else ""
    if status.ended_by:
        return (
            f"; its service ended with an error: {status.ended_by}; once that is corrected, "
            "start it with: growcache run CONFIG"
        )
    return "; the service is stopped, start it with: growcache run CONFIG"


def describe_missing(options: LoaderOptions, min_samples: int) -> str:
    """Return what a pass waits for now."""
    layout, least = CacheLayout(options.root), max(min_samples, options.min_pass_samples)
    view = _read_view(layout)
    if _has_enough_of(view, least):
        return f"it takes its snapshot of {layout.root}"
    return _describe_wait(layout, status_of(layout), view, least, complete=False)


class Backoff:
    """Pauses between looks, because SQLite writes a commit before it syncs it.

    A change is therefore visible before it can be read.
    """

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._seconds = FIRST_POLL_SECONDS

    def wait(self) -> None:
        changed = self._wake.wait(self._seconds)
        self._seconds = FIRST_POLL_SECONDS if changed else min(POLL_SECONDS, 2 * self._seconds)


@contextmanager
def waking_on_change(folder: Path, wake: threading.Event) -> Iterator[None]:
    """Set ``wake`` at every change in the directory. Without notifications, callers poll."""
    # Index and WAL are in the root. Its parent shows when the root appears.
    existing = next(p for p in (folder, *folder.parents) if p.is_dir())
    watch = watch_directory(existing, wake.set)
    try:
        yield
    finally:
        watch.stop()


def chosen_generation(root: Path, min_samples: int, least: int, *, running: bool) -> Path:
    """Return the path of the generation that a pass reads: the newest with enough samples.

    If none has ``min_samples``, a running loader reads the largest, because it does not wait. A
    new loader waits for the newest, because older ones do not grow.
    """
    numbers = generation_numbers(root) if generation_in(root) is None else []
    paths = [generation_path(root, number) for number in numbers]
    if not os.path.lexists(root / FIRST_GENERATION):
        return root
    views = [(path, _read_view(CacheLayout(path))) for path in reversed(paths)]
    enough = [path for path, view in views if _has_enough_of(view, max(min_samples, least))]
    sizes = {path: view.totals.samples for path, view in views}
    some = [path for path in sizes if sizes[path] >= max(1, least)]
    if running:
        some.sort(key=lambda path: -sizes[path])
    return (enough or some or [root])[0]


def shown_generation(root: Path) -> Path:
    """Return the path of the generation that commands show, which any new loader would read."""
    return chosen_generation(root.absolute(), 1, 1, running=False)


def in_a_generation(root: Path, attempt: Callable[[], T]) -> T:
    """Return the attempt's result.

    The attempt is repeated if a generation started or ended meanwhile.
    """
    while True:
        before = generation_numbers(root)
        try:
            return attempt()
        except CacheMissingError:
            if not _generations_change(root, before):
                raise


def _generations_change(root: Path, before: list[int]) -> bool:
    deadline = time.monotonic() + GENERATION_END_SECONDS
    while generation_numbers(root) == before:
        if len(before) == 1 or time.monotonic() > deadline:
            return False
        time.sleep(FIRST_POLL_SECONDS)
    return True


def _has_enough_of(view: IndexView, min_samples: int) -> bool:
    return 0 < samples_wanted(view, min_samples) <= view.totals.samples
