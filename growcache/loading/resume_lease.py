"""Lease the rest of a pass in a state. Missing shards are refetched or substituted."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from growcache.cache.files import CacheLayout, generation_paths
from growcache.cache.index.reader import IndexView, all_digests, max_lease_bytes, read_index
from growcache.cache.index.schema import ShardRow
from growcache.cache.lease_views import LeaseCounters, RankNote, protected_shards, read_leases
from growcache.cache.locks import is_locked
from growcache.cache.reader_lease import Lease
from growcache.cache.shard_refetches import (
    RefetchOutcome,
    is_wished,
    purge_progress,
    refetch_outcomes,
)
from growcache.cache.side_files import read_identity
from growcache.errors import CacheError, ConfigError
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import DIGEST_CHARACTERS, PlannedShard
from growcache.loading.rank_sync import RankGroup, resume_note
from growcache.loading.resume import MissingShards, RemainingPass, with_substitutes
from growcache.loading.saved_pass import rest_digest
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import (
    WaitControl,
    index_views,
    refuse_failed_service,
    wait_for_room,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    options: LoaderOptions
    fingerprint: str | None
    missing: MissingShards
    wake: threading.Event
    stopped: Callable[[], bool]
    ranks: RankGroup | None = None  # ranks that share the cache

    @property
    def watch(self) -> WaitControl:
        return WaitControl(self.wake, self.stopped)


def options_of(options: LoaderOptions, fingerprint: str | None) -> LoaderOptions:
    """Return the options of a pass over the state's generation, if that still exists."""
    paths = generation_paths(options.root)
    if len(paths) > 1:
        for path in reversed(paths):
            identity = read_identity(path)
            if identity is not None and fingerprint in identity.fingerprints:
                return options.at_generation(path)
    return options


def refuse_other_cache(
    view: IndexView, fingerprint: str | None, options: LoaderOptions
) -> None:
    found = view.identity
    if found and fingerprint is not None and fingerprint not in found.fingerprints:
        raise ConfigError(
            f"the state belongs to a cache with the fingerprint {fingerprint}, but "
            f"{options.root} has {found.fingerprint}, because another config filled it; resume "
            "on the cache of the state",
            code="GC604",
        )


def refuse_missing(view: IndexView, rest: RemainingPass, options: LoaderOptions) -> None:
    needed = _needed_digests(rest)
    if gone := needed.keys() - _held_shards(view, needed, options.root).keys():
        raise CacheError(
            f"{len(gone)} of the {len(needed)} shards that the rest of the pass needs are not in "
            f"{options.root} any more; resume with missing='refetch' or missing='substitute'",
            code="GC605",
        )


def resume_pass(
    request: ResumeRequest, rest: RemainingPass
) -> tuple[Snapshot, RemainingPass] | None:
    """Return the snapshot and the rest of the pass, or None if stopped.

    Raises:
        CacheError: Shards are gone, and `missing` forbids that.
    """
    request = replace(request, options=options_of(request.options, request.fingerprint))
    view = _wait_for_schema(request)
    if view is None:
        return None
    refuse_other_cache(view, request.fingerprint, request.options)
    begun_shards, root = rest.started_shards(), request.options.root
    while not request.stopped():
        view = read_index(root, retired=True)
        if request.missing == "error":
            refuse_missing(view, rest, request.options)
        note, chosen = resume_note(request.options, rest.plan.number), rest
        if request.missing == "substitute":
            view, note = _view_of_rank_0(request, rest, view, note)
            chosen = _substitute_shards(view, rest, request.options)
        snapshot = _lease_rest(request, chosen, view, note)
        if snapshot is not None:
            _let_others_follow(request, snapshot)
            snapshot.counted(begun_shards)
            return snapshot, _with_digests(chosen, snapshot.shards)
    return None


def _view_of_rank_0(
    request: ResumeRequest, rest: RemainingPass, view: IndexView, note: RankNote | None
) -> tuple[IndexView, RankNote | None]:
    """Return the view with the shards that rank 0 took.

    From these, other ranks choose the same substitutes as rank 0 chose from all.
    """
    ranks, number = request.ranks, rest.plan.number
    if ranks is None:
        return view, note
    copied = ranks.substituting_lease(number, request.watch)
    if copied is not None:
        kept = set(copied.kept())
        view = read_index(request.options.root, retired=True)
        rows = [row for row in (*view.shards, *view.retired) if row.number in kept]
        view = replace(view, shards=rows, retired=[])
    if copied is None and not request.options.ranks.leads:
        return view, note  # stopped
    return view, ranks.substituting_note(number, copied)


def _wait_for_schema(request: ResumeRequest) -> IndexView | None:
    root, warned = request.options.root, False
    with closing(index_views(root, request.wake, request.stopped)) as views:
        for view in views:
            if view.schema is not None:
                return view
            refuse_failed_service(CacheLayout(root), view)
            if not warned:
                _log.warning(
                    "loader waits for a cache at %s, to resume%s", root, _service_hint(root)
                )
                warned = True
    return None


def _let_others_follow(request: ResumeRequest, snapshot: Snapshot) -> None:
    if request.missing != "substitute" or request.ranks is None:
        return
    try:
        request.ranks.settle(snapshot, request.watch)
    except BaseException:
        snapshot.close()
        raise


def _lease_rest(
    request: ResumeRequest, rest: RemainingPass, view: IndexView, note: RankNote | None
) -> Snapshot | None:
    """Return the snapshot, or None if stopped, or if a shard was retired or evicted before."""
    options, digests = request.options, _needed_digests(rest)
    there = _held_shards(view, digests, options.root)
    # Only missing shards, because a lease with 100,000 digests would have no room.
    wishes = {n: digest for n, digest in digests.items() if n not in there}
    if request.missing == "refetch":
        wishes = _fullest_digests(options.root, wishes)
    else:
        digests, wishes = {number: digests[number] for number in there}, {}
    create = functools.partial(
        Lease.create,
        options.root,
        options.job,
        digests,
        wishes=wishes,
        ranks=note,
        max_bytes=max_lease_bytes(view),
        # A resumed job may have to resume again.
        counters=LeaseCounters(counts=True, gave_state=True),
    )
    lease = wait_for_room(create, request.wake, request.stopped)
    if lease is None:
        return None
    try:
        # A shard that is live from here on cannot be deleted, even if it is retired.
        view = read_index(options.root, retired=True)
        rows = _held_shards(view, digests, options.root)
        if digests.keys() - rows.keys() <= wishes.keys():
            view = _wait_for_refetch(request, rest, digests, wishes, rows) or view
        if len(rows) < len(digests):
            lease.close()
            return None
        _check_rest(request, rest, rows)
        lease.settle()
        found = sorted(rows.values(), key=lambda row: row.seq)
        layout = CacheLayout(options.root)
        return Snapshot(layout, view, found, lease, job=options.job, verify=options.verify)
    except BaseException:
        lease.close()
        raise


def _wait_for_refetch(
    request: ResumeRequest,
    rest: RemainingPass,
    digests: Mapping[int, str],
    wished: Mapping[int, str],
    rows: dict[int, ShardRow],
) -> IndexView | None:
    """Add the live shards to ``rows`` and return the index, or None if stopped."""
    root, warned = request.options.root, False
    with closing(index_views(root, request.wake, request.stopped)) as views:
        for view in views:
            rows |= _held_shards(view, digests, root)
            wishes = {n: wished[n] for n in digests if n not in rows}
            if not wishes:
                return view
            _refuse_refused(root, refetch_outcomes(view, wishes), len(digests))
            refuse_failed_service(CacheLayout(root), view)
            if not warned:
                _log.warning(
                    "loader waits for %d of the %d shards that the rest of pass %d needs; they "
                    "are drawn again into %s%s",
                    *(len(wishes), len(digests), rest.plan.number, root, _service_hint(root)),
                )
                warned = True
    return None


def _refuse_refused(root: Path, found: Mapping[int, RefetchOutcome], needed: int) -> None:
    refused = {n: one.reason for n, one in found.items() if one.state == "refused"}
    if refused:
        number, reason = min(refused.items())
        raise CacheError(
            f"{len(refused)} of the {needed} shards that the rest of the pass needs cannot be "
            f"drawn again into {root} (shard {number}: {reason}); continue with others in "
            "their place: load_state_dict(state, missing='substitute')",
            code="GC605",
        )


def _substitute_shards(
    view: IndexView, rest: RemainingPass, options: LoaderOptions
) -> RemainingPass:
    needed = rest.needed()
    gone = needed - _held_shards(view, _needed_digests(rest), options.root).keys()
    if not gone:
        return rest
    planned = {shard.number for shard in rest.plan.shards}
    live = [PlannedShard(row.number, row.samples, row.digest) for row in view.shards]
    # Another machine's cache has other shards with these numbers. Each replaces a similar one.
    namesakes = {shard.number: shard for shard in live if shard.number in gone}
    others = [shard for shard in live if shard.samples and shard.number not in planned]
    plan = with_substitutes(rest.plan, namesakes, others, gone)
    left = gone - namesakes.keys() & {shard.number for shard in plan.shards}
    _log.warning(
        "loader lacks %d of the %d shards that the rest of pass %d needs, because %s no longer "
        "has them; %d others replace them%s",
        *(len(gone), len(needed), plan.number, options.root, len(gone) - len(left)),
        f", and the pass is shorter by {len(left)} shards" if left else "",
    )
    return replace(rest, plan=plan, windows=plan.windows(options))


def _needed_digests(rest: RemainingPass) -> dict[int, str]:
    needed = rest.needed()
    return {s.number: s.digest for s in rest.plan.shards if s.number in needed}


def _held_shards(
    view: IndexView, digests: Mapping[int, str], root: Path
) -> dict[int, ShardRow]:
    live = {row.number: row for row in view.shards if _is_wanted(digests, row)}
    # Held until their readers end, and only for these.
    purging = purge_progress(view.meta).numbers
    going = {
        row.number: row
        for row in view.retired
        if _is_wanted(digests, row) and row.number not in purging
    }
    if not going:
        return live
    held = _leased_numbers(root)
    return live | {number: row for number, row in going.items() if number in held}


def _is_wanted(digests: Mapping[int, str], row: ShardRow) -> bool:
    wished = digests.get(row.number)
    return wished is not None and is_wished(row.digest, wished)


def _fullest_digests(root: Path, digests: Mapping[int, str]) -> dict[int, str]:
    """Return complete digests, as far as the index still has them, also of evicted shards."""
    if all(len(digest) == DIGEST_CHARACTERS for digest in digests.values()):
        return dict(digests)
    known = all_digests(root)
    return {
        n: known[n] if n in known and is_wished(known[n], digest) else digest
        for n, digest in digests.items()
    }


def _check_rest(
    request: ResumeRequest, rest: RemainingPass, rows: Mapping[int, ShardRow]
) -> None:
    """Raise CacheError if shards without their own digest have other bytes.

    With substitutes this is allowed.
    """
    said = rest.plan.rest
    if said is None or not said.digest:
        return
    later = rest.plan.shards[said.first :]
    if any(shard.number not in rows for shard in later):
        return  # substitutes are allowed
    found = [shard._replace(digest=rows[shard.number].digest) for shard in later]
    if rest_digest(found) == said.digest:
        return
    why = (
        f"some of the last {len(later)} shards of pass {rest.plan.number} have other bytes in "
        f"{request.options.root} than when the state was saved: objects were rewritten or purged "
        "since, or this machine's listing grew in other steps"
    )
    if request.missing != "substitute":
        raise CacheError(
            f"{why}; to use them: load_state_dict(state, missing='substitute')", code="GC605"
        )
    _log.warning("%s; the loader uses them instead", why)


def _with_digests(rest: RemainingPass, rows: Iterable[ShardRow]) -> RemainingPass:
    """Return the rest with the digests of the leased shards, for later states."""
    found = {row.number: row.digest for row in rows}
    shards = tuple(
        shard._replace(digest=found.get(shard.number, shard.digest))
        for shard in rest.plan.shards
    )
    return replace(rest, plan=replace(rest.plan, shards=shards, rest=None))


def _leased_numbers(root: Path) -> set[int]:
    """Return the shards whose files stay while a lease of the caller lists them.

    These are the shards of settled leases. A lease is settled after each of its shards was
    seen, after the lease became visible, either live or in a lease settled earlier. A shard
    that was live then was retired later, and the supervisor reads the leases after it retires.
    So it keeps the shard until that lease ends, and a supervisor that reads afterwards finds
    the caller's lease.

    Other leases prove nothing. They may list shards that were retired before the lease was
    made, and whose files are deleted while the index still lists them.
    """
    leases = [lease for lease in read_leases(root) if lease.open and lease.settled]
    return set().union(*(protected_shards(lease, resumable=False) for lease in leases))


def _service_hint(root: Path) -> str:
    if is_locked(CacheLayout(root).supervisor_lock):
        return ""
    return "; no service runs there, start it with: growcache run CONFIG"
