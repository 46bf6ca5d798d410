"""A window of a pass, opened: its shards are mapped and checked, its rows in order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from growcache.cache.formats.mapped import MappedShard
from growcache.errors import CorruptShardError
from growcache.loading.columns import Rows, Shards
from growcache.loading.framework import Booleans, Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import Order, Window, located
from growcache.loading.ranks import stand_ins
from growcache.loading.snapshot import Snapshot
from growcache.loading.state import Mark
from growcache.loading.stopping import StoppedError


@dataclass(slots=True)
class OpenWindow:
    """A window whose shards are mapped and checked.

    Attributes:
        snapshot: that holds them.
        plan: the window as planned.
        numbers: of its shards, by place; behind the planned ones one that stands in.
        shards: the maps, by place; no row refers to a corrupt one.
        starts: [shards + 1], the sample at which each of them starts, see `order`.
        order: [n], the sample of each row, numbered shard after shard.
        offsets: [n], where each row stands in the window as planned; None where all do that
            come behind the first so many.
        lost: planned rows that are not there, for their shards cannot be read.
        lost_before: rows that the walk lost before it came here.
        corrupt: these shards.
        valid: bool [n], false where another row stands in; None where none does.
        padding: whether its rows stand in for none, and only fill a batch.
        begun: those of its shards whose use was counted.
        rows: [n], where the values of each row lie; None until it is sure which rows there are.
    """

    snapshot: Snapshot
    plan: Window
    numbers: tuple[int, ...]
    shards: Shards
    starts: Order
    order: Order
    offsets: Order | None = None
    lost: int = 0
    lost_before: int = 0
    corrupt: tuple[int, ...] = ()
    valid: Booleans | None = None
    padding: bool = False
    begun: set[int] = field(default_factory=set)
    rows: Rows | None = None

    def __len__(self) -> int:
        return len(self.order)

    def located(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Return of these rows the places of their shards, and the rows there: int64 [k] each."""
        return located(self.order[start:stop], self.starts)

    def part(self, start: int, stop: int) -> Rows:
        """Return where the values of these rows lie."""
        assert self.rows is not None
        return self.rows.chosen(slice(start, stop))

    def positions(self, start: int, stop: int) -> Integers:
        """Return where these rows stand in the pass: int64 [k]."""
        if self.offsets is not None:
            return self.offsets[start:stop] + np.int64(self.plan.first)
        first = self.plan.first + len(self.plan) - len(self)
        return np.arange(first + start, first + stop, dtype=np.int64)

    def position(self, row: int) -> int:
        """Return where one row stands in the pass, without an array: each batch asks."""
        if self.offsets is not None:
            return self.plan.first + int(self.offsets[row])
        return self.plan.first + len(self.plan) - len(self) + row

    def lost_until(self, row: int) -> int:
        """Return how many rows the walk has lost when it is through with one of these."""
        if self.offsets is None or not self.lost:
            return self.lost_before
        first = len(self.plan) - len(self) - self.lost
        return self.lost_before + int(self.offsets[row]) - first - row

    def close(self) -> None:
        """Let go of the maps: no more rows will be copied."""
        self.shards.close()
        self.snapshot.leave(self.plan.numbers)

    def chosen(self, chosen: Integers, *, padding: bool = False) -> OpenWindow:
        """Return some of the rows.

        Args:
            chosen: int64 [k], indices of rows; they may repeat.
            padding: whether they only fill a batch.
        """
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
    """Consecutive rows of a window."""

    window: OpenWindow
    start: int
    stop: int


def count_rows(pieces: Sequence[Piece]) -> int:
    """Return how many rows the pieces have."""
    return sum(stop - start for _, start, stop in pieces)


# A row of a window.
Place: TypeAlias = tuple[OpenWindow, int]


def places_after(pieces: Sequence[Piece], rows: Sequence[int]) -> list[Place]:
    """Return the last row that a walk took which has gone through so many of the pieces.

    Args:
        pieces: as `Walk.take` returned them.
        rows: ascending numbers of rows, each at least 1 and at most as many as there are.
    """
    places: list[Place] = []
    ends = list(accumulate(stop - start for _, start, stop in pieces))
    for n in rows:
        piece = bisect_left(ends, n)
        window, _, stop = pieces[piece]
        places.append((window, stop - 1 - (ends[piece] - n)))
    return places


def mark_after(place: Place) -> Mark:
    """Return where a walk stands behind a row."""
    window, row = place
    return Mark(window.plan.pass_number, window.position(row) + 1, window.corrupt)


def open_window(
    options: LoaderOptions,
    snapshot: Snapshot,
    plan: Window,
    *,
    start: int,
    unreadable: Container[int],
    stopped: Callable[[], bool],
) -> OpenWindow:
    """Return a window, as far as it lies behind ``start``.

    Rows that cannot be read are left out; where ranks share the cache, others stand in for
    them, so that all ranks make equal steps.

    Args:
        options: of the loader.
        snapshot: that holds the shards, as far as they are there.
        plan: of the window.
        start: position in the pass.
        unreadable: shards that count as corrupt, whatever is there now.
        stopped: whether to give up.

    Raises:
        StoppedError: ``stopped`` said so.
        CorruptShardError: no shard can be read that could stand in.
    """
    snapshot.enter(plan.numbers)
    try:
        window = _opened(options, snapshot, plan, start, unreadable, stopped)
        names = options.chosen(snapshot.schema).names
        located = window.located(0, len(window))
        return replace(window, rows=window.shards.rows(names, *located))
    except BaseException:
        snapshot.leave(plan.numbers)
        raise


def _opened(
    options: LoaderOptions,
    snapshot: Snapshot,
    plan: Window,
    start: int,
    unreadable: Container[int],
    stopped: Callable[[], bool],
) -> OpenWindow:
    shards = [_mapped(snapshot, n, unreadable, stopped) for n in plan.numbers]
    maps, skip = Shards(shards), max(0, start - plan.first)
    window = OpenWindow(snapshot, plan, plan.numbers, maps, plan.starts(), plan.order())
    # Less than planned where a shard stands in for one that is gone.
    sizes = np.array([0 if shard is None else len(shard) for shard in shards])
    if (sizes >= plan.counts).all():
        return replace(window, order=window.order[skip:])
    unread = [n for n, shard in zip(plan.numbers, shards, strict=True) if shard is None]
    return _without_lost(options, window, skip, sizes, unread)


def _without_lost(
    options: LoaderOptions,
    window: OpenWindow,
    skip: int,
    sizes: Integers,
    unread: Sequence[int],
) -> OpenWindow:
    """Return the window behind its first rows, without those that are not there.

    Args:
        options: of the loader.
        window: all of it.
        skip: rows before those that are wanted.
        sizes: samples that its shards have.
        unread: those of its shards that cannot be read.
    """
    plan = window.plan
    places, rows = window.located(0, len(window))
    wanted, there = np.arange(len(window)) >= skip, rows < sizes[places]
    lost = wanted & ~there
    left = {plan.numbers[place] for place in np.unique(places[lost]).tolist()}
    corrupt = tuple(number for number in unread if number in left)
    if options.ranks.share:
        filled = window if there.all() else _filled(options, window, there)
        window = filled if wanted.all() else filled.chosen(np.flatnonzero(wanted))
    else:
        kept = window.chosen(np.flatnonzero(wanted & there))
        window = replace(kept, lost=int(lost.sum()))
    return replace(window, corrupt=corrupt)


def without_damaged(options: LoaderOptions, window: OpenWindow, first: int) -> OpenWindow:
    """Return a window without the rows of shards that were damaged since it was opened.

    Where ranks share the cache, other rows stand in for them.

    Args:
        options: of the loader.
        window: some of whose rows were delivered.
        first: the first row that was not; all before it stay as they are.

    Raises:
        CorruptShardError: no shard can be read that could stand in.
    """
    places = window.shards.damaged()
    if not places:
        return window
    numbers = [window.numbers[place] for place in places]
    for number in numbers:
        window.snapshot.condemn(number)
    good = ~np.isin(window.located(0, len(window))[0], places)
    corrupt = tuple(dict.fromkeys((*window.corrupt, *numbers)))
    if options.ranks.share:
        return replace(_stood_in(options, window, good, first), corrupt=corrupt)
    kept = good | (np.arange(len(window)) < first)
    lost = window.lost + int((~kept).sum())
    return replace(window.chosen(np.flatnonzero(kept)), lost=lost, corrupt=corrupt)


def _stood_in(
    options: LoaderOptions, window: OpenWindow, good: Booleans, first: int
) -> OpenWindow:
    """Return the window with other rows in the places of those that are not good any more.

    Args:
        options: of the loader.
        window: with as many rows as planned.
        good: which rows can be read.
        first: the first row that is not delivered yet.
    """
    before = np.arange(len(window)) < first
    valid = good | before if window.valid is None else window.valid & (good | before)
    if not good.any():
        window, good = _borrowed(options, window)
    chosen = np.where(before, np.arange(len(window)), stand_ins(good))
    window = replace(window, order=window.order[chosen], valid=valid)
    names = options.chosen(window.snapshot.schema).names
    located = window.located(0, len(window))
    return replace(window, rows=window.shards.rows(names, *located))


def _mapped(
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


def _filled(options: LoaderOptions, window: OpenWindow, there: Booleans) -> OpenWindow:
    """Return the window with as many rows as planned, for ranks make equal steps."""
    good = there
    if not good.any():
        window, good = _borrowed(options, window)
    return replace(window, order=window.order[stand_ins(good)], valid=there)


def _borrowed(options: LoaderOptions, window: OpenWindow) -> tuple[OpenWindow, Booleans]:
    """Put a whole shard of another window into one that has none; say which rows are it."""
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
            shards=window.shards.beside(shard),
            starts=np.append(window.starts, first + n).astype(np.int64),
            order=order,
        )
        return borrowed, order >= first
    raise CorruptShardError(f"every shard of {options.root} is damaged; run growcache check")
