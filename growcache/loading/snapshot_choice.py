"""Choose the shards of a pass and take its snapshot; a job's limit on reuse may leave shards out or wait for new ones.

A job's uses are those of finished leases, from the index, plus those that open leases report.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.lease_views import LeaseView, RankNote, read_leases
from growcache.cache.status_model import Status
from growcache.errors import CacheError, ConfigError
from growcache.loading.bound_check import BoundCheck, is_stuck
from growcache.loading.options import LoaderOptions
from growcache.loading.snapshot import Snapshot
from growcache.loading.wait_progress import WaitLine
from growcache.loading.waiting import (
    WaitControl,
    WaitNotice,
    chosen_generation,
    index_views,
    refuse_failed_service,
    service_hint,
    status_of,
    wait_for_room,
    wait_for_samples,
)

_log = logging.getLogger(__name__)
warned_of_reuse: set[tuple[Path, str]] = set()


def wait_for_pass(
    options: LoaderOptions, min_samples: int, watch: WaitControl, *, known: bool = False
) -> IndexView:
    running = min_samples < options.min_samples
    view = wait_for_samples(
        chosen_generation(
            options.root, options.min_samples, options.min_pass_samples, running=running
        ),
        max(min_samples, options.min_pass_samples),
        complete=options.fixed,
        wake=watch.wake,
        stopped=watch.stopped,
        known=known,
        on_wait=watch.on_long_wait,
        rank=options.ranks.rank,
    )
    if watch.stopped():
        return view
    if view.totals.samples < options.min_pass_samples:
        raise ConfigError(
            f"all {view.totals.samples} samples of {options.root} are less than one batch "
            f"of {options.min_pass_samples}; use a smaller batch_size or drop_last=False",
            code="GC602",
        )
    return view


class SnapshotChoice(NamedTuple):
    view: IndexView
    without: frozenset[int] = frozenset()
    counts: bool = False


class ReuseLimit(NamedTuple):
    most: int
    waits: bool  # all shards are used up


def reuse_limit(view: IndexView) -> ReuseLimit | None:
    most = view.meta.get("max_reuse")
    return (
        None if most is None else ReuseLimit(int(most), view.meta.get("on_max_reuse") == "wait")
    )


def shards_at_limit(
    view: IndexView,
    leases: Iterable[LeaseView],
    job: str,
    most: int,
    unread_shards: Mapping[str, Iterable[int]],
) -> frozenset[int]:
    uses = Counter(view.uses)
    for lease in leases:
        if lease.job == job and lease.name not in view.counted:
            uses.update({*lease.used(), *unread_shards.get(lease.name, ())})
    return frozenset(number for number, count in uses.items() if count >= most)


def choose_shards(
    options: LoaderOptions, watch: WaitControl, view: IndexView
) -> SnapshotChoice:
    """Choose the shards of a job's next snapshot. It may wait for samples with fewer uses."""
    if options.fixed or reuse_limit(view) is None:
        return SnapshotChoice(view)
    bound, notice = BoundCheck(), WaitNotice(WaitLine(None))
    with closing(index_views(options.root, watch.wake, watch.stopped)) as views:
        for seen in views:
            limit = reuse_limit(seen)
            if limit is None:
                return SnapshotChoice(seen)
            unread_shards = watch.unread_shards()  # before the leases, which report later reads
            leases = read_leases(options.root)
            view = read_index(options.root, job=options.job)
            out = shards_at_limit(view, leases, options.job, limit.most, unread_shards)
            fresh = sum(row.samples for row in view.shards if row.number not in out)
            if fresh >= options.min_pass_samples:
                return SnapshotChoice(view, out, counts=True)
            if not limit.waits:
                _warn_of_reuse(options, limit)
                break
            watch.on_long_wait()
            if unread_shards:  # they may stay unread, so a later look without them decides
                continue
            status = status_of(CacheLayout(options.root))
            _refuse_endless(options, view, limit)
            _refuse_few_unused(options, bound, status, view, limit, fresh)
            notice.say(_describe_reuse_wait(options, status, limit, fresh), status)
    return SnapshotChoice(view)


def take_snapshot(
    options: LoaderOptions,
    watch: WaitControl,
    choice: SnapshotChoice,
    ranks: RankNote | None = None,
) -> Snapshot | None:
    """Wait for room for the lease, and take the snapshot; return None if stopped."""
    views = iter([choice.view])  # outdated at the second attempt

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

    return wait_for_room(attempt, watch.wake, watch.stopped)


def take_new_snapshot(
    options: LoaderOptions, watch: WaitControl, view: IndexView, note: RankNote | None = None
) -> Snapshot | None:
    options = options.at_generation(view.root)
    return take_snapshot(options, watch, choose_shards(options, watch, view), note)


def _warn_of_reuse(options: LoaderOptions, limit: ReuseLimit) -> None:
    key = (options.root, options.job)
    if key not in warned_of_reuse:
        warned_of_reuse.add(key)
        _log.warning(
            "job %s has used all samples of %s %d times (cache.max_reuse), and continues with "
            "them, because training outruns the remote store",
            *(options.job, options.root, limit.most),
        )


def _refuse_endless(options: LoaderOptions, view: IndexView, limit: ReuseLimit) -> None:
    if view.complete:
        raise CacheError(
            f"job {options.job} has used all samples of {options.root} {limit.most} times "
            "(cache.max_reuse), and no more come, because the cache is complete; raise "
            "cache.max_reuse, or set cache.on_max_reuse: warn",
            code="GC611",
        )
    refuse_failed_service(CacheLayout(options.root), view)


def _refuse_few_unused(
    options: LoaderOptions,
    bound: BoundCheck,
    status: Status,
    view: IndexView,
    limit: ReuseLimit,
    fresh: int,
) -> None:
    if bound.is_endless(
        *(time.monotonic(), fresh, view.totals),
        stuck=is_stuck(status),
        ramping=status.ramping,
    ):
        raise ConfigError(
            f"job {options.job} needs {options.min_pass_samples} samples for its next pass, and the cache "
            f"{options.root} has room for {bound.most} that it used less than {limit.most} times "
            "(cache.max_reuse); raise cache.max_bytes, lower batch_size, or set cache.on_max_reuse: warn",
            code="GC611",
        )


def _describe_reuse_wait(
    options: LoaderOptions, status: Status, limit: ReuseLimit, fresh: int
) -> str:
    but = f" all but {fresh}, of {options.min_pass_samples} for a pass," * (fresh > 0)
    return (
        f"waiting for new samples: job {options.job} has used those of {options.root}{but} "
        f"{limit.most} times (cache.max_reuse){service_hint(status)}"
    )
