"""What is walked next: a snapshot of the cache is taken and planned, and its windows opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from growcache.errors import CacheError, ConfigError
from growcache.loading.following import Company
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import Window, visiting_order, window_samples
from growcache.loading.reuse import Watch
from growcache.loading.service_news import tell_if_stopped
from growcache.loading.snapshot import Snapshot
from growcache.loading.state import PassPlan, PlannedShard, Rest
from growcache.loading.stopping import StoppedError
from growcache.loading.waiting import wait_for_samples
from growcache.loading.windows import OpenWindow, open_window


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


class Opener:
    """Opens one pass after the other; used by one thread at a time, but for `window`.

    Args:
        options: of the loader.
        ranks: the others that walk the same passes.
        watch: over waits for samples that were not used too often.
        stop: set when no more is wanted, together with ``wake``.
        wake: ends waits for samples early.

    Attributes:
        waited: seconds for samples, the last time.
    """

    def __init__(
        self,
        options: LoaderOptions,
        ranks: Company,
        watch: Watch,
        stop: threading.Event,
        wake: threading.Event,
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._watch = watch
        self._stop = stop
        self._wake = wake
        self._fixed_numbers: tuple[int, ...] | None = None
        self._known = False  # whether a snapshot was taken
        self.waited = 0.0

    def open(self, number: int, min_samples: int) -> OpenPass:
        """Open a pass over what the cache holds, once that is enough.

        Args:
            number: of the pass.
            min_samples: to wait for, at least a batch.

        Raises:
            StoppedError: the walk was asked to end.
            ConfigError: a batch is more than there will be.
        """
        began = time.monotonic()
        while True:
            snapshot = self._take(number, min_samples)
            waited = time.monotonic() - began
            plan = plan_snapshot(self._options, snapshot, number)
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

    def resume(self, found: Callable[[], tuple[Snapshot, Rest] | None]) -> OpenPass:
        """Open the rest of a pass that was begun elsewhere.

        Raises:
            StoppedError: there is none, for the walk was asked to end.
        """
        began = time.monotonic()
        rested = found()
        if rested is None:
            raise StoppedError
        snapshot, rest = rested
        waited = time.monotonic() - began
        if self._options.fixed:
            self._fixed_numbers = tuple(sorted(shard.number for shard in rest.plan.shards))
        unreadable = frozenset(rest.mark.corrupt)
        start = rest.mark.position
        return self._begun(
            OpenPass(snapshot, rest.plan, rest.windows, start, unreadable, waited)
        )

    def _begun(self, begun: OpenPass) -> OpenPass:
        try:
            index = next(w.index for w in begun.windows if begun.start < w.first + len(w))
            begun.first = self.window(begun, begun.windows[index])
        except BaseException:
            begun.snapshot.close()
            raise
        return begun

    def _take(self, number: int, min_samples: int) -> Snapshot:
        options, ranks = self._options, self._ranks
        began = time.monotonic()
        view = wait_for_samples(
            options.root,
            max(min_samples, options.least_samples),
            complete=options.fixed,
            wake=self._wake,
            stopped=lambda: self._stop.is_set() or ranks.offers(number),
            known=self._known,
        )
        self.waited = time.monotonic() - began
        if self._stop.is_set():
            raise StoppedError
        tell_if_stopped(options.root, view)
        if view.totals.samples < options.least_samples and not ranks.offers(number):
            raise ConfigError(
                f"all {view.totals.samples} samples of {options.root} are less than one batch "
                f"of {options.least_samples}; use a smaller batch_size or drop_last=False"
            )
        snapshot = ranks.take(number, self._watch, view)
        if snapshot is None:
            raise StoppedError
        self._known = True
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

    def window(self, begun: OpenPass, plan: Window) -> OpenWindow:
        """Open a window of a pass."""
        return open_window(
            self._options,
            begun.snapshot,
            plan,
            start=begun.start,
            unreadable=begun.unreadable,
            stopped=self._stop.is_set,
        )


def plan_snapshot(options: LoaderOptions, snapshot: Snapshot, number: int) -> PassPlan:
    """Return the plan of the pass of that number over all of a snapshot."""
    order = visiting_order(
        [(row.number, row.samples) for row in snapshot.shards],
        seed=options.seed,
        pass_number=number,
        shuffle=options.shuffles,
    )
    digests = {row.number: row.digest for row in snapshot.shards}
    shards = tuple(PlannedShard(n, samples, digests[n]) for n, samples in order)
    shard_samples = len(snapshot) / max(1, len(shards))
    return PassPlan(number, shards, window_samples(snapshot.sample_bytes, shard_samples))
