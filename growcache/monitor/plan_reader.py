"""A training loop in virtual time: passes over snapshots, as in `growcache.loading`.

A snapshot holds its shards from before the end of the previous pass until the next pass has
started, because they stay mapped. A shard is used when its window starts.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from growcache.loading.passes import MARGIN, MOST_SLACK_SECONDS, SLACK_SECONDS, SLACK_SHARE
from growcache.loading.plan import cut_windows, shard_order, window_samples
from growcache.monitor.plan_cache import SimulatedCache, SimulatedLease

OPEN_SECONDS = 0.1  # of a first snapshot: read the index, map, verify, gather a block
PREPARE_SECONDS = 0.02  # of a next one
POLL_SECONDS = 0.05  # half of the time between two polls of the leases
MOST_WINDOWS = 16  # of a pass, whose number only affects when uses are counted
PASSES_TOGETHER = 24  # passes while the cache doubles; more are simulated together


@dataclass(frozen=True, slots=True)
class Consumption:
    samples_per_second: float
    min_samples: int
    sample_bytes: int
    seed: int = 0
    max_reuse: int | None = None
    waits: bool = False  # if everything was used this often


class SimulatedReader:
    """A reader that acts at `due`. Each act is one window, snapshot or pass."""

    def __init__(self, cache: SimulatedCache, loop: Consumption) -> None:
        self._cache = cache
        self._loop = loop
        self._lease: SimulatedLease | None = None
        self._next: tuple[SimulatedLease, list[tuple[int, int]]] | None = None
        self._closing: list[tuple[float, SimulatedLease]] = []
        self._windows: list[tuple[float, tuple[int, ...]]] = []  # with their starts
        self._snapshot_at = self._end = math.inf
        self._pass = -1
        self._began = 0.0
        self._begins: deque[float] = deque(maxlen=4)
        self._samples = 0  # of the pass
        self._repeats = 1  # passes over the same snapshot that are simulated together
        self._delivered = 0.0  # in earlier passes
        self._waits_since: float | None = None
        self.first_batch_at = math.inf
        self._waited = 0.0  # in finished waits

    def due(self, now: float, population: float) -> float:
        """Return the time of the next act, or infinity if it waits for samples."""
        times = [self._end, self._snapshot_at]
        times += [at for at, _ in self._windows[:1]] + [at for at, _ in self._closing[:1]]
        if self._wants_samples and self._has_enough(population):
            times.append(now)
        return min(times)

    @property
    def _wants_samples(self) -> bool:
        return self._lease is None

    def _has_enough(self, population: float) -> bool:
        if self.first_batch_at < math.inf:
            return bool(self._fresh())
        wanted = min(self._loop.min_samples, max(1, int(min(population, 1e18))))
        return self._cache.live_samples >= wanted

    def passes_since(self, at: float) -> int:
        """Return the number of passes that started after a time."""
        return sum(began > at for began in self._begins)

    def waited_seconds(self, now: float) -> float:
        since = now if self._waits_since is None else self._waits_since
        return self._waited + now - since

    def delivered(self, now: float) -> float:
        if self._lease is None:
            return self._delivered
        since = max(0.0, min(now, self._end) - self._began)
        return self._delivered + since * self._loop.samples_per_second

    def act(self, now: float) -> None:
        while self._closing and self._closing[0][0] <= now:
            self._cache.close_lease(self._closing.pop(0)[1])
        if self._lease is None:
            self._begin_waited(now)
            return
        while self._windows and self._windows[0][0] <= now:
            self._cache.use(self._windows.pop(0)[1], self._repeats)
        if now >= self._snapshot_at:
            self._snapshot_at = math.inf
            self._next = self._take(now)
        if now >= self._end:
            self._turn(now)

    def _begin_waited(self, now: float) -> None:
        taken = self._take(now)
        if taken is None:
            return
        if self._waits_since is not None:
            self._waited += now - self._waits_since
            self._waits_since = None
        if self.first_batch_at == math.inf:
            now += OPEN_SECONDS
            self.first_batch_at = now
        self._begin(now, *taken)

    def _turn(self, now: float) -> None:
        assert self._lease is not None
        self._delivered += self._samples * self._repeats
        closing, self._lease = self._lease, None
        following, self._next = self._next or self._take(now), None
        if following is None:  # `on_max_reuse: wait` releases everything
            self._cache.close_lease(closing)
            self._waits_since, self._end = now, math.inf
            return
        self._closing.append((now + POLL_SECONDS, closing))
        self._begin(now, *following)

    def _fresh(self) -> list[tuple[int, int]]:
        """Return the shards of the next snapshot, with their samples."""
        loop, live = self._loop, self._cache.live
        if loop.max_reuse is None:
            return [(shard.number, shard.samples) for shard in live.values()]
        uses = self._cache.uses
        fresh = [
            (s.number, s.samples) for s in live.values() if uses[s.number] < loop.max_reuse
        ]
        if fresh or loop.waits:
            return fresh
        return [(shard.number, shard.samples) for shard in live.values()]

    def _take(self, now: float) -> tuple[SimulatedLease, list[tuple[int, int]]] | None:
        shards = self._fresh()
        if not shards:
            return None
        return self._cache.take_lease([n for n, _ in shards], f"{now:.6f}"), shards

    def _begin(self, now: float, lease: SimulatedLease, shards: list[tuple[int, int]]) -> None:
        rate = self._loop.samples_per_second
        self._pass += 1
        self._lease, self._began = lease, now
        self._begins.append(now)
        self._samples = sum(samples for _, samples in shards)
        self._repeats = self._passes_together(self._samples)
        seconds = self._samples * self._repeats / rate
        self._end = now + seconds
        self._windows = [
            (now + first * self._repeats / rate, numbers)
            for first, numbers in self._cut(shards, self._samples)
        ]
        slack = max(min(SLACK_SHARE * seconds, MOST_SLACK_SECONDS), SLACK_SECONDS)
        last = self._windows[-1][0]
        self._snapshot_at = max(last, self._end - slack - MARGIN * PREPARE_SECONDS)

    def _cut(
        self, shards: list[tuple[int, int]], samples: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        seed, target = (
            self._loop.seed,
            window_samples(self._loop.sample_bytes, samples / len(shards)),
        )
        order = shard_order(shards, seed=seed, pass_number=self._pass)
        target = max(target, -(-samples // MOST_WINDOWS))
        windows = cut_windows(order, seed=seed, pass_number=self._pass, target_samples=target)
        return [(window.first, window.numbers) for window in windows]

    def _passes_together(self, samples: int) -> int:
        """Return how many passes to simulate together, so that a slow link needs no million."""
        if self._loop.max_reuse is not None or not self._cache.drawn or not self._began:
            return 1
        doubling = samples / max(1e-9, self._cache.drawn / self._began)
        each = samples / self._loop.samples_per_second
        return max(1, min(int(doubling / each / PASSES_TOGETHER), int(self._began / each)))
