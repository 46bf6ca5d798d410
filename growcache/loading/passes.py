"""An endless walk over the cache, pass after pass, each over a snapshot of its own.

What comes next is always under way: entering a window starts the preparation of the
next one in a thread (maps, checksums, read-ahead), and entering the last window of a
pass starts the next pass with its snapshot. So a walk holds at most two leases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from growcache.cache.formats.mapped import MappedShard
from growcache.errors import CacheError, ConfigError, CorruptShardError, GrowcacheError
from growcache.loading.ahead import Ahead
from growcache.loading.framework import Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import Window, plan_pass, window_samples
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import take_snapshot, wait_for_samples


class StoppedError(Exception):
    """The walk was asked to end; no user sees it."""


@dataclass(slots=True)
class OpenWindow:
    """A window whose shards are mapped and checked.

    Attributes:
        snapshot: that holds them.
        plan: the window as planned.
        shards: the maps, by place; None for a corrupt one, which no row refers to.
        places: int64 [n], the shard of each row.
        rows: int64 [n], the row in its shard.
        positions: int64 [n], where the row stands in the pass.
        skipped: samples of corrupt shards.
    """

    snapshot: Snapshot
    plan: Window
    shards: list[MappedShard | None]
    places: Integers
    rows: Integers
    positions: Integers
    skipped: int

    def __len__(self) -> int:
        return len(self.rows)


class Piece(NamedTuple):
    """Consecutive rows of a window."""

    window: OpenWindow
    start: int
    stop: int


@dataclass(slots=True)
class OpenPass:
    """A pass with its first window, ready to be walked.

    Attributes:
        number: of the pass.
        snapshot: of the cache.
        windows: its plan.
        first: its first window.
        waited_seconds: until the cache held enough.
    """

    number: int
    snapshot: Snapshot
    windows: tuple[Window, ...]
    first: OpenWindow
    waited_seconds: float


class Walk:
    """Rows in the order of the plans; used by one thread.

    Args:
        options: of the loader.
        first_pass: the number of the first pass.
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
        stop: threading.Event,
        wake: threading.Event,
        on_pass: Callable[[OpenPass], None],
    ) -> None:
        self._options = options
        self._stop = stop
        self._wake = wake
        self._on_pass = on_pass
        self._fixed_numbers: tuple[int, ...] | None = None
        self._pass: OpenPass | None = None
        self._window: OpenWindow | None = None
        self._cursor = 0
        self.skipped = 0
        self.ready: Callable[[], None] = _at_once
        self._next_window: Ahead[OpenWindow] | None = None
        self._next_pass: Ahead[OpenPass] | None = None
        self._begin_pass_ahead(first_pass, options.min_samples)

    def next_pass(self) -> None:
        """End the pass, wherever it stands, and enter the next one.

        Raises:
            StoppedError: the walk was asked to end.
        """
        if self._next_pass is None:
            assert self._pass is not None
            self._begin_pass_ahead(self._pass.number + 1, 1)
        assert self._next_pass is not None
        begun = self._next_pass.result()
        self._end_pass()  # only now, so that maps pass on to the new snapshot
        self._next_pass, self._pass = None, begun
        self._on_pass(begun)
        self._enter(begun.first)

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
            window.snapshot.mark_read([window.plan.numbers[place] for place in places])

    def close(self) -> None:
        """Free the leases."""
        self._end_pass()
        if self._next_pass is not None:
            # Where it failed, it came to hold nothing.
            with suppress(StoppedError, GrowcacheError, OSError):
                self._next_pass.result().snapshot.close()

    def _enter(self, window: OpenWindow) -> None:
        assert self._pass is not None
        self._window, self._cursor, self._next_window = window, 0, None
        self.skipped += window.skipped
        index, begun = window.plan.index + 1, self._pass
        if index < len(begun.windows):
            plan = begun.windows[index]
            self._next_window = Ahead(lambda: self._open(begun.snapshot, plan), "window")
        else:
            self._begin_pass_ahead(begun.number + 1, 1)

    def _end_pass(self) -> None:
        if self._next_window is not None:  # it maps shards of the snapshot to be closed
            with suppress(StoppedError, CacheError):  # nothing of it is needed any more
                self._next_window.result()
        self._next_window = self._window = None
        if self._pass is not None:
            self._pass.snapshot.close()
            self._pass = None

    def _begin_pass_ahead(self, number: int, min_samples: int) -> None:
        ready = self.ready

        def prepare() -> OpenPass:
            ready()
            return self._open_pass(number, min_samples)

        self._next_pass = Ahead(prepare, "snapshot")

    def _open_pass(self, number: int, min_samples: int) -> OpenPass:
        began = time.monotonic()
        while True:
            snapshot = self._take(min_samples)
            waited = time.monotonic() - began
            try:
                windows = plan_pass(
                    [(row.number, row.samples) for row in snapshot.shards],
                    seed=self._options.seed,
                    pass_number=number,
                    target_samples=window_samples(snapshot.sample_bytes),
                    shuffle=self._options.shuffle and not self._options.fixed,
                )
                if windows:  # else all of it was evicted between two looks
                    first = self._open(snapshot, windows[0])
                    return OpenPass(number, snapshot, windows, first, waited)
            except BaseException:
                snapshot.close()
                raise
            snapshot.close()

    def _take(self, min_samples: int) -> Snapshot:
        options = self._options
        whole_batch = 1
        if options.samples_per_epoch is None and not options.keeps_last:
            whole_batch = options.batch_size
        view = wait_for_samples(
            options.root,
            max(min_samples, whole_batch),
            complete=options.fixed,
            wake=self._wake,
            stopped=self._stop.is_set,
        )
        if self._stop.is_set():
            raise StoppedError
        if view.totals.samples < whole_batch:
            raise ConfigError(
                f"all {view.totals.samples} samples of {options.root} are less than one batch "
                f"of {whole_batch}; use a smaller batch_size or drop_last=False"
            )
        snapshot = take_snapshot(
            options.root,
            job=options.job,
            verify=options.verify,
            wake=self._wake,
            stopped=self._stop.is_set,
        )
        if snapshot is None:
            raise StoppedError
        return self._pinned(snapshot) if options.fixed else snapshot

    def _pinned(self, snapshot: Snapshot) -> Snapshot:
        numbers = tuple(row.number for row in snapshot.shards)
        if self._fixed_numbers is None:
            self._fixed_numbers = numbers
        elif numbers != self._fixed_numbers:
            snapshot.close()
            raise CacheError(
                f"the shards of {self._options.root} changed under a fixed loader; give it a "
                "cache with eviction: none"
            )
        return snapshot

    def _open(self, snapshot: Snapshot, plan: Window) -> OpenWindow:
        shards: list[MappedShard | None] = []
        for number in plan.numbers:
            if self._stop.is_set():
                raise StoppedError
            try:
                shard = snapshot.mapped(number)
                shard.willneed()  # another process, or another pass, may have let it go cold
                shards.append(shard)
            except CorruptShardError:
                shards.append(None)
        places, rows = plan.order()
        positions = np.arange(plan.first, plan.first + len(plan), dtype=np.int64)
        good = np.array([shard is not None for shard in shards])[places]
        if not good.all():
            places, rows, positions = places[good], rows[good], positions[good]
        return OpenWindow(
            snapshot, plan, shards, places, rows, positions, len(plan) - len(rows)
        )


def _at_once() -> None:
    """Wait for nothing."""
