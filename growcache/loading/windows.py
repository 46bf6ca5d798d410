"""A window of a pass, opened: its shards are mapped and checked, its rows in order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from growcache.cache.formats.mapped import MappedShard
from growcache.errors import CorruptShardError
from growcache.loading.columns import Shards
from growcache.loading.framework import Booleans, Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import Window
from growcache.loading.ranks import stand_ins
from growcache.loading.snapshot import Snapshot
from growcache.loading.state import Mark


class StoppedError(Exception):
    """The walk was asked to end; no user sees it."""


@dataclass(slots=True)
class OpenWindow:
    """A window whose shards are mapped and checked.

    Attributes:
        snapshot: that holds them.
        plan: the window as planned.
        numbers: of its shards, by place; behind the planned ones one that stands in.
        shards: the maps, by place; no row refers to a corrupt one.
        places: int64 [n], the shard of each row.
        rows: int64 [n], the row in its shard.
        positions: int64 [n], where the row stands in the pass.
        skipped: samples of shards that cannot be read.
        corrupt: these shards.
        valid: bool [n], false where another row stands in; None where none does.
    """

    snapshot: Snapshot
    plan: Window
    numbers: tuple[int, ...]
    shards: Shards
    places: Integers
    rows: Integers
    positions: Integers
    skipped: int = 0
    corrupt: tuple[int, ...] = ()
    valid: Booleans | None = None

    def __len__(self) -> int:
        return len(self.rows)

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
        return replace(
            self,
            places=self.places[chosen],
            rows=self.rows[chosen],
            positions=self.positions[chosen],
            valid=np.zeros(len(chosen), np.bool_) if padding else valid,
        )


class Piece(NamedTuple):
    """Consecutive rows of a window."""

    window: OpenWindow
    start: int
    stop: int


def count_rows(pieces: Sequence[Piece]) -> int:
    """Return how many rows the pieces have."""
    return sum(stop - start for _, start, stop in pieces)


def marks_after(pieces: Sequence[Piece], rows: Sequence[int]) -> list[Mark]:
    """Return where a walk stands that has gone through so many rows of the pieces.

    Args:
        pieces: as `Walk.take` returned them.
        rows: ascending numbers of rows, each at least 1 and at most as many as there are.
    """
    marks: list[Mark] = []
    ends = list(accumulate(stop - start for _, start, stop in pieces))
    for n in rows:
        place = bisect_left(ends, n)
        window, _, stop = pieces[place]
        position = int(window.positions[stop - 1 - (ends[place] - n)]) + 1
        marks.append(Mark(window.plan.pass_number, position, window.corrupt))
    return marks


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
        return _opened(options, snapshot, plan, start, unreadable, stopped)
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
    places, rows = plan.order()
    positions = np.arange(plan.first, plan.first + len(plan), dtype=np.int64)
    # Less than planned where a shard stands in for one that is gone.
    sizes = np.array([0 if shard is None else len(shard) for shard in shards])
    wanted, there = positions >= start, rows < sizes[places]
    lost, good = wanted & ~there, wanted & there
    left = {plan.numbers[place] for place in np.unique(places[lost]).tolist()}
    unread = (n for n, shard in zip(plan.numbers, shards, strict=True) if shard is None)
    corrupt = tuple(number for number in unread if number in left)
    maps = Shards(shards)
    maps.prepare(options.chosen(snapshot.schema).names)  # not in the thread that copies
    window = OpenWindow(snapshot, plan, plan.numbers, maps, places, rows, positions)
    if options.ranks.share:
        filled = window if there.all() else _filled(options, window, there)
        window = filled if wanted.all() else filled.chosen(np.flatnonzero(wanted))
    elif not good.all():
        window = replace(window.chosen(np.flatnonzero(good)), skipped=int(lost.sum()))
    return replace(window, corrupt=corrupt)


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
    chosen = stand_ins(good)
    return replace(window, places=window.places[chosen], rows=window.rows[chosen], valid=there)


def _borrowed(options: LoaderOptions, window: OpenWindow) -> tuple[OpenWindow, Booleans]:
    """Put a whole shard of another window into one that has none; say which rows are it."""
    snapshot = window.snapshot
    for row in snapshot.shards:
        try:
            shard = snapshot.mapped(row.number)
        except CorruptShardError:
            continue
        places, rows = window.places.copy(), window.rows.copy()
        n = min(len(window), row.samples)
        places[:n], rows[:n] = len(window.shards), np.arange(n)
        borrowed = replace(
            window,
            numbers=(*window.numbers, row.number),
            shards=window.shards.beside(shard),
            places=places,
            rows=rows,
        )
        return borrowed, places == len(window.shards)
    raise CorruptShardError(f"every shard of {options.root} is damaged; run growcache check")
