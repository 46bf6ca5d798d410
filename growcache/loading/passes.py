"""An endless walk over the cache, pass after pass, each over a snapshot of its own.

What comes next is always under way: entering a window starts the preparation of the
next one in a thread (maps, checksums, read-ahead), and entering the last window of a
pass starts the next pass with its snapshot. So a walk holds at most two leases.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from growcache.cache.formats.mapped import MappedShard
from growcache.errors import CacheError, ConfigError, CorruptShardError, GrowcacheError
from growcache.loading.ahead import Ahead
from growcache.loading.following import Company
from growcache.loading.framework import Booleans, Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import Window, visiting_order, window_samples
from growcache.loading.ranks import stand_ins
from growcache.loading.reuse import Watch
from growcache.loading.snapshot import Snapshot
from growcache.loading.state import Mark, PassPlan, PlannedShard, Rest
from growcache.loading.waiting import wait_for_samples


class StoppedError(Exception):
    """The walk was asked to end; no user sees it."""


@dataclass(slots=True)
class OpenWindow:
    """A window whose shards are mapped and checked.

    Attributes:
        snapshot: that holds them.
        plan: the window as planned.
        numbers: of its shards, by place; behind the planned ones one that stands in.
        shards: the maps, by place; None for a corrupt one, which no row refers to.
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
    shards: list[MappedShard | None]
    places: Integers
    rows: Integers
    positions: Integers
    skipped: int = 0
    corrupt: tuple[int, ...] = ()
    valid: Booleans | None = None

    def __len__(self) -> int:
        return len(self.rows)

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


@dataclass(slots=True)
class OpenPass:
    """A pass with the window in which it begins, ready to be walked.

    Attributes:
        snapshot: of the cache.
        plan: what its order depends on.
        windows: all of it.
        start: the position in which it begins: not 0 where it was resumed.
        unreadable: shards that were found corrupt before it was resumed.
        waited_seconds: until the cache held enough.
        first: the window in which it begins.
    """

    snapshot: Snapshot
    plan: PassPlan
    windows: tuple[Window, ...]
    start: int
    unreadable: frozenset[int]
    waited_seconds: float
    first: OpenWindow = field(init=False)

    @property
    def number(self) -> int:
        """Number of the pass."""
        return self.plan.number


class Walk:
    """Rows in the order of the plans; used by one thread.

    Args:
        options: of the loader.
        first_pass: the number of the first pass.
        ranks: the others that walk the same passes.
        resume: gives the rest of a pass that was begun elsewhere, to begin with instead;
            None to stop.
        stop: set when the walk shall end, together with ``wake``.
        wake: ends waits for samples early.
        on_pass: called when a pass begins.

    Attributes:
        skipped: samples of corrupt shards, so far.
        ready: waits until the next snapshot may be taken; earlier it would only be older.
    """

    def __init__(
        self,
        options: LoaderOptions,
        first_pass: int,
        ranks: Company,
        resume: Callable[[], tuple[Snapshot, Rest] | None] | None,
        stop: threading.Event,
        wake: threading.Event,
        on_pass: Callable[[OpenPass], None],
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._watch = Watch(wake, stop.is_set, self._hold, self._own)
        self._holding = False
        self._turn = threading.Event()  # the next pass is there, or waits for samples
        self._stop = stop
        self._wake = wake
        self._on_pass = on_pass
        self._fixed_numbers: tuple[int, ...] | None = None
        self._pass: OpenPass | None = None
        self._window: OpenWindow | None = None
        self._cursor = 0
        # What a process that dies now, and comes back, would need once more.
        self._undelivered: deque[OpenWindow] = deque()
        self._left: deque[OpenPass] = deque()
        self.skipped = 0
        self.ready: Callable[[], None] = _at_once
        self._next_window: Ahead[OpenWindow] | None = None
        self._next_pass: Ahead[OpenPass] | None = None
        if resume is None:
            self._begin_pass_ahead(first_pass, options.min_samples)
        else:
            self._open_ahead(lambda: self._resumed(resume))

    def next_pass(self) -> PassPlan:
        """End the pass, wherever it stands, and enter the next one; return its plan.

        Raises:
            StoppedError: the walk was asked to end.
        """
        if self._next_pass is None:
            assert self._pass is not None
            self._begin_pass_ahead(self._pass.number + 1, 1)
        assert self._next_pass is not None
        self._turn.wait()
        if self._holding:
            self._leave_pass()
            self._close_left()  # what it holds could not leave, and nothing new come
        begun = self._next_pass.result()
        self._leave_pass()  # only now, so that maps pass on to the new snapshot
        self._next_pass, self._pass = None, begun
        self._on_pass(begun)
        self._enter(begun.first)
        return begun.plan

    def take(self, rows: int) -> list[Piece]:
        """Return the next so many rows; fewer only where the pass ends.

        Raises:
            StoppedError: the walk was asked to end.
        """
        pieces: list[Piece] = []
        while rows and self._has_rows():
            assert self._window is not None
            stop = min(self._cursor + rows, len(self._window))
            pieces.append(Piece(self._window, self._cursor, stop))
            rows -= stop - self._cursor
            self._cursor = stop
        return pieces

    def _has_rows(self) -> bool:
        """Whether the pass goes on; enters the window in which it does."""
        while True:
            if self._stop.is_set():
                raise StoppedError
            if self._window is not None and self._cursor < len(self._window):
                return True
            if self._next_window is None:
                return False
            self._enter(self._next_window.result())

    def read(self, pieces: list[Piece]) -> None:
        """Count these rows' shards as used: their bytes have been copied."""
        for window, start, stop in pieces:
            places = np.unique(window.places[start:stop]).tolist()
            window.snapshot.mark_begun([window.numbers[place] for place in places])

    def delivered(self, mark: Mark) -> None:
        """Let go of what lies before the mark: the consumer has it."""
        while self._undelivered and _end(self._undelivered[0]) <= mark[:2]:
            window = self._undelivered.popleft()
            window.snapshot.finish(window.numbers)
        while self._left and self._left[0].number < mark.pass_number:
            self._left.popleft().snapshot.close()

    def close(self) -> None:
        """Free the leases."""
        self._leave_pass()
        self._close_left()
        if self._next_pass is not None:
            # Where it failed, it came to hold nothing.
            with suppress(StoppedError, GrowcacheError, OSError):
                self._next_pass.result().snapshot.close()

    def _enter(self, window: OpenWindow) -> None:
        assert self._pass is not None
        self._window, self._cursor, self._next_window = window, 0, None
        self._undelivered.append(window)
        self.skipped += window.skipped
        index, begun = window.plan.index + 1, self._pass
        if index < len(begun.windows):
            plan = begun.windows[index]
            self._next_window = Ahead(lambda: self._open(begun, plan), "window")
        else:
            self._begin_pass_ahead(begun.number + 1, 1)

    def _leave_pass(self) -> None:
        """End the pass; its lease stays until all was delivered, or the next one is taken."""
        if self._next_window is not None:  # it maps shards of the snapshot to be closed
            with suppress(StoppedError, CacheError):  # nothing of it is needed any more
                self._next_window.result()
        self._next_window = self._window = None
        if self._pass is not None:
            self._left.append(self._pass)
            self._pass = None

    def _close_left(self) -> None:
        for begun in list(self._left):
            begun.snapshot.close()

    def _begin_pass_ahead(self, number: int, min_samples: int) -> None:
        ready = self.ready

        def prepare() -> OpenPass:
            ready()
            self._close_left()  # or there were three leases
            return self._open_pass(number, min_samples)

        self._open_ahead(prepare)

    def _open_ahead(self, open_pass: Callable[[], OpenPass]) -> None:
        self._holding = False
        self._turn.clear()

        def prepare() -> OpenPass:
            try:
                return open_pass()
            finally:
                self._turn.set()

        self._next_pass = Ahead(prepare, "snapshot")

    def _hold(self) -> None:
        """Have the pass ended as soon as its rows are through."""
        self._holding = True
        self._turn.set()

    def _own(self) -> tuple[str, ...]:
        """Return the lease of the pass that is walked: its shards are about to be used."""
        running = self._pass
        return () if running is None else (running.snapshot.lease.name,)

    def _open_pass(self, number: int, min_samples: int) -> OpenPass:
        began = time.monotonic()
        while True:
            snapshot = self._take(number, min_samples)
            waited = time.monotonic() - began
            plan = self._plan(snapshot, number)
            if len(plan) >= self._options.least_samples:
                self._settle(snapshot)
                windows = plan.windows(self._options)
                return self._begun(OpenPass(snapshot, plan, windows, 0, frozenset(), waited))
            snapshot.close()  # all of it was evicted between two looks

    def _settle(self, snapshot: Snapshot) -> None:
        try:
            self._ranks.settle(snapshot, self._watch)
        except BaseException:
            snapshot.close()
            raise

    def _plan(self, snapshot: Snapshot, number: int) -> PassPlan:
        order = visiting_order(
            [(row.number, row.samples) for row in snapshot.shards],
            seed=self._options.seed,
            pass_number=number,
            shuffle=self._options.shuffles,
        )
        digests = {row.number: row.digest for row in snapshot.shards}
        shards = tuple(PlannedShard(n, samples, digests[n]) for n, samples in order)
        return PassPlan(number, shards, window_samples(snapshot.sample_bytes))

    def _resumed(self, resume: Callable[[], tuple[Snapshot, Rest] | None]) -> OpenPass:
        began = time.monotonic()
        found = resume()
        if found is None:
            raise StoppedError
        snapshot, rest = found
        waited = time.monotonic() - began
        if self._options.fixed:
            self._fixed_numbers = tuple(sorted(shard.number for shard in rest.plan.shards))
        unreadable = frozenset(rest.mark.corrupt)
        return self._begun(
            OpenPass(
                *(snapshot, rest.plan, rest.windows, rest.mark.position, unreadable, waited)
            )
        )

    def _begun(self, begun: OpenPass) -> OpenPass:
        try:
            index = next(w.index for w in begun.windows if begun.start < w.first + len(w))
            begun.first = self._open(begun, begun.windows[index])
        except BaseException:
            begun.snapshot.close()
            raise
        return begun

    def _take(self, number: int, min_samples: int) -> Snapshot:
        options, ranks = self._options, self._ranks
        view = wait_for_samples(
            options.root,
            max(min_samples, options.least_samples),
            complete=options.fixed,
            wake=self._wake,
            stopped=lambda: self._stop.is_set() or ranks.offers(number),
        )
        if self._stop.is_set():
            raise StoppedError
        if view.totals.samples < options.least_samples and not ranks.offers(number):
            raise ConfigError(
                f"all {view.totals.samples} samples of {options.root} are less than one batch "
                f"of {options.least_samples}; use a smaller batch_size or drop_last=False"
            )
        snapshot = ranks.take(number, self._watch)
        if snapshot is None:
            raise StoppedError
        return self._pinned(snapshot) if options.fixed else snapshot

    def _pinned(self, snapshot: Snapshot) -> Snapshot:
        numbers = tuple(sorted(row.number for row in snapshot.shards))
        if self._fixed_numbers is None:
            self._fixed_numbers = numbers
        elif numbers != self._fixed_numbers:
            snapshot.close()
            raise CacheError(
                f"the shards of {self._options.root} changed under a fixed loader; give it a "
                "cache with eviction: none"
            )
        return snapshot

    def _open(self, begun: OpenPass, plan: Window) -> OpenWindow:
        """Open a window of the pass, as far as it lies behind the start."""
        shards = [self._mapped(begun, number) for number in plan.numbers]
        places, rows = plan.order()
        positions = np.arange(plan.first, plan.first + len(plan), dtype=np.int64)
        # Less than planned where a shard stands in for one that is gone.
        sizes = np.array([0 if shard is None else len(shard) for shard in shards])
        wanted, there = positions >= begun.start, rows < sizes[places]
        lost, good = wanted & ~there, wanted & there
        left = {plan.numbers[place] for place in np.unique(places[lost]).tolist()}
        unread = (n for n, shard in zip(plan.numbers, shards, strict=True) if shard is None)
        corrupt = tuple(number for number in unread if number in left)
        window = OpenWindow(begun.snapshot, plan, plan.numbers, shards, places, rows, positions)
        if self._options.ranks.share:
            filled = window if there.all() else self._filled(window, there)
            window = filled if wanted.all() else filled.chosen(np.flatnonzero(wanted))
        elif not good.all():
            window = replace(window.chosen(np.flatnonzero(good)), skipped=int(lost.sum()))
        return replace(window, corrupt=corrupt)

    def _filled(self, window: OpenWindow, there: Booleans) -> OpenWindow:
        """Return the window with as many rows as planned, for ranks make equal steps."""
        good = there
        if not good.any():
            window, good = self._borrowed(window)
        chosen = stand_ins(good)
        return replace(
            window, places=window.places[chosen], rows=window.rows[chosen], valid=there
        )

    def _borrowed(self, window: OpenWindow) -> tuple[OpenWindow, Booleans]:
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
                shards=[*window.shards, shard],
                places=places,
                rows=rows,
            )
            return borrowed, places == len(window.shards)
        raise CorruptShardError(
            f"every shard of {self._options.root} is damaged; run growcache check"
        )

    def _mapped(self, begun: OpenPass, number: int) -> MappedShard | None:
        if self._stop.is_set():
            raise StoppedError
        if not begun.snapshot.has(number) or number in begun.unreadable:
            return None
        try:
            shard = begun.snapshot.mapped(number)
        except CorruptShardError:
            return None
        shard.willneed()  # another process, or another pass, may have let it go cold
        return shard


def _end(window: OpenWindow) -> tuple[int, int]:
    """Return the place behind a window, as marks have it."""
    return window.plan.pass_number, window.plan.first + len(window.plan)


def _at_once() -> None:
    """Wait for nothing."""
