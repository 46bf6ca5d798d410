"""Open a pass and its windows: take and plan a snapshot, and map and verify shards.

Rows that cannot be read are skipped. They count when the consumer passes their place, so each
counts once even if another process continues the pass.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from growcache.cache.files import generation_in
from growcache.cache.formats.mapped import MappedShard
from growcache.errors import CacheError, CorruptShardError
from growcache.loading.agreement import Agreement, Offer
from growcache.loading.framework import Booleans, Integers
from growcache.loading.gather import MappedRows, MappedShards
from growcache.loading.options import LoaderOptions, Ranks
from growcache.loading.plan import (
    PassPlan,
    PassPosition,
    PlannedShard,
    SampleOrder,
    Window,
    locate_samples,
    shard_order,
    substitute_rows,
    window_samples,
)
from growcache.loading.rank_sync import RankGroup
from growcache.loading.resume import RemainingPass
from growcache.loading.snapshot import Snapshot
from growcache.loading.snapshot_choice import take_new_snapshot, wait_for_pass
from growcache.loading.waiting import WaitControl, describe_missing, in_a_generation
from growcache.threads import StoppedError

AGREEMENT_SECONDS = 1.0  # longer times are waits for other machines


@dataclass(slots=True)
class OpenWindow:
    snapshot: Snapshot
    plan: Window
    numbers: tuple[int, ...]  # shards of the window, substitutes last
    shards: MappedShards  # no row refers to a corrupt one
    starts: SampleOrder  # [shards + 1], see `Window.order`
    order: SampleOrder  # [n], sample of each row, numbered shard after shard
    offsets: SampleOrder | None = None  # [n], place in the planned window; None: consecutive
    lost: int = 0  # planned rows that cannot be read
    lost_before: int = 0  # the same, in earlier windows
    corrupt: tuple[int, ...] = ()  # shards
    valid: Booleans | None = None  # bool [n], False for substitutes; None: no substitutes
    padding: bool = False  # its rows only fill up a batch
    counted: set[int] = field(default_factory=set)  # shards whose use was counted
    rows: MappedRows | None = None

    def __len__(self) -> int:
        return len(self.order)

    def located(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Return the shard's place and the row in it for each of these rows: int64 [k] each."""
        return locate_samples(self.order[start:stop], self.starts)

    def part(self, start: int, stop: int) -> MappedRows:
        assert self.rows is not None
        return self.rows.chosen(slice(start, stop))

    def positions(self, start: int, stop: int) -> Integers:
        """Return the positions of these rows in the pass: int64 [k]."""
        if self.offsets is not None:
            return self.offsets[start:stop] + np.int64(self.plan.first)
        first = self.plan.first + len(self.plan) - len(self)
        return np.arange(first + start, first + stop, dtype=np.int64)

    def position(self, row: int) -> int:
        """Return one row's position in the pass, without an array, because each batch needs it."""
        if self.offsets is not None:
            return self.plan.first + int(self.offsets[row])
        return self.plan.first + len(self.plan) - len(self) + row

    def lost_until(self, row: int) -> int:
        if self.offsets is None or not self.lost:
            return self.lost_before
        first = len(self.plan) - len(self) - self.lost
        return self.lost_before + int(self.offsets[row]) - first - row

    def close(self) -> None:
        self.shards.close()
        self.snapshot.leave(self.plan.numbers)

    def chosen(self, chosen: Integers, *, padding: bool = False) -> OpenWindow:
        valid = None if self.valid is None else self.valid[chosen]
        if self.offsets is not None:
            offsets = self.offsets[chosen]
        else:
            offsets = chosen + (len(self.plan) - len(self))
        return replace(
            self,
            order=self.order[chosen],
            offsets=offsets,
            valid=np.zeros(len(chosen), np.bool_) if padding else valid,
            padding=padding,
            rows=None if self.rows is None else self.rows.chosen(chosen),
        )


class Piece(NamedTuple):
    window: OpenWindow
    start: int
    stop: int


def count_rows(pieces: Sequence[Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


# A row of a window.
WindowRow: TypeAlias = tuple[OpenWindow, int]


def rows_after(pieces: Sequence[Piece], rows: Sequence[int]) -> list[WindowRow]:
    """Return the last row before each of these counts of rows, over all pieces."""
    places: list[WindowRow] = []
    ends = list(accumulate(stop - start for _, start, stop in pieces))
    for n in rows:
        piece = bisect_left(ends, n)
        window, _, stop = pieces[piece]
        places.append((window, stop - 1 - (ends[piece] - n)))
    return places


def position_after(place: WindowRow) -> PassPosition:
    window, row = place
    return PassPosition(window.plan.pass_number, window.position(row) + 1, window.corrupt)


def open_window(
    options: LoaderOptions,
    snapshot: Snapshot,
    plan: Window,
    *,
    start: int,
    unreadable: Container[int],
    stopped: Callable[[], bool],
) -> OpenWindow:
    """Open a window without unreadable rows.

    Ranks that share the cache get substitutes, so that they make equal numbers of steps.
    """
    snapshot.enter(plan.numbers)
    try:
        window = _map_window(options, snapshot, plan, start, unreadable, stopped)
        names = options.chosen(snapshot.schema).names
        located = window.located(0, len(window))
        return replace(window, rows=window.shards.rows(names, *located))
    except BaseException:
        snapshot.leave(plan.numbers)
        raise


def _map_window(
    options: LoaderOptions,
    snapshot: Snapshot,
    plan: Window,
    start: int,
    unreadable: Container[int],
    stopped: Callable[[], bool],
) -> OpenWindow:
    shards = [_map_shard(snapshot, n, unreadable, stopped) for n in plan.numbers]
    maps, skip = MappedShards(shards), max(0, start - plan.first)
    window = OpenWindow(snapshot, plan, plan.numbers, maps, plan.starts(), plan.order())
    # Fewer than planned if a shard substitutes another one.
    sizes = np.array([0 if shard is None else len(shard) for shard in shards])
    if (sizes >= plan.counts).all():
        return replace(window, order=window.order[skip:])
    unread = [n for n, shard in zip(plan.numbers, shards, strict=True) if shard is None]
    return _without_missing(options, window, skip, sizes, unread)


def _without_missing(
    options: LoaderOptions,
    window: OpenWindow,
    skip: int,
    sizes: Integers,
    unread: Sequence[int],
) -> OpenWindow:
    plan = window.plan
    places, rows = window.located(0, len(window))
    wanted, there = np.arange(len(window)) >= skip, rows < sizes[places]
    lost = wanted & ~there
    left = {plan.numbers[place] for place in np.unique(places[lost]).tolist()}
    corrupt = tuple(number for number in unread if number in left)
    if options.keeps_count:
        filled = window if there.all() else _substitute_missing(options, window, there)
        window = filled if wanted.all() else filled.chosen(np.flatnonzero(wanted))
    else:
        kept = window.chosen(np.flatnonzero(wanted & there))
        window = replace(kept, lost=int(lost.sum()))
    return replace(window, corrupt=corrupt)


def without_damaged(options: LoaderOptions, window: OpenWindow, first: int) -> OpenWindow:
    """Drop the rows of shards that were damaged since the opening.

    Ranks that share the cache get substitutes.
    """
    places = window.shards.damaged()
    if not places:
        return window
    numbers = [window.numbers[place] for place in places]
    for number in numbers:
        window.snapshot.mark_corrupt(number)
    good = ~np.isin(window.located(0, len(window))[0], places)
    corrupt = tuple(dict.fromkeys((*window.corrupt, *numbers)))
    if options.keeps_count:
        return replace(_substitute_damaged(options, window, good, first), corrupt=corrupt)
    kept = good | (np.arange(len(window)) < first)
    lost = window.lost + int((~kept).sum())
    return replace(window.chosen(np.flatnonzero(kept)), lost=lost, corrupt=corrupt)


def _substitute_damaged(
    options: LoaderOptions, window: OpenWindow, good: Booleans, first: int
) -> OpenWindow:
    before = np.arange(len(window)) < first
    valid = good | before if window.valid is None else window.valid & (good | before)
    if not good.any():
        window, good = _add_substitute_shard(options, window)
    chosen = np.where(before, np.arange(len(window)), substitute_rows(good))
    window = replace(window, order=window.order[chosen], valid=valid)
    names = options.chosen(window.snapshot.schema).names
    located = window.located(0, len(window))
    return replace(window, rows=window.shards.rows(names, *located))


def _map_shard(
    snapshot: Snapshot, number: int, unreadable: Container[int], stopped: Callable[[], bool]
) -> MappedShard | None:
    if stopped():
        raise StoppedError
    if not snapshot.has(number) or number in unreadable:
        return None
    try:
        return snapshot.mapped(number)
    except CorruptShardError:
        return None


def _substitute_missing(
    options: LoaderOptions, window: OpenWindow, there: Booleans
) -> OpenWindow:
    good = there
    if not good.any():
        window, good = _add_substitute_shard(options, window)
    return replace(window, order=window.order[substitute_rows(good)], valid=there)


def _add_substitute_shard(
    options: LoaderOptions, window: OpenWindow
) -> tuple[OpenWindow, Booleans]:
    """Add a whole shard of another window to one that has none."""
    snapshot = window.snapshot
    for row in snapshot.shards:
        try:
            shard = snapshot.mapped(row.number)
        except CorruptShardError:
            continue
        first, n = int(window.starts[-1]), min(len(window), row.samples)
        order = window.order.astype(np.int64)
        order[:n] = first + np.arange(n)
        borrowed = replace(
            window,
            numbers=(*window.numbers, row.number),
            shards=window.shards.with_shard(shard),
            starts=np.append(window.starts, first + n).astype(np.int64),
            order=order,
        )
        return borrowed, order >= first
    raise CorruptShardError(f"every shard of {options.root} is damaged; run growcache check")


class SkippedRows:
    def __init__(self) -> None:
        self._reported = 0  # of those that the iteration counts
        self._stand_ins: list[Integers] = []  # places of substitutes in the current block

    def note(self, piece: Piece, first: int) -> None:
        window, start, stop = piece
        if window.valid is not None and not window.padding:
            self._stand_ins.append(first + np.flatnonzero(~window.valid[start:stop]))

    def before(self, ends: Iterable[WindowRow], size: int) -> list[int]:
        """Return for each batch of the block the number of rows lost since the previous one."""
        lost = [self.until(window.lost_until(row)) for window, row in ends]
        for places in self._stand_ins:
            for batch in (places // size).tolist():
                lost[batch] += 1
        self._stand_ins = []
        return lost

    def until(self, lost: int) -> int:
        new, self._reported = lost - self._reported, lost
        return new

    def discard(self) -> None:
        self._stand_ins = []


@dataclass(slots=True)
class OpenPass:
    snapshot: Snapshot
    plan: PassPlan
    windows: tuple[Window, ...]
    start: int  # position; not 0 if the pass was resumed
    unreadable: frozenset[int]  # shards found corrupt before that
    waited_seconds: float
    stop: int = field(init=False)  # position at which the ranks of this machine leave the pass
    samples: int = field(init=False)  # that all ranks deliver
    first: OpenWindow = field(init=False)

    def __post_init__(self) -> None:
        self.stop = len(self.plan)
        self.samples = self.stop - self.start

    def cut(self, each: int, ranks: Ranks) -> None:
        """Leave out the samples beyond the number that each rank agreed to."""
        self.samples = each * ranks.world_size
        self.stop = self.start + each * ranks.local_world_size
        end = max(self.stop, self.start + 1)  # the window of the start is included in any case
        self.windows = tuple(window for window in self.windows if window.first < end)

    @property
    def number(self) -> int:
        return self.plan.number


class PassOpener:
    """Opens passes, in one thread at a time except for `window`."""

    def __init__(
        self,
        options: LoaderOptions,
        ranks: RankGroup | None,
        watch: WaitControl,
        agreement: Agreement | None = None,
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._watch = watch
        self._agreement = agreement
        self._fixed_shards: tuple[int, list[int]] | None = None
        self._known = False  # whether a snapshot was taken
        self.waited = 0.0

    def open(self, number: int, min_samples: int) -> OpenPass:
        began = time.monotonic()
        self._prepare(functools.partial(describe_missing, self._options, min_samples))
        while True:
            snapshot = self._take(number, min_samples)
            waited = time.monotonic() - began
            plan = plan_snapshot(self._options, snapshot, number)
            if len(plan) >= self._options.min_pass_samples:
                self._settle(snapshot)
                windows = plan.windows(self._options)
                return self._with_first_window(
                    OpenPass(snapshot, plan, windows, 0, frozenset(), waited), Offer(number)
                )
            snapshot.close()  # all of it was evicted between two looks

    def _settle(self, snapshot: Snapshot) -> None:
        try:
            if self._ranks is not None:
                self._ranks.settle(snapshot, self._watch)
        except BaseException:
            snapshot.close()
            raise

    def resume(
        self, found: Callable[[], tuple[Snapshot, RemainingPass] | None], step: int
    ) -> OpenPass:
        began = time.monotonic()
        self._prepare(lambda: "it does not have all shards for the rest of its pass yet")
        rested = found()
        if rested is None:
            raise StoppedError
        snapshot, rest = rested
        self._known = True
        waited = time.monotonic() - began
        if self._options.fixed:
            numbers = (shard.number for shard in rest.plan.shards)
            self._fixed_shards = _fixed_shards(snapshot, numbers)
        unreadable = frozenset(rest.mark.corrupt)
        start = rest.mark.position
        return self._with_first_window(
            OpenPass(snapshot, rest.plan, rest.windows, start, unreadable, waited),
            Offer(rest.plan.number, step),
        )

    def _with_first_window(self, opened: OpenPass, offer: Offer) -> OpenPass:
        try:
            self._agree(opened, offer)
            index = next(w.index for w in opened.windows if opened.start < w.first + len(w))
            opened.first = self.window(opened, opened.windows[index])
        except BaseException:
            opened.snapshot.close()
            raise
        return opened

    def _prepare(self, reason: Callable[[], str]) -> None:
        if self._agreement is not None:
            self._agreement.prepare(reason)

    def _agree(self, opened: OpenPass, offer: Offer) -> None:
        if self._agreement is None:
            return
        ranks = self._options.ranks
        offer = offer._replace(rows=opened.samples // ranks.local_world_size)
        began = time.monotonic()
        opened.cut(self._agreement.agree(offer, self._watch), ranks)
        self.waited += max(0.0, time.monotonic() - began - AGREEMENT_SECONDS)

    def _take(self, number: int, min_samples: int) -> Snapshot:
        options, snapshot = self._options, None
        try:
            while (snapshot := self._wait_and_take(number, min_samples)) is not None:
                # Other ranks have the same snapshot as rank 0.
                if not options.ranks.leads or len(snapshot) >= options.min_pass_samples:
                    break
                # A generation under replacement shrank before the lease existed.
                snapshot.close()
        finally:
            if snapshot is None and self._ranks is not None:
                self._ranks.leave()
        if snapshot is None:
            raise StoppedError
        self._known = True
        return self._pinned(snapshot) if options.fixed else snapshot

    def _wait_and_take(self, number: int, min_samples: int) -> Snapshot | None:
        """Return a snapshot with enough samples, or None if stopped."""
        options, ranks, watch = self._options, self._ranks, self._watch
        if ranks is not None:
            watch = ranks.announcing(number, watch)
        # Before the first snapshot there is nothing to release, and maybe no cache.
        release = watch.on_long_wait if self._known else lambda: None

        def stopped() -> bool:
            return watch.stopped() or (ranks is not None and ranks.offers(number))

        def attempt() -> Snapshot | None:
            first = replace(watch, stopped=stopped, on_long_wait=release)
            view = wait_for_pass(options, min_samples, first, known=self._known)
            self.waited = time.monotonic() - began
            if watch.stopped():
                return None
            if ranks is None:
                return take_new_snapshot(options, watch, view)
            return ranks.take(number, watch, view)

        began = time.monotonic()
        return in_a_generation(options.root, attempt)

    def _pinned(self, snapshot: Snapshot) -> Snapshot:
        shards = _fixed_shards(snapshot, (row.number for row in snapshot.shards))
        if self._fixed_shards is None:
            self._fixed_shards = shards
        elif shards != self._fixed_shards:
            snapshot.close()
            raise CacheError(
                f"the shards of {self._options.root} changed under a fixed loader, or were "
                "replaced; give it a cache with eviction: none, and a new loader after --replace",
                code="GC606",
            )
        return snapshot

    def window(self, opened: OpenPass, plan: Window) -> OpenWindow:
        return open_window(
            self._options,
            opened.snapshot,
            plan,
            start=opened.start,
            unreadable=opened.unreadable,
            stopped=self._watch.stopped,
        )


def _fixed_shards(snapshot: Snapshot, numbers: Iterable[int]) -> tuple[int, list[int]]:
    """Return a key of the fixed shards, because shards of two generations share numbers."""
    root = snapshot.view.root
    return (generation_in(root) if root else None) or 0, sorted(numbers)


def plan_snapshot(options: LoaderOptions, snapshot: Snapshot, number: int) -> PassPlan:
    order = shard_order(
        [(row.number, row.samples) for row in snapshot.shards],
        seed=options.seed,
        pass_number=number,
        shuffle=options.is_shuffled,
    )
    digests = {row.number: row.digest for row in snapshot.shards}
    shards = tuple(PlannedShard(n, samples, digests[n]) for n, samples in order)
    shard_samples = len(snapshot) / max(1, len(shards))
    return PassPlan(number, shards, window_samples(snapshot.sample_bytes, shard_samples))
