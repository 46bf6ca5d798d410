"""The service in virtual time: permits, shared link, commits, evictions, training loop.

All decisions use the service's own code. `decide` grants permits, `SamplerSlot` chooses the
sampler, `Sizing` sets the size of groups, and `WriteQueue` and `SpaceAllocator` make room. Only
time is simulated. The reads of a group progress together, so a group is complete when its own
reads are, and half of those in flight after it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from growcache.monitor.plan_cache import SimulatedCache
from growcache.monitor.plan_reader import SimulatedReader
from growcache.monitor.plan_scenario import Moment, Run, Scenario
from growcache.sampling.fixed_set import FixedSet
from growcache.sampling.group_queue import IssuedPermit
from growcache.sampling.messages import Permit
from growcache.sampling.rate_limiter import LimiterInputs, Verdict, decide
from growcache.sampling.sampler_pool import AssignedPermit, SamplerSlot, group_memory_bytes
from growcache.sampling.sizing import RAMP_END, SizeEstimate
from growcache.sampling.space_allocator import SpaceAllocator, WriteQueue

COMMIT_SECONDS = 0.04  # messages, sync and transaction of a group
MOST_SHARDS = 192  # of a full cache; more are simulated in bundles
FEWEST_SHARDS = 64  # of a growing cache before shards are simulated in bundles
TURNOVERS = 3.0  # after the cache is full; then nothing changes any more
MOST_EVENTS = 60_000
ALMOST = 1e-6  # of a visit or of seconds, because sums of floats are not exact
SURE_SECONDS = 10 * 365 * 86_400.0  # a cache that is not full by then never is


@dataclass(eq=False, slots=True)
class Filling:
    """A group in progress: read, then encoded, then written."""

    issued: IssuedPermit
    visits: int
    samples: int
    began: float
    wrote_at: float = math.inf
    encoded_at: float = math.inf


@dataclass(slots=True)
class SimulatedSampler:
    slot: SamplerSlot
    reading: deque[Filling] = field(default_factory=deque)
    encoding: list[Filling] = field(default_factory=list)
    # Visits received since the first group in `reading` started, including fractions.
    work: float = 0.0

    def in_flight(self, concurrency: int) -> int:
        left = sum(filling.visits for filling in self.reading) - self.work
        return min(concurrency, max(0, math.ceil(left - 1e-9)))

    def missing(self, concurrency: int) -> float:
        """Return the work until the first group is complete."""
        first = self.reading[0].visits
        behind = sum(filling.visits for filling in self.reading) - first
        return first + min(concurrency - 1, behind) / 2 - self.work


class Simulation:
    def __init__(self, scenario: Scenario) -> None:
        config, self._scenario = scenario.config, scenario
        self._sampling = config.sampling
        self._cache = SimulatedCache(config.cache, scenario.shard_bytes, scenario.catalog_bytes)
        as_cache: Any = self._cache  # it has everything that these need
        self._allocator = SpaceAllocator(
            config.cache, as_cache, evicts=True, clock=lambda: self.now
        )
        no_refetches: Any = self._cache.refetch_queue
        self._queue = WriteQueue(
            as_cache,
            self._allocator,
            no_refetches,
            FixedSet(None, as_cache, no_refetches),
            lambda: self.now,
        )
        self._estimate = SizeEstimate(scenario.sizing, scenario.record_bytes)
        self._memory = group_memory_bytes(config, scenario.memory_bytes)
        self._together = self._groups_together()
        self.samplers = [
            SimulatedSampler(SamplerSlot(number, ready=True))
            for number in range(self._sampling.samplers)
        ]
        self._reader = (
            SimulatedReader(self._cache, scenario.consumption) if scenario.consumption else None
        )
        self.now = 0.0
        self._group = self._shard = 0
        self._issued_parts = 0
        self._visits = 0.0
        self._verdict = Verdict(True)
        self.full_at = self.complete_at = math.inf
        self._drawn_at_full = 0
        # At the horizon, with the draws until then.
        self._ess: tuple[float, float] | None = None
        self._moments: list[Moment] = []

    def _groups_together(self) -> int:
        sizing, shard_bytes = self._scenario.sizing, self._scenario.shard_bytes
        full = shard_bytes.allocated(sizing.shard_samples)
        shards = int(self._scenario.config.cache.max_bytes) / max(1, full)
        return max(1, round(shards / MOST_SHARDS))

    # ------------------------------------------------------------------ the loop

    def run(self) -> Run:
        self.now = self._scenario.startup_seconds
        for _ in range(MOST_EVENTS):
            self._turn()
            self._note()
            if self._is_over():
                break
            following = self._next_event()
            if following == math.inf:
                break
            self._advance(following - self.now)
        ends = self._at_rest or not self._samplers_work
        samples, drawn = self._ess or (self._cache.effective_samples(), self._cache.drawn)
        return Run(
            self._moments,
            self._reader.first_batch_at if self._reader else math.inf,
            self.full_at,
            self.complete_at,
            samples,
            drawn,
            ends or self.complete_at < math.inf,
        )

    @property
    def _samplers_work(self) -> bool:
        return any(one.reading or one.encoding for one in self.samplers)

    def _turn(self) -> None:
        """Do the work of supervisor and loop between two events."""
        for sampler in self.samplers:
            self._finish_reads(sampler)
            self._finish_encoding(sampler)
        if self._reader is not None and self._reader_due() <= self.now + 1e-12:
            self._reader.act(self.now)
        self._grant_writes()
        self._issue()
        self._look_whether_full()

    def _reader_due(self) -> float:
        assert self._reader is not None
        return self._reader.due(self.now, self._population_samples)

    @property
    def _population_samples(self) -> float:
        return self._scenario.parts.total * self._scenario.store.visit_samples

    def _next_event(self) -> float:
        times = [self._read_end(one) for one in self.samplers if one.reading]
        for one in self.samplers:
            times += [min(f.encoded_at, f.wrote_at) for f in one.encoding]
        if self._reader is not None:
            times.append(self._reader_due())
        horizon = self._scenario.horizon_seconds
        if self.now < horizon:
            times.append(horizon)
        return max(self.now, min(times, default=math.inf))

    def _is_over(self) -> bool:
        now, horizon = self.now, self._scenario.horizon_seconds
        if self.complete_at < math.inf:
            return now >= horizon or self._is_reading_steadily
        if self._at_rest:
            return now >= horizon
        if self.full_at < math.inf:
            drawn = self._cache.drawn - self._drawn_at_full
            return drawn >= TURNOVERS * self._cache.live_samples
        return now >= SURE_SECONDS

    @property
    def _at_rest(self) -> bool:
        """Whether nothing is added any more, because nothing is evicted, or a budget is spent."""
        return self._verdict.final and not any(
            filling.wrote_at < math.inf for one in self.samplers for filling in one.encoding
        )

    @property
    def _is_reading_steadily(self) -> bool:
        """Whether training repeats a complete cache, so that simulating further is useless."""
        return self._reader is None or self._reader.passes_since(self.complete_at) > 2

    # ------------------------------------------------------------------ reads

    def _speeds(self) -> list[float]:
        """Return the visits per second of each sampler."""
        store, q = self._scenario.store, self._sampling.concurrency
        most = 1 / store.cpu_seconds if store.cpu_seconds else math.inf
        wanted = [
            min(one.in_flight(q) / store.visit_seconds, most) if one.reading else 0.0
            for one in self.samplers
        ]
        share = min(1.0, self._most_visits / max(1e-12, sum(wanted)))
        return [one * share for one in wanted]

    @property
    def _most_visits(self) -> float:
        """Visits per second that link, budget, processors and disk allow."""
        store, sampling = self._scenario.store, self._sampling
        limits = [store.bytes_per_second / max(1e-9, store.visit_bytes)]
        if sampling.max_bytes_per_second:
            limits.append(int(sampling.max_bytes_per_second) / max(1e-9, store.visit_bytes))
        if store.cpu_seconds:
            busy = min(self._scenario.cores, sampling.workers) + sampling.samplers_elsewhere
            limits.append(busy / store.cpu_seconds)
        written = store.visit_samples * self._scenario.shard_bytes.record
        limits.append(store.disk_bytes_per_second / max(1e-9, written))
        return min(limits)

    def _read_end(self, sampler: SimulatedSampler) -> float:
        speed = self._speeds()[self.samplers.index(sampler)]
        missing = max(0.0, sampler.missing(self._sampling.concurrency))
        earliest = sampler.reading[0].began + self._scenario.store.visit_seconds
        return max(self.now + missing / max(1e-12, speed), earliest)

    def _advance(self, seconds: float) -> None:
        for sampler, speed in zip(self.samplers, self._speeds(), strict=True):
            if sampler.reading:
                there = sum(filling.visits for filling in sampler.reading)
                before = sampler.work
                sampler.work = min(there, before + speed * seconds)
                self._visits += sampler.work - before
        self.now += seconds

    def _finish_reads(self, sampler: SimulatedSampler) -> None:
        q = self._sampling.concurrency
        while sampler.reading and self._is_read(sampler, q):
            done = sampler.reading.popleft()
            sampler.work -= done.visits
            done.encoded_at = self.now + COMMIT_SECONDS
            sampler.encoding.append(done)
            sampler.slot.permits[done.issued.permit.id].done = done.visits
        if not sampler.reading:
            sampler.work = 0.0
        else:
            first = sampler.reading[0]
            assigned = sampler.slot.permits[first.issued.permit.id]
            assigned.done = int(max(0.0, min(first.visits, sampler.work - q / 2)))

    def _is_read(self, sampler: SimulatedSampler, concurrency: int) -> bool:
        earliest = sampler.reading[0].began + self._scenario.store.visit_seconds
        return sampler.missing(concurrency) <= ALMOST and self.now >= earliest - ALMOST

    def _finish_encoding(self, sampler: SimulatedSampler) -> None:
        for filling in list(sampler.encoding):
            issued = filling.issued
            if filling.encoded_at <= self.now:
                filling.encoded_at = math.inf
                issued.need_bytes = self._reserved(filling.samples)
                issued.asked_at = self.now
                sampler.slot.paused.add(issued.permit.id)
            if filling.wrote_at <= self.now:
                sampler.encoding.remove(filling)
                sampler.slot.forget(issued.permit.id)
                del self._queue.permits[issued.permit.id]
                shards = issued.permit.shards
                nbytes = self._cache.commit(
                    issued.permit.id, shards, filling.samples, filling.visits
                )
                self._allocator.filled(nbytes)

    def _reserved(self, samples: int) -> int:
        shards = self._scenario.sizing.group_shards
        return shards * self._scenario.shard_bytes.reserved(-(-samples // shards))

    # ------------------------------------------------------------------ permits

    def _grant_writes(self) -> None:
        granted = set(self._queue.grant())
        if not granted:
            return
        for sampler in self.samplers:
            for filling in sampler.encoding:
                if filling.issued.permit.id in granted:
                    sampler.slot.paused.discard(filling.issued.permit.id)
                    nbytes = filling.samples * self._scenario.shard_bytes.record
                    filling.wrote_at = self.now + nbytes / (
                        self._scenario.store.disk_bytes_per_second
                    )

    def _issue(self) -> None:
        concurrency = self._sampling.concurrency
        while True:
            idle = [
                one for one in self.samplers if one.slot.has_room(concurrency, self._memory)
            ]
            if not idle:
                return
            visits = self._next_visits()
            self._verdict = decide(self._outlook(visits))
            if not self._verdict.granted:
                return
            self._give(min(idle, key=lambda one: one.slot.visits_left), visits)

    @property
    def _groups_as_one(self) -> int:
        """Return the number of groups to simulate together, which grows with the cache."""
        if self._group < RAMP_END:
            return 1
        full = max(1, self._scenario.sizing.shard_samples)
        return min(self._together, max(1, int(self._cache.live_samples / full / FEWEST_SHARDS)))

    def _next_visits(self) -> int:
        """Return the visits of the next group: fewer at the end of a round or a fixed set."""
        sizing, parts = self._scenario.sizing, self._scenario.parts
        wanted = sizing.group_parts(self._group) * self._groups_as_one
        if sizing.max_parts is not None:
            wanted = min(wanted, sizing.max_parts - self._issued_parts)
        if parts.replacement or not math.isfinite(parts.total):
            return wanted
        round_parts = max(1, math.ceil(parts.until_complete))
        within = self._issued_parts % round_parts
        begins_again = self._issued_parts and not within
        if begins_again and not self._cache.evicted_samples:
            return 0
        return int(min(wanted, round_parts - within))

    def _outlook(self, visits: int) -> LimiterInputs:
        cache, sampling = self._cache, self._sampling
        group_bytes = min(self._allocator.capacity, self._estimate.group_bytes(visits))
        promised = sum(f.estimate_bytes for f in self._queue.permits.values() if not f.granted)
        room = cache.bytes_left_for_shards() - promised
        evictable, clearing = 0, 0
        if visits and group_bytes > room:
            evictable, clearing = self._allocator.movable()
        visit_bytes, most = self._scenario.store.visit_bytes, sampling.max_egress
        in_flight = sum(f.visits for one in self.samplers for f in one.reading)
        spent = int(self._visits * visit_bytes)
        return LimiterInputs(
            parts_known=visits > 0,
            complete=not visits and not self._queue.permits,
            egress_bytes=spent,
            max_egress_bytes=None if most is None else int(most),
            egress_in_flight=in_flight * visit_bytes,
            group_egress=visits * visit_bytes,
            group_bytes=group_bytes,
            room_bytes=room,
            evictable_bytes=evictable,
            clearing_bytes=clearing,
            evicts=self._allocator.evicts,
        )

    def _give(self, sampler: SimulatedSampler, visits: int) -> None:
        shards = self._scenario.sizing.group_shards
        numbers = tuple(range(self._shard, self._shard + shards))
        permit = Permit(f"{self._group}", self._group, 0, 0, numbers, ())
        issued = IssuedPermit(permit, self._estimate.group_bytes(visits), fresh=numbers)
        samples = max(1, round(visits * self._scenario.store.visit_samples))
        self._queue.permits[permit.id] = issued
        sampler.slot.permits[permit.id] = AssignedPermit(visits, nbytes=issued.estimate_bytes)
        sampler.reading.append(Filling(issued, visits, samples, self.now))
        self._group += 1
        self._shard += shards
        self._issued_parts += visits

    # ------------------------------------------------------------------------ records

    def _look_whether_full(self) -> None:
        if self.full_at == math.inf and (
            self._allocator.at_bound or self._verdict.state == "full"
        ):
            self.full_at, self._drawn_at_full = self.now, self._cache.drawn
        if self._verdict.state == "complete" and self.complete_at == math.inf:
            self.complete_at = self.now

    def _note(self) -> None:
        cache, reader = self._cache, self._reader
        if self._ess is None and self.now >= self._scenario.horizon_seconds:
            self._ess = cache.effective_samples(), cache.drawn
        self._moments.append(
            Moment(
                self.now,
                cache.live_samples,
                cache.bytes_used,
                cache.drawn,
                cache.drawn_parts,
                cache.evicted_samples,
                reader.delivered(self.now) if reader else 0.0,
                self._visits * self._scenario.store.visit_bytes,
                self._visits,
                reader.waited_seconds(self.now) if reader else 0.0,
            )
        )


def simulate(scenario: Scenario) -> Run:
    return Simulation(scenario).run()
