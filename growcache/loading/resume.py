"""Lease the rest of a pass that another loader began, and decide what to do about missing shards.

A shard that was evicted since, or was never drawn on this machine, is refetched: the lease names it
with its digest, and the service draws it again before anything new.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import IndexView, lease_bytes, read_index
from growcache.cache.index.schema import ShardRow
from growcache.cache.lease_views import LeaseCounters, protected_shards, read_leases
from growcache.cache.leases import Lease
from growcache.cache.locks import is_locked
from growcache.cache.refetch import RefetchOutcome, refetch_outcomes
from growcache.errors import CacheError, ConfigError
from growcache.loading.options import LoaderOptions
from growcache.loading.position import PlannedShard, RemainingPass, with_substitutes
from growcache.loading.rank_sync import resume_note
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import index_views, refuse_failed_service, wait_for_room

MissingShards: TypeAlias = Literal["refetch", "substitute", "error"]
MISSING_SHARDS: tuple[MissingShards, ...] = ("refetch", "substitute", "error")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """How to take the rest of a pass."""

    options: LoaderOptions
    fingerprint: str | None
    missing: MissingShards
    wake: threading.Event
    stopped: Callable[[], bool]


def refuse_other_cache(
    view: IndexView, fingerprint: str | None, options: LoaderOptions
) -> None:
    found = view.fingerprint
    if None not in (found, fingerprint) and found != fingerprint:
        raise ConfigError(
            f"the state is of a cache with the fingerprint {fingerprint}, but {options.root} has "
            f"{found}: it was filled by a config that yields other samples"
        )


def refuse_missing(view: IndexView, rest: RemainingPass, options: LoaderOptions) -> None:
    needed = _needed_digests(rest)
    if gone := needed.keys() - _held_shards(view, needed, options.root).keys():
        raise CacheError(
            f"{len(gone)} of the {len(needed)} shards that the rest of the pass needs are not in "
            f"{options.root} any more; resume with missing='refetch' or missing='substitute'"
        )


def resume_pass(
    attempt: ResumeRequest, rest: RemainingPass
) -> tuple[Snapshot, RemainingPass] | None:
    """Return a snapshot for the rest of a pass, and the rest; None if stopped.

    It waits while shards are refetched. Raises CacheError if shards are gone and `missing`
    forbids that.
    """
    view = _wait_for_schema(attempt)
    if view is None:
        return None
    refuse_other_cache(view, attempt.fingerprint, attempt.options)
    begun, root = rest.begun(), attempt.options.root
    while not attempt.stopped():
        view = read_index(root, retired=True)
        if attempt.missing == "error":
            refuse_missing(view, rest, attempt.options)
        if attempt.missing == "substitute":
            rest = _substitute_shards(view, rest, attempt.options)
        snapshot = _lease_rest(attempt, rest, view)
        if snapshot is not None:
            snapshot.counted(begun)
            return snapshot, rest
    return None


def _wait_for_schema(attempt: ResumeRequest) -> IndexView | None:
    """Return the index once it has the schema, without which there is no snapshot."""
    root, told = attempt.options.root, False
    with closing(index_views(root, attempt.wake, attempt.stopped)) as views:
        for view in views:
            if view.schema is not None:
                return view
            refuse_failed_service(CacheLayout(root), view)
            if not told:
                _log.warning(
                    "waiting for a cache at %s, to resume%s", root, _service_hint(root)
                )
                told = True
    return None


def _lease_rest(
    attempt: ResumeRequest, rest: RemainingPass, view: IndexView
) -> Snapshot | None:
    """Return the snapshot; None where a shard was evicted before it was leased, or if stopped."""
    options, digests = attempt.options, _needed_digests(rest)
    there = _held_shards(view, digests, options.root)
    # All of them: what is live now may be retired before the lease is there.
    wishes = digests
    if attempt.missing != "refetch":
        digests, wishes = {number: digests[number] for number in there}, {}
    create = functools.partial(
        Lease.create,
        options.root,
        options.job,
        digests,
        wishes=wishes,
        ranks=resume_note(options, rest.plan.number),
        room_bytes=lease_bytes(view),
        # Whoever goes on from a state may have to do so once more.
        counters=LeaseCounters(counts=True, gave_state=True),
    )
    lease = wait_for_room(create, attempt.wake, attempt.stopped)
    if lease is None:
        return None
    try:
        # What is seen live from here on may not be deleted, even if it is retired.
        view = read_index(options.root, retired=True)
        rows = _held_shards(view, digests, options.root)
        if attempt.missing == "refetch":
            view = _wait_for_refetch(attempt, rest, digests, rows) or view
        if len(rows) < len(digests):
            lease.close()
            return None
        lease.settle()
        found = sorted(rows.values(), key=lambda row: row.seq)
        layout = CacheLayout(options.root)
        return Snapshot(layout, view, found, lease, job=options.job, verify=options.verify)
    except BaseException:
        lease.close()
        raise


def _wait_for_refetch(
    attempt: ResumeRequest,
    rest: RemainingPass,
    digests: Mapping[int, str],
    rows: dict[int, ShardRow],
) -> IndexView | None:
    """Wait until all shards are live, and add them to ``rows``; None if stopped."""
    root, told = attempt.options.root, False
    with closing(index_views(root, attempt.wake, attempt.stopped)) as views:
        for view in views:
            rows |= _held_shards(view, digests, root)
            wishes = {n: digest for n, digest in digests.items() if n not in rows}
            if not wishes:
                return view
            _refuse_refused(root, refetch_outcomes(view, wishes), len(digests))
            refuse_failed_service(CacheLayout(root), view)
            if not told:
                _log.warning(
                    "waiting for %d of the %d shards that the rest of pass %d needs, to be drawn "
                    "again into %s%s",
                    *(len(wishes), len(digests), rest.plan.number, root, _service_hint(root)),
                )
                told = True
    return None


def _refuse_refused(root: Path, found: Mapping[int, RefetchOutcome], needed: int) -> None:
    refused = {n: one.reason for n, one in found.items() if one.state == "refused"}
    if refused:
        number, reason = min(refused.items())
        raise CacheError(
            f"{len(refused)} of the {needed} shards that the rest of the pass needs cannot be "
            f"drawn again into {root} (shard {number}: {reason}); go on with others in their "
            "place: load_state_dict(state, missing='substitute')"
        )


def _substitute_shards(
    view: IndexView, rest: RemainingPass, options: LoaderOptions
) -> RemainingPass:
    needed = rest.needed()
    gone = needed - _held_shards(view, _needed_digests(rest), options.root).keys()
    if not gone:
        return rest
    planned = {shard.number for shard in rest.plan.shards}
    others = [
        PlannedShard(row.number, row.samples, row.digest)
        for row in view.shards
        if row.samples and row.number not in planned
    ]
    plan = with_substitutes(rest.plan, others, gone)
    stand_ins = {shard.number for shard in plan.shards} - planned
    left = gone & {shard.number for shard in plan.shards}
    _log.warning(
        "%d of the %d shards that the rest of pass %d needs are gone from %s: %d others stand in "
        "for them%s",
        *(len(gone), len(needed), plan.number, options.root, len(stand_ins)),
        f", and the pass is shorter by {len(left)} shards" if left else "",
    )
    return replace(rest, plan=plan, windows=plan.windows(options))


def _needed_digests(rest: RemainingPass) -> dict[int, str]:
    needed = rest.needed()
    return {s.number: s.digest for s in rest.plan.shards if s.number in needed}


def _held_shards(
    view: IndexView, digests: Mapping[int, str], root: Path
) -> dict[int, ShardRow]:
    """Return the shards of these digests that are live, or retired and held by a lease."""
    live = {row.number: row for row in view.shards if digests.get(row.number) == row.digest}
    going = {r.number: r for r in view.retired if digests.get(r.number) == r.digest}
    if not going:
        return live
    held = _leased_numbers(root)
    return live | {number: row for number, row in going.items() if number in held}


def _leased_numbers(root: Path) -> set[int]:
    """Return the shards whose files stay while a lease of the caller names them.

    They are those of settled leases. A lease is settled once each of its shards was seen, after
    the lease became visible, either live or in a lease settled earlier. A shard that was live
    then was retired later, and an evictor reads the leases after it retires. So no evictor
    deletes the shard before that lease ends, and one that looks afterwards finds the caller's.

    Other leases prove nothing: they may name shards that were retired before they came, whose
    files go while the index still lists them.
    """
    leases = [lease for lease in read_leases(root) if lease.open and lease.settled]
    return set().union(*(protected_shards(lease, resumable=False) for lease in leases))


def _service_hint(root: Path) -> str:
    if is_locked(CacheLayout(root).supervisor_lock):
        return ""
    return "; no service runs there, start it with: growcache run CONFIG"
