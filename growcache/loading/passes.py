"""Endless passes over the cache, each over its own snapshot.

Entering a window starts the preparation of the next one in a thread (maps, checksums,
read-ahead). Entering the last window prepares the next pass. This happens as late as is safe,
so that the pass includes samples that arrive until then. There are at most two leases.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field

import numpy as np

from growcache.errors import GrowcacheError
from growcache.loading.agreement import Agreement
from growcache.loading.channel import Demand
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import Window
from growcache.loading.rank_sync import RankGroup
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import WaitControl
from growcache.loading.windows import (
    OpenPass,
    OpenWindow,
    PassOpener,
    Piece,
    count_rows,
    without_damaged,
)
from growcache.threads import DaemonThread, Future, StoppedError

# A preparation may take this many times the longest recent one, plus this slack.
MARGIN = 4.0
SLACK_SECONDS = 0.05
# Long passes get more slack, because a busy disk can stall for half a second.
SLACK_SHARE, MOST_SLACK_SECONDS = 0.02, 1.0
LOOK_SECONDS = 0.02
KEPT = 6  # preparations, and rates, that are remembered
FEW_LOOKS, RECENT_LOOKS = 5, 10  # from which the current rate is computed


def is_due(
    left_rows: int, rows_per_second: float, prepare_seconds: float | None, pass_rows: int
) -> bool:
    if prepare_seconds is None:
        return True
    slack = min(SLACK_SHARE * pass_rows, MOST_SLACK_SECONDS * rows_per_second)
    slack = max(slack, SLACK_SECONDS * rows_per_second)
    return left_rows <= MARGIN * prepare_seconds * rows_per_second + slack


@dataclass(slots=True)
class SnapshotTiming:
    prepared: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    passed: deque[float] = field(default_factory=lambda: deque([0.0, 0.0], maxlen=2))
    _began: tuple[float, int] = (math.inf, 0)

    @property
    def prepare_seconds(self) -> float | None:
        return max(self.prepared, default=None)

    def learn(self, seconds: float, rows: int, prepared: float) -> None:
        self.prepared.append(prepared)
        if rows > 0 and seconds > 0:
            self.paces.append(rows / seconds)

    def wait(
        self,
        pass_rows: int,
        left: Callable[[], int],
        pause: Callable[[float], bool],
        clock: Callable[[], float],
    ) -> None:
        now, rows, seen = clock(), left(), 0.0
        self._note_pass(now, pass_rows, rows)
        known = max([min(self.passed), *self.paces])
        looks = deque([(now, rows)], maxlen=RECENT_LOOKS)
        while rows and not is_due(rows, max(known, seen), self.prepare_seconds, pass_rows):
            if pause(LOOK_SECONDS):
                return
            now, rows = clock(), left()
            began, before = looks[0]
            # One batch between two checks says little about the rate. An epoch that is left
            # early also has no rows left.
            if rows and (len(looks) >= FEW_LOOKS or not known):
                seen = max(seen, (before - rows) / max(1e-9, now - began))
            looks.append((now, rows))
        if seen:
            self.paces.append(seen)

    def _note_pass(self, now: float, pass_rows: int, left: int) -> None:
        """Record the rows consumed since the last wait; a short pass ends between two checks."""
        began, before = self._began
        consumed = before + pass_rows - left
        self.passed.append(consumed / (now - began) if now > began else 0.0)
        self._began = now, left


# Errors of work ahead of time, which are dropped with its result.
EXPECTED_ERRORS = (StoppedError, GrowcacheError, OSError)


class Passes:
    """The passes of a loader, for one thread. Waits raise StoppedError after `stop` is set."""

    def __init__(
        self,
        options: LoaderOptions,
        demand: Demand,
        first_pass: int,
        ranks: RankGroup | None,
        resume: Callable[[PassOpener], OpenPass] | None,
        on_pass: Callable[[OpenPass], None],
        agreement: Agreement | None = None,
    ) -> None:
        self._options = options
        self._demand = demand
        watch = WaitControl(
            demand.wake, demand.stop.is_set, self._on_long_wait, self._unread_shards
        )
        self._opener = PassOpener(options, ranks, watch, agreement)
        self._waits_long = False
        self._next_pass_due = threading.Event()  # the next pass is open, or waits for samples
        self._on_pass = on_pass
        self._timing = SnapshotTiming()
        self._hurry = True
        self._pass: OpenPass | None = None
        self._window: OpenWindow | None = None
        self._cursor = 0
        # To be taken before the window's next rows.
        self._retaken_pieces: deque[Piece] = deque()
        # Of the rows taken last, which may not have been read yet.
        self._taken: list[Window] = []
        # Windows that a process would need again if it died now and resumed.
        self._undelivered: deque[tuple[Window, Snapshot]] = deque()
        self._left_passes: deque[OpenPass] = deque()
        self._closing = threading.RLock()  # for passes that were left
        # All of their rows were taken, but maybe not copied yet.
        self._finished_windows: list[OpenWindow] = []
        self._closing_windows: Future[None] | None = None
        self.lost = 0
        self.epoch: int | None = None  # for which rows are taken; None before the first
        self._threads = {name: DaemonThread(name) for name in ("window", "let-go", "snapshot")}
        self._next_window: Future[OpenWindow] | None = None
        self._next_pass: Future[OpenPass] | None = None
        if resume is None:
            self._begin_pass_ahead(first_pass, options.min_samples)
        else:
            self._open_ahead(lambda: resume(self._opener))

    def next_pass(self, *, hurry: bool = True) -> int:
        """Enter the next pass; return the number of samples that all ranks deliver of it.

        With `hurry` the consumer may be waiting, because a block takes rows of both passes.
        """
        # A pass is left before its last window only if its epoch is left.
        self._hurry = hurry or self._next_pass is None
        if self._next_pass is None:
            assert self._pass is not None
            self._begin_pass_ahead(self._pass.number + 1, 1)
        assert self._next_pass is not None
        self._wait_for_next_pass()
        if self._waits_long:
            self._leave_pass()
            # Else its shards could not be evicted, and no new ones would arrive.
            self._close_left_passes()
            self._demand.wake.set()
        opened = self._next_pass.result()
        self._leave_pass()  # only now, so that maps pass to the new snapshot
        self._next_pass, self._pass, self._hurry = None, opened, False
        self._on_pass(opened)
        self._enter(opened.first)
        return opened.samples

    def _wait_for_next_pass(self) -> None:
        """Wait for the next pass, and release a delivered pass meanwhile."""
        while not self._next_pass_due.is_set():
            self._demand.pass_changed.wait()
            self._demand.pass_changed.clear()
            # The consumer may be about to start an epoch, which this thread would delay.
            if not (
                self._next_pass_due.is_set()
                or self._demand.pass_changed.wait(self._demand.head_start())
            ):
                self.release_delivered()

    def take(self, rows: int) -> list[Piece]:
        if not self._retaken_pieces:
            self._close_finished_windows()  # the rows taken before have been copied
        window = self._window
        self._taken = [window.plan] if window and self._cursor < len(window) else []
        pieces = self._retaken(rows)
        rows -= count_rows(pieces)
        while rows and self._has_rows():
            assert self._window is not None
            stop = min(self._cursor + rows, len(self._window))
            pieces.append(Piece(self._window, self._cursor, stop))
            rows -= stop - self._cursor
            self._cursor, self.lost = stop, self._window.lost_until(stop - 1)
        return pieces

    def _retaken(self, rows: int) -> list[Piece]:
        pieces: list[Piece] = []
        while rows and self._retaken_pieces:
            window, start, stop = self._retaken_pieces.popleft()
            end = min(start + rows, stop)
            if end < stop:
                self._retaken_pieces.appendleft(Piece(window, end, stop))
            pieces.append(Piece(window, start, end))
            rows -= end - start
            self._taken.append(window.plan)
            self.lost = window.lost_until(end - 1)
        return pieces

    def retake(self, pieces: list[Piece]) -> None:
        rest, dropped = self._retaken_pieces, 0
        self._retaken_pieces = deque()
        for window, start, stop in _merge_pieces([*pieces, *rest]):
            whole = without_damaged(self._options, window, start)
            whole.lost_before += dropped
            dropped += len(window) - len(whole)
            end = _end_in(whole, window, stop)
            if start < end:
                self._retaken_pieces.append(Piece(whole, start, end))
            if window is self._window:
                self._window, self._cursor = whole, end

    def _has_rows(self) -> bool:
        while True:
            if self._demand.stop.is_set():
                raise StoppedError
            if self._window is not None:
                if self._cursor < len(self._window):
                    return True
                self.lost = self._window.lost_before + self._window.lost
            if self._next_window is None:
                return False
            self._enter(self._next_window.result())

    def read(self, pieces: list[Piece]) -> None:
        """Count a use of these rows' shards, because their bytes have been copied."""
        for window, start, stop in pieces:
            if len(window.counted) < len(window.numbers):
                places = window.part(start, stop).places
                found = np.flatnonzero(np.bincount(places)).tolist()
                new = {window.numbers[place] for place in found} - window.counted
                window.counted |= new
                window.snapshot.mark_begun(new)

    def release_delivered(self) -> None:
        mark = self._demand.delivered
        while self._undelivered and _window_end(self._undelivered[0][0]) <= mark[:2]:
            window, snapshot = self._undelivered.popleft()
            snapshot.finish(window.numbers)
        if not self._closing.acquire(blocking=False):
            return  # all are being closed
        try:
            while self._left_passes and self._left_passes[0].number < mark.pass_number:
                self._left_passes.popleft().snapshot.close()
        finally:
            self._closing.release()

    def close(self) -> None:
        with ExitStack() as steps:  # last in, first out; each step runs even if others fail
            for thread in self._threads.values():
                steps.callback(thread.close)
            steps.callback(self._drop_next)
            steps.callback(self._close_left_passes)
            steps.callback(self._join_closing_windows)
            steps.callback(self._leave_pass)

    def _drop_next(self) -> None:
        if self._next_pass is None:
            return
        try:
            opened = self._next_pass.result()
        except EXPECTED_ERRORS:
            return  # no snapshot was taken
        with closing(opened.snapshot):
            opened.first.close()

    def _enter(self, window: OpenWindow) -> None:
        assert self._pass is not None
        if self._window is not None:
            self._finished_windows.append(self._window)
        self._window, self._cursor, self._next_window = window, 0, None
        self._undelivered.append((window.plan, window.snapshot))
        self._taken.append(window.plan)
        window.lost_before = self.lost
        index, opened = window.plan.index + 1, self._pass
        if index < len(opened.windows):
            plan = opened.windows[index]
            self._next_window = self._threads["window"].submit(
                lambda: self._opener.window(opened, plan)
            )
        else:
            self._begin_pass_ahead(opened.number + 1, 1)

    def _leave_pass(self) -> None:
        try:
            self._leave_windows()
        finally:
            if self._pass is not None:
                self._left_passes.append(self._pass)
            self._pass, self._taken = None, []

    def _leave_windows(self) -> None:
        # It maps shards of the snapshot that is about to be closed.
        if self._next_window is not None:
            with suppress(*EXPECTED_ERRORS):  # nothing of it is needed any more
                self._finished_windows.append(self._next_window.result())
        if self._window is not None:
            self._finished_windows.append(self._window)
        self._next_window = self._window = None
        self._retaken_pieces.clear()
        self._close_finished_windows()

    def _close_finished_windows(self) -> None:
        """Close windows in a thread, because dropping the pages of shards takes time."""
        finished, self._finished_windows = self._finished_windows, []
        if not finished:
            return
        self._join_closing_windows()
        for window in finished:
            window.shards.close()  # at once, because a snapshot that is closed next unmaps them
        try:
            self._closing_windows = self._threads["let-go"].submit(lambda: _close_all(finished))
        except RuntimeError:  # at its end, Python 3.12.0 starts no thread
            _close_all(finished)

    def _join_closing_windows(self) -> None:
        if self._closing_windows is not None:
            self._closing_windows.result()

    def _close_left_passes(self) -> None:
        # After this none is open or being closed by the producing thread.
        with self._closing, ExitStack() as closed:
            for opened in list(self._left_passes):
                closed.callback(opened.snapshot.close)

    def _begin_pass_ahead(self, number: int, min_samples: int) -> None:
        demand, epoch, left = self._demand, self.epoch, self._left_rows()
        # If epochs are parts of passes, leaving an epoch does not end its pass.
        pause: Callable[[float], bool] = demand.stop.wait
        if self._options.samples_per_epoch is None and epoch is not None:
            pause = functools.partial(demand.pause, epoch)
        rows = 0 if self._pass is None else self._pass.stop

        def prepare() -> OpenPass:
            if epoch is not None:  # an earlier snapshot would only be older
                demand.wait_begun(epoch)
            self._close_left_passes()  # or there would be three leases
            self._timing.wait(rows, left, pause, time.monotonic)
            before, began = left(), time.monotonic()
            opened = self._opener.open(number, min_samples)
            seconds = time.monotonic() - began
            self._timing.learn(seconds, before - left(), seconds - self._opener.waited)
            return opened

        self._open_ahead(prepare)

    def _left_rows(self) -> Callable[[], int]:
        running, epoch = self._pass, None
        # Ranks wait for one another anyway, and a fixed cache has nothing new.
        if running is None or self._options.fixed or self._options.ranks.share:
            return lambda: 0
        number, rows = running.number, running.stop
        if self._options.samples_per_epoch is None:
            rows, epoch = self._options.usable(rows), self.epoch

        def left() -> int:
            at = self._demand.furthest()
            if at.pass_number > number or self._is_left(epoch) or self._hurry:
                return 0
            return rows if at.pass_number < number else max(0, rows - at.position)

        return left

    def _is_left(self, epoch: int | None) -> bool:
        return epoch is not None and epoch < self._demand.wanted

    def _open_ahead(self, open_pass: Callable[[], OpenPass]) -> None:
        self._waits_long = False
        self._next_pass_due.clear()

        def prepare() -> OpenPass:
            try:
                return open_pass()
            finally:
                self._let_next_pass_begin()

        self._next_pass = self._threads["snapshot"].submit(prepare)

    def _on_long_wait(self) -> None:
        self._waits_long = True
        self._let_next_pass_begin()

    def _let_next_pass_begin(self) -> None:
        self._next_pass_due.set()
        self._demand.pass_changed.set()

    def _unread_shards(self) -> dict[str, list[int]]:
        """Return the shards that are not read completely.

        The next pass is requested before the rows taken last are copied, so their shards count,
        too.
        """
        running, taken = self._pass, list(self._taken)
        if running is None or self._next_window is not None or self._is_left(self.epoch):
            return {}
        return {running.snapshot.lease.name: [n for plan in taken for n in plan.numbers]}


def _close_all(windows: list[OpenWindow]) -> None:
    for window in windows:
        window.close()


def _merge_pieces(pieces: list[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].window is piece.window:
            piece = merged.pop()._replace(stop=piece.stop)
        merged.append(piece)
    return merged


def _end_in(whole: OpenWindow, window: OpenWindow, stop: int) -> int:
    if len(whole) == len(window):
        return stop
    assert whole.offsets is not None
    last = window.position(stop - 1) - window.plan.first
    return int(np.searchsorted(whole.offsets, last, side="right"))


def _window_end(window: Window) -> tuple[int, int]:
    return window.pass_number, window.first + len(window)
