"""The position of a loader as a value, and how another loader continues from it.

A position counts the delivered rows of the pass's plan, whatever was made ahead since. It names the
plan's shards with their digests, so it decides the order of everything that follows. A shard that is
not cached here is refetched: the lease names it with its digest, and the service draws it before
anything new.
"""

from __future__ import annotations

import functools
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from growcache.cache.files import CacheLayout, generation_paths
from growcache.cache.index.reader import IndexView, max_lease_bytes, read_index
from growcache.cache.index.schema import ShardRow
from growcache.cache.lease_views import LeaseCounters, protected_shards, read_leases
from growcache.cache.locks import is_locked
from growcache.cache.reader_lease import Lease
from growcache.cache.shard_refetches import RefetchOutcome, purge_progress, refetch_outcomes
from growcache.cache.side_files import read_identity
from growcache.errors import CacheError, ConfigError
from growcache.loading.options import ORDER_OPTIONS, LoaderOptions
from growcache.loading.plan import (
    PassPlan,
    PassPosition,
    PlannedShard,
    SampleOrder,
    Window,
    locate_samples,
)
from growcache.loading.rank_sync import resume_note
from growcache.loading.snapshot import Snapshot
from growcache.loading.transform import TransformSchema
from growcache.loading.waiting import index_views, refuse_failed_service, wait_for_room

VERSION = 2
DIGEST_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class Position:
    epoch: int = 0  # of the mark; without one the epoch that comes next
    step: int = 0  # batches delivered of it
    next_epoch: int = 0  # of the next iteration; later where the epoch was broken off
    next_pass: int = 0  # the first with a new snapshot
    global_step: int = 0  # batches delivered of all epochs
    fingerprint: str | None = None  # of the cache; None before a sample was seen
    transform_schema: TransformSchema | None = None
    mark: PassPosition | None = None  # None: the next epoch begins with a new snapshot
    plan: PassPlan | None = None

    def to_dict(self, options: LoaderOptions) -> dict[str, Any]:
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "options": {name: getattr(options, name) for name in ORDER_OPTIONS},
            "epoch": self.epoch,
            "step": self.step,
            "next_epoch": self.next_epoch,
            "next_pass": self.next_pass,
            "global_step": self.global_step,
            "form": None if self.transform_schema is None else self.transform_schema._asdict(),
            "pass": _pass_to_dict(self.plan, self.mark),
        }

    @classmethod
    def from_dict(cls, values: object, options: LoaderOptions) -> Self:
        """Raises ConfigError for any other values, and for a loader with other arguments."""
        if not isinstance(values, Mapping) or values.get("version") != VERSION:
            raise ConfigError(
                f"expected what state_dict() of a loader returned, of version {VERSION}, "
                f"found {_describe_state(values)}"
            )
        try:
            _refuse_other_options(values["options"], options)
            decided, mark, plan = values["form"], None, None
            if values["pass"] is not None:
                plan, mark = _pass_from_dict(values["pass"])
            return cls(
                fingerprint=values["fingerprint"],
                transform_schema=None if decided is None else TransformSchema(**decided),
                mark=mark,
                plan=plan,
                # States of earlier versions do not count all epochs.
                **{name: int({"global_step": 0, **values}[name]) for name in _COUNTS},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"this state of a loader is damaged: {type(error).__name__}: {error}"
            ) from None


_COUNTS = [field.name for field in fields(Position) if field.type == "int"]


def _describe_state(values: object) -> str:
    if isinstance(values, Mapping) and "version" in values:
        return f"version {values['version']!r}"
    return f"{values!r:.60}"


def _refuse_other_options(saved: Mapping[str, Any], options: LoaderOptions) -> None:
    differing = [
        f"{name} (saved {saved.get(name)!r}, here {getattr(options, name)!r})"
        for name in ORDER_OPTIONS
        if saved.get(name) != getattr(options, name)
    ]
    if differing:
        raise ConfigError(
            f"the state is of a loader with other arguments: {', '.join(differing)}; "
            "make this one with those of the state"
        )


def _pass_to_dict(plan: PassPlan | None, mark: PassPosition | None) -> dict[str, Any] | None:
    if plan is None or mark is None:
        return None
    return {
        "number": plan.number,
        "position": mark.position,
        "corrupt": list(mark.corrupt),
        "window_samples": plan.window_samples,
        # By column: a cache may have ten thousand shards.
        "numbers": [shard.number for shard in plan.shards],
        "samples": [shard.samples for shard in plan.shards],
        "digests": "".join(shard.digest for shard in plan.shards),
    }


def _pass_from_dict(values: Mapping[str, Any]) -> tuple[PassPlan, PassPosition]:
    numbers, samples, joined = values["numbers"], values["samples"], values["digests"]
    if len(joined) != DIGEST_CHARACTERS * len(numbers):
        raise ValueError(f"{len(numbers)} shards, but digests of {len(joined)} characters")
    starts = range(0, len(joined), DIGEST_CHARACTERS)
    digests = [joined[i : i + DIGEST_CHARACTERS] for i in starts]
    shards = tuple(map(PlannedShard, map(int, numbers), map(int, samples), digests))
    if len(shards) != len(samples):
        raise ValueError(f"{len(numbers)} shards, but {len(samples)} numbers of samples")
    plan = PassPlan(int(values["number"]), shards, int(values["window_samples"]))
    corrupt = tuple(map(int, values["corrupt"]))
    mark = PassPosition(plan.number, int(values["position"]), corrupt)
    if not 0 <= mark.position <= len(plan):
        raise ValueError(f"position {mark.position} of {len(plan)} samples")
    return plan, mark


@dataclass(frozen=True, slots=True)
class RemainingPass:
    plan: PassPlan
    windows: tuple[Window, ...]
    mark: PassPosition
    whole_window: bool = False  # delivered rows may stand in for unreadable ones

    @property
    def first(self) -> int | None:
        """Index of the window in which it continues; None where nothing is left."""
        for window in self.windows:
            if self.mark.position < window.first + len(window):
                return window.index
        return None

    def started_shards(self) -> set[int]:
        before, _ = self._split()
        return before & self.needed()

    def needed(self) -> set[int]:
        if self.first is None:
            return set()
        before, after = self._split()
        rest = self.windows[self.first + 1 :]
        later = {number for window in rest for number in window.numbers}
        now = before | after if self.whole_window else after
        return (now | later) - set(self.mark.corrupt)

    def _split(self) -> tuple[set[int], set[int]]:
        if self.first is None:
            return set(), set()
        window = self.windows[self.first]
        order, cursor = window.order(), self.mark.position - window.first
        return _shards_of(window, order[:cursor]), _shards_of(window, order[cursor:])


def _shards_of(window: Window, order: SampleOrder) -> set[int]:
    places, _ = locate_samples(order, window.starts())
    return {window.numbers[place] for place in np.unique(places).tolist()}


def remaining_pass(state: Position, options: LoaderOptions) -> RemainingPass | None:
    if state.plan is None or state.mark is None:
        return None
    left = len(state.plan) - state.mark.position
    step = options.batch_size * options.ranks.local_world_size
    if options.samples_per_epoch is None and not options.keep_last and left < step:
        return None  # drop_last leaves it out
    filled = options.ranks.share and bool(state.mark.corrupt)
    rest = RemainingPass(state.plan, state.plan.windows(options), state.mark, filled)
    return None if rest.first is None else rest


def rows_left_of_length(samples: int, steps: int, options: LoaderOptions) -> int:
    """Return the rows, of all ranks, that an epoch of a length still has after some steps.

    An epoch keeps its number of steps: those of other ranks count as if these had made them.
    """
    return max(0, samples - steps * options.step_samples)


def epoch_rows_left(state: Position, options: LoaderOptions) -> int | None:
    """Return the rows that the state's epoch still has; None where it begins a pass."""
    if options.samples_per_epoch is not None:
        return rows_left_of_length(options.samples_per_epoch, state.step, options)
    if state.plan is None or state.mark is None:
        return None
    return len(state.plan) - state.mark.position


def with_substitutes(
    plan: PassPlan, others: Iterable[PlannedShard], gone: set[int]
) -> PassPlan:
    """A place goes to the shard with the nearest sufficient number of samples, or to the largest left.

    The plan keeps its counts. Without enough others the places keep their shards.
    """
    left = sorted(others, key=_by_samples)
    chosen: dict[int, PlannedShard] = {}
    for shard in sorted(plan.shards, key=lambda shard: -shard.samples):
        if shard.number in gone and left:
            place = bisect_left(left, shard.samples, key=lambda other: other.samples)
            other = left.pop(min(place, len(left) - 1))
            chosen[shard.number] = PlannedShard(other.number, shard.samples, other.digest)
    shards = tuple(chosen.get(shard.number, shard) for shard in plan.shards)
    return PassPlan(plan.number, shards, plan.window_samples)


def _by_samples(shard: PlannedShard) -> tuple[int, int]:
    return shard.samples, shard.number


MissingShards: TypeAlias = Literal["refetch", "substitute", "error"]
MISSING_SHARDS: tuple[MissingShards, ...] = ("refetch", "substitute", "error")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    options: LoaderOptions
    fingerprint: str | None
    missing: MissingShards
    wake: threading.Event
    stopped: Callable[[], bool]


def options_of(options: LoaderOptions, fingerprint: str | None) -> LoaderOptions:
    """Return the options of a pass over the generation that a state is of, where that is still there."""
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
            f"the state is of a cache with the fingerprint {fingerprint}, but {options.root} has "
            f"{found.fingerprint}: it was filled by a config that yields other samples"
        )


def refuse_missing(view: IndexView, rest: RemainingPass, options: LoaderOptions) -> None:
    needed = _needed_digests(rest)
    if gone := needed.keys() - _held_shards(view, needed, options.root).keys():
        raise CacheError(
            f"{len(gone)} of the {len(needed)} shards that the rest of the pass needs are not in "
            f"{options.root} any more; resume with missing='refetch' or missing='substitute'"
        )


def resume_pass(
    request: ResumeRequest, rest: RemainingPass
) -> tuple[Snapshot, RemainingPass] | None:
    """Return None if stopped; raises CacheError if `missing` forbids that shards are gone."""
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
        if request.missing == "substitute":
            rest = _substitute_shards(view, rest, request.options)
        snapshot = _lease_rest(request, rest, view)
        if snapshot is not None:
            snapshot.counted(begun_shards)
            return snapshot, rest
    return None


def _wait_for_schema(request: ResumeRequest) -> IndexView | None:
    root, warned = request.options.root, False
    with closing(index_views(root, request.wake, request.stopped)) as views:
        for view in views:
            if view.schema is not None:
                return view
            refuse_failed_service(CacheLayout(root), view)
            if not warned:
                _log.warning(
                    "waiting for a cache at %s, to resume%s", root, _service_hint(root)
                )
                warned = True
    return None


def _lease_rest(
    request: ResumeRequest, rest: RemainingPass, view: IndexView
) -> Snapshot | None:
    """Return None where a shard was evicted before it was leased, or if stopped."""
    options, digests = request.options, _needed_digests(rest)
    there = _held_shards(view, digests, options.root)
    # All of them, because a live shard may be retired before the lease is visible.
    wishes = digests
    if request.missing != "refetch":
        digests, wishes = {number: digests[number] for number in there}, {}
    create = functools.partial(
        Lease.create,
        options.root,
        options.job,
        digests,
        wishes=wishes,
        ranks=resume_note(options, rest.plan.number),
        max_bytes=max_lease_bytes(view),
        # A resumed job may have to resume again.
        counters=LeaseCounters(counts=True, gave_state=True),
    )
    lease = wait_for_room(create, request.wake, request.stopped)
    if lease is None:
        return None
    try:
        # A shard that is live from here on may not be deleted, even if it is retired.
        view = read_index(options.root, retired=True)
        rows = _held_shards(view, digests, options.root)
        if request.missing == "refetch":
            view = _wait_for_refetch(request, rest, digests, rows) or view
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
    request: ResumeRequest,
    rest: RemainingPass,
    digests: Mapping[int, str],
    rows: dict[int, ShardRow],
) -> IndexView | None:
    """Add the live shards to ``rows``; None if stopped."""
    root, warned = request.options.root, False
    with closing(index_views(root, request.wake, request.stopped)) as views:
        for view in views:
            rows |= _held_shards(view, digests, root)
            wishes = {n: digest for n, digest in digests.items() if n not in rows}
            if not wishes:
                return view
            _refuse_refused(root, refetch_outcomes(view, wishes), len(digests))
            refuse_failed_service(CacheLayout(root), view)
            if not warned:
                _log.warning(
                    "waiting for %d of the %d shards that the rest of pass %d needs, to be drawn "
                    "again into %s%s",
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
    live = {row.number: row for row in view.shards if digests.get(row.number) == row.digest}
    purging = purge_progress(view.meta).numbers  # held until their readers end, for these alone
    going = {
        row.number: row
        for row in view.retired
        if digests.get(row.number) == row.digest and row.number not in purging
    }
    if not going:
        return live
    held = _leased_numbers(root)
    return live | {number: row for number, row in going.items() if number in held}


def _leased_numbers(root: Path) -> set[int]:
    """Return the shards whose files stay while a lease of the caller names them.

    They are those of settled leases. A lease is settled once each of its shards was seen, after
    the lease became visible, either live or in a lease settled earlier. A shard that was live
    then was retired later, and the supervisor reads the leases after it retires. So it keeps the
    shard until that lease ends, and a supervisor that looks afterwards finds the caller's lease.

    Other leases prove nothing: they may name shards that were retired before they came, whose
    files go while the index still lists them.
    """
    leases = [lease for lease in read_leases(root) if lease.open and lease.settled]
    return set().union(*(protected_shards(lease, resumable=False) for lease in leases))


def _service_hint(root: Path) -> str:
    if is_locked(CacheLayout(root).supervisor_lock):
        return ""
    return "; no service runs there, start it with: growcache run CONFIG"
