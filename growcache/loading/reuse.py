"""Limits on reuse: what a job has used as often as it may is left out of its snapshots.

The limit is the cache's (`cache.max_reuse`), which its service notes in the index. Uses are
those of finished leases, as the index has them, and of the others, as they say themselves.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from growcache.cache.files import Layout
from growcache.cache.index import IndexView, read_index
from growcache.cache.leases import LeaseView, RankNote, read_leases
from growcache.cache.locks import is_held
from growcache.errors import CacheError
from growcache.loading.options import LoaderOptions
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import looks, refuse_orphaned, when_room

_log = logging.getLogger(__name__)
_warned: set[tuple[Path, str]] = set()


def _nothing() -> None:
    pass


def _nobody() -> Mapping[str, Iterable[int]]:
    return {}


@dataclass(frozen=True, slots=True)
class Watch:
    """What ends a wait early, and what a long one has to let go of.

    Attributes:
        wake: set when ``stopped`` changes.
        stopped: whether to give up.
        hold: called when a wait may take long: from then on no shard may be held for it.
        own: the shards that will be read yet, once, by the leases that hold them.
    """

    wake: threading.Event
    stopped: Callable[[], bool]
    hold: Callable[[], None] = _nothing
    own: Callable[[], Mapping[str, Iterable[int]]] = _nobody


class Choice(NamedTuple):
    """The index when a snapshot was decided on, and the shards that it leaves out.

    Attributes:
        view: the index.
        without: what was used too often.
        counts: whether the use of the others counts towards a limit. There are so many of
            these snapshots as the limit allows, so their leases may stay where no service counts them.
    """

    view: IndexView
    without: frozenset[int] = frozenset()
    counts: bool = False


class Limit(NamedTuple):
    """How often a job may use a shard, and whether it waits when all are used so often."""

    most: int
    waits: bool


def limit_of(view: IndexView) -> Limit | None:
    """Return the cache's limit on reuse; None where there is none."""
    most = view.meta.get("max_reuse")
    return None if most is None else Limit(int(most), view.meta.get("on_max_reuse") == "wait")


def used_up(
    view: IndexView,
    leases: Iterable[LeaseView],
    job: str,
    most: int,
    own: Mapping[str, Iterable[int]],
) -> frozenset[int]:
    """Return the shards that a job has used as often as it may.

    Args:
        view: with the uses of the job by finished leases.
        leases: read before the view, so that none is missed in between.
        job: whose uses count.
        most: uses of a shard.
        own: shards that will be read yet, by the leases that hold them.
    """
    uses = Counter(view.uses)
    for lease in leases:
        if lease.job == job and lease.name not in view.counted:
            uses.update({*lease.used(), *own.get(lease.name, ())})
    return frozenset(number for number, count in uses.items() if count >= most)


def choose(options: LoaderOptions, watch: Watch, view: IndexView) -> Choice:
    """Return what the next snapshot of a job is taken of; it may wait for samples.

    A wait ends when enough samples are cached that were used less; it is logged once.

    Args:
        options: of the loader.
        watch: ends the wait.
        view: the index, as it was read just now: each look beside a busy loop takes a while.

    Raises:
        CacheError: it would wait for ever.
    """
    if options.fixed or limit_of(view) is None:
        return Choice(view)
    told = False
    with closing(looks(options.root, watch.wake, watch.stopped)) as views:
        for seen in views:
            limit = limit_of(seen)
            if limit is None:
                return Choice(seen)
            own = watch.own()  # before the leases, which tell of what was read meanwhile
            leases = read_leases(options.root)
            view = read_index(options.root, job=options.job)
            out = used_up(view, leases, options.job, limit.most, own)
            fresh = sum(row.samples for row in view.shards if row.number not in out)
            if fresh >= options.least_samples:
                return Choice(view, out, counts=True)
            if not limit.waits:
                _warn(options, limit)
                break
            watch.hold()
            if own:  # it may not come to be read: the look without it tells
                continue
            _refuse_endless(options, view, limit)
            if not told:
                _log.warning("%s", _event(options, limit))
                told = True
    return Choice(view)


def take(
    options: LoaderOptions, watch: Watch, choice: Choice, ranks: RankNote | None = None
) -> Snapshot | None:
    """Return the snapshot that was decided on, once there is room for its lease.

    Args:
        options: of the loader.
        watch: ends the wait, and then it is None.
        choice: of `choose`.
        ranks: what the lease says to the other ranks of the job.
    """
    views = iter([choice.view])  # at the second attempt it is old

    def attempt() -> Snapshot:
        snapshot = Snapshot.take(
            options.root,
            job=options.job,
            verify=options.verify,
            ranks=ranks,
            without=choice.without,
            view=next(views, None),
        )
        if choice.counts:
            snapshot.lease.keep_for_service()
        return snapshot

    return when_room(attempt, watch.wake, watch.stopped)


def _warn(options: LoaderOptions, limit: Limit) -> None:
    key = (options.root, options.job)
    if key not in _warned:
        _warned.add(key)
        _log.warning(
            "job %s has used all samples of %s %d times (cache.max_reuse), and goes on with them: "
            "training outruns the remote store",
            *(options.job, options.root, limit.most),
        )


def _refuse_endless(options: LoaderOptions, view: IndexView, limit: Limit) -> None:
    if view.complete:
        raise CacheError(
            f"job {options.job} has used all samples of {options.root} {limit.most} times "
            "(cache.max_reuse), and no more come, for the cache is complete; raise "
            "cache.max_reuse, or set cache.on_max_reuse: warn"
        )
    refuse_orphaned(Layout(options.root), view)


def _event(options: LoaderOptions, limit: Limit) -> str:
    running = is_held(Layout(options.root).supervisor_lock)
    hint = "" if running else "; no service runs there, start it with: growcache run CONFIG"
    return (
        f"waiting for new samples: job {options.job} has used those of {options.root} "
        f"{limit.most} times (cache.max_reuse){hint}"
    )
