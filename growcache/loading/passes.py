"""An endless walk over the cache, pass after pass, each over a snapshot of its own.

What comes next is always under way: entering a window starts the preparation of the
next one in a thread (maps, checksums, read-ahead), and after the last window of a pass was
entered, as late as is safe, the next pass with its snapshot. So a walk holds at most two
leases.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress

import numpy as np

from growcache.errors import GrowcacheError
from growcache.loading.ahead import Ahead, Hand
from growcache.loading.following import Company
from growcache.loading.opening import Opener, OpenPass
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import Window
from growcache.loading.reuse import Watch
from growcache.loading.snapshot import Snapshot
from growcache.loading.state import Mark, PassPlan, Rest
from growcache.loading.stopping import StoppedError
from growcache.loading.timing import Timing
from growcache.loading.windows import OpenWindow, Piece, count_rows, without_damaged

# What may end work that was begun ahead; where its result is not needed, nor is this.
OUTSIDE = (StoppedError, GrowcacheError, OSError)


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
        news: set when the consumer stands behind another pass.
        on_pass: called when a pass begins.

    Attributes:
        lost: planned rows before where it stands that could not be read.
        ready: waits until the next snapshot may be taken; earlier it would only be older.
        pause: waits so many seconds, or until the consumer wants the next pass; True ends it all.
        passed_over: whether the rows that are taken now are not read.
        position: where the consumer stands, or further on.
        heard: where it stands, or not so far.
        head_start: how many seconds it has, once it has ended a pass.
    """

    def __init__(
        self,
        options: LoaderOptions,
        first_pass: int,
        ranks: Company,
        resume: Callable[[], tuple[Snapshot, Rest] | None] | None,
        stop: threading.Event,
        wake: threading.Event,
        news: threading.Event,
        on_pass: Callable[[OpenPass], None],
    ) -> None:
        self._options = options
        watch = Watch(wake, stop.is_set, self._hold, self._own)
        self._opener = Opener(options, ranks, watch, stop, wake)
        self._holding = False
        self._turn = False  # the next pass is there, or waits for samples
        self._news = news
        self._stop = stop
        self._wake = wake
        self._on_pass = on_pass
        self._timing = Timing()
        self._hurry = True
        self._pass: OpenPass | None = None
        self._window: OpenWindow | None = None
        self._cursor = 0
        self._again: deque[Piece] = deque()  # to be taken before what the window has
        self._taken: list[Window] = []  # of what was taken last: it may not be read yet
        # What a process that dies now, and comes back, would need once more.
        self._undelivered: deque[tuple[Window, Snapshot]] = deque()
        self._left: deque[OpenPass] = deque()
        self._closing = threading.RLock()  # of passes that were left
        self._through: list[OpenWindow] = []  # all taken, though maybe not copied yet
        self._letting_go: Ahead[None] | None = None
        self.lost = 0
        self.ready: Callable[[], None] = _at_once
        self.pause: Callable[[float], bool] = stop.wait
        self.passed_over: Callable[[], bool] = _never
        self.position: Callable[[], Mark] = _beyond
        self.heard: Callable[[], Mark] = _nowhere
        self.head_start: Callable[[], float] = float
        self._hands = {name: Hand(name) for name in ("window", "let-go", "snapshot")}
        self._next_window: Ahead[OpenWindow] | None = None
        self._next_pass: Ahead[OpenPass] | None = None
        if resume is None:
            self._begin_pass_ahead(first_pass, options.min_samples)
        else:
            self._open_ahead(lambda: self._opener.resume(resume))

    def next_pass(self, *, hurry: bool = True) -> PassPlan:
        """End the pass, wherever it stands, and enter the next one; return its plan.

        Args:
            hurry: whether the consumer may need rows of the next pass to have the last of
                this one: a block takes both.

        Raises:
            StoppedError: the walk was asked to end.
        """
        # A pass that is left before its last window is of an epoch that nobody goes on with.
        self._hurry = hurry or self._next_pass is None
        if self._next_pass is None:
            assert self._pass is not None
            self._begin_pass_ahead(self._pass.number + 1, 1)
        assert self._next_pass is not None
        self._wait_for_turn()
        if self._holding:
            self._leave_pass()
            self._close_left()  # what it holds could not leave, and nothing new come
            self._wake.set()
        begun = self._next_pass.result()
        self._leave_pass()  # only now, so that maps pass on to the new snapshot
        self._next_pass, self._pass, self._hurry = None, begun, False
        self._on_pass(begun)
        self._enter(begun.first)
        return begun.plan

    def _wait_for_turn(self) -> None:
        """Wait for the next pass, which may be an hour; one that is over meanwhile is let go."""
        while not self._has_turn():
            self._news.wait()
            self._news.clear()
            # It may be about to begin an epoch, and this thread to be in its way.
            if not (self._has_turn() or self._news.wait(self.head_start())):
                self.let_go()

    def take(self, rows: int) -> list[Piece]:
        """Return the next so many rows; fewer only where the pass ends.

        Raises:
            StoppedError: the walk was asked to end.
        """
        if not self._again:
            self._close_through()  # what was taken before has been copied
        window = self._window
        self._taken = [window.plan] if window and self._cursor < len(window) else []
        pieces = self._taken_again(rows)
        rows -= count_rows(pieces)
        while rows and self._has_rows():
            assert self._window is not None
            stop = min(self._cursor + rows, len(self._window))
            pieces.append(Piece(self._window, self._cursor, stop))
            rows -= stop - self._cursor
            self._cursor, self.lost = stop, self._window.lost_until(stop - 1)
        return pieces

    def _taken_again(self, rows: int) -> list[Piece]:
        """Return the next so many of the rows that `take_again` was told of, or all."""
        pieces: list[Piece] = []
        while rows and self._again:
            window, start, stop = self._again.popleft()
            end = min(start + rows, stop)
            if end < stop:
                self._again.appendleft(Piece(window, end, stop))
            pieces.append(Piece(window, start, end))
            rows -= end - start
            self._taken.append(window.plan)
            self.lost = window.lost_until(end - 1)
        return pieces

    def take_again(self, pieces: list[Piece]) -> None:
        """Have rows taken once more, without those of shards that are damaged.

        Args:
            pieces: as `take` returned them last, of which nothing was kept.
        """
        rest, dropped = self._again, 0
        self._again = deque()
        for window, start, stop in _merged([*pieces, *rest]):
            whole = without_damaged(self._options, window, start)
            whole.lost_before += dropped
            dropped += len(window) - len(whole)
            end = _end_in(whole, window, stop)
            if start < end:
                self._again.append(Piece(whole, start, end))
            if window is self._window:
                self._window, self._cursor = whole, end

    def _has_rows(self) -> bool:
        """Whether the pass goes on; enters the window in which it does."""
        while True:
            if self._stop.is_set():
                raise StoppedError
            if self._window is not None:
                if self._cursor < len(self._window):
                    return True
                self.lost = self._window.lost_before + self._window.lost
            if self._next_window is None:
                return False
            self._enter(self._next_window.result())

    def read(self, pieces: list[Piece]) -> None:
        """Count these rows' shards as used: their bytes have been copied."""
        for window, start, stop in pieces:
            if len(window.begun) < len(window.numbers):
                places = window.part(start, stop).places
                found = np.flatnonzero(np.bincount(places)).tolist()
                new = {window.numbers[place] for place in found} - window.begun
                window.begun |= new
                window.snapshot.mark_begun(new)

    def let_go(self) -> None:
        """Let go of what the consumer has."""
        mark = self.heard()
        while self._undelivered and _end(self._undelivered[0][0]) <= mark[:2]:
            window, snapshot = self._undelivered.popleft()
            snapshot.finish(window.numbers)
        if not self._closing.acquire(blocking=False):
            return  # all are being closed
        try:
            while self._left and self._left[0].number < mark.pass_number:
                self._left.popleft().snapshot.close()
        finally:
            self._closing.release()

    def close(self) -> None:
        """Free the leases."""
        with ExitStack() as steps:  # the last one first; each, whatever becomes of the others
            for hand in self._hands.values():
                steps.callback(hand.close)
            steps.callback(self._drop_next)
            steps.callback(self._close_left)
            steps.callback(self._join_letting_go)
            steps.callback(self._leave_pass)

    def _drop_next(self) -> None:
        if self._next_pass is None:
            return
        try:
            begun = self._next_pass.result()
        except OUTSIDE:
            return  # it came to hold nothing
        with closing(begun.snapshot):
            begun.first.close()

    def _enter(self, window: OpenWindow) -> None:
        assert self._pass is not None
        if self._window is not None:
            self._through.append(self._window)
        self._window, self._cursor, self._next_window = window, 0, None
        self._undelivered.append((window.plan, window.snapshot))
        self._taken.append(window.plan)
        window.lost_before = self.lost
        index, begun = window.plan.index + 1, self._pass
        if index < len(begun.windows):
            plan = begun.windows[index]
            opened = self._hands["window"].ahead(lambda: self._opener.window(begun, plan))
            self._next_window = opened
        else:
            self._begin_pass_ahead(begun.number + 1, 1)

    def _leave_pass(self) -> None:
        """End the pass; its lease stays until all was delivered, or the next one is taken."""
        try:
            self._leave_windows()
        finally:
            if self._pass is not None:
                self._left.append(self._pass)
            self._pass, self._taken = None, []

    def _leave_windows(self) -> None:
        if self._next_window is not None:  # it maps shards of the snapshot to be closed
            with suppress(*OUTSIDE):  # nothing of it is needed any more
                self._through.append(self._next_window.result())
        if self._window is not None:
            self._through.append(self._window)
        self._next_window = self._window = None
        self._again.clear()
        self._close_through()

    def _close_through(self) -> None:
        """Close windows in a thread, for to forget the pages of shards takes a while."""
        through, self._through = self._through, []
        if not through:
            return
        self._join_letting_go()
        for window in through:
            window.shards.close()  # at once: a snapshot that is closed next unmaps them
        try:
            self._letting_go = self._hands["let-go"].ahead(lambda: _close_all(through))
        except RuntimeError:  # at the interpreter's end Python 3.12.0 starts no thread
            _close_all(through)

    def _join_letting_go(self) -> None:
        if self._letting_go is not None:
            self._letting_go.result()

    def _close_left(self) -> None:
        # Behind this none is open, nor just being closed by the walk's thread.
        with self._closing, ExitStack() as closed:
            for begun in list(self._left):
                closed.callback(begun.snapshot.close)

    def _begin_pass_ahead(self, number: int, min_samples: int) -> None:
        ready, left = self.ready, self._left_rows()
        # Where epochs are parts of passes, what becomes of one says nothing of the pass.
        pause = self.pause if self._options.samples_per_epoch is None else self._stop.wait
        rows = 0 if self._pass is None else len(self._pass.plan)

        def prepare() -> OpenPass:
            ready()
            self._close_left()  # or there were three leases
            self._timing.wait(rows, left, pause, time.monotonic)
            before, began = left(), time.monotonic()
            begun = self._opener.open(number, min_samples)
            seconds = time.monotonic() - began
            self._timing.learn(seconds, before - left(), seconds - self._opener.waited)
            return begun

        self._open_ahead(prepare)

    def _left_rows(self) -> Callable[[], int]:
        """Return what tells the rows of the running pass that the consumer still has before it."""
        running, passed_over = self._pass, _never
        # Ranks wait for one another besides, and a fixed cache has nothing new.
        if running is None or self._options.fixed or self._options.ranks.share:
            return lambda: 0
        number, rows = running.number, len(running.plan)
        if self._options.samples_per_epoch is None:
            rows, passed_over = self._options.usable(rows), self.passed_over

        def left() -> int:
            at = self.position()
            if at.pass_number > number or passed_over() or self._hurry:
                return 0
            return rows if at.pass_number < number else max(0, rows - at.position)

        return left

    def _open_ahead(self, open_pass: Callable[[], OpenPass]) -> None:
        self._holding = False
        self._turn = False

        def prepare() -> OpenPass:
            try:
                return open_pass()
            finally:
                self._take_turn()

        self._next_pass = self._hands["snapshot"].ahead(prepare)

    def _hold(self) -> None:
        """Have the pass ended as soon as its rows are through."""
        self._holding = True
        self._take_turn()

    def _has_turn(self) -> bool:
        return self._turn  # which another thread sets

    def _take_turn(self) -> None:
        self._turn = True
        self._news.set()

    def _own(self) -> dict[str, list[int]]:
        """Return what will be used yet of the pass that is walked, by its lease.

        The next pass is asked for in the last window, and before the rows that were taken
        are copied; or in an earlier window, to leave this one.
        """
        running, taken = self._pass, list(self._taken)
        if running is None or self._next_window is not None or self.passed_over():
            return {}
        return {running.snapshot.lease.name: [n for plan in taken for n in plan.numbers]}


def _close_all(windows: list[OpenWindow]) -> None:
    for window in windows:
        window.close()


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with one for each window."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].window is piece.window:
            piece = merged.pop()._replace(stop=piece.stop)
        merged.append(piece)
    return merged


def _end_in(whole: OpenWindow, window: OpenWindow, stop: int) -> int:
    """Return how many rows of a window are left of its first ones, where others were dropped.

    Args:
        whole: the window without them.
        window: as it was.
        stop: how many rows of it are looked at.
    """
    if len(whole) == len(window):
        return stop
    assert whole.offsets is not None
    last = window.position(stop - 1) - window.plan.first
    return int(np.searchsorted(whole.offsets, last, side="right"))


def _end(window: Window) -> tuple[int, int]:
    """Return the place behind a window, as marks have it."""
    return window.pass_number, window.first + len(window)


def _at_once() -> None:
    """Wait for nothing."""


def _never() -> bool:
    return False


def _beyond() -> Mark:
    return Mark(sys.maxsize, 0)


def _nowhere() -> Mark:
    return Mark(-1, 0)
