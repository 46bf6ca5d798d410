"""Issue permits: choose the next group to fill, and its content."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from growcache.cache.cache import Cache
from growcache.cache.side_files import Identity
from growcache.cache.system import memory_bytes
from growcache.config import Config
from growcache.errors import CacheFullError
from growcache.sampling.byte_budget import ByteBudget, EgressEstimate
from growcache.sampling.draw_sequence import DrawSequence
from growcache.sampling.draws import GroupDraw
from growcache.sampling.failed_visits import HoleCounter, Makeups, object_name
from growcache.sampling.fixed_set import FixedSet
from growcache.sampling.group_queue import GroupQueue, IssuedPermit, Refetch, RefetchScheduler
from growcache.sampling.messages import PartVisit, Permit, stored_bytes
from growcache.sampling.objects import Objects
from growcache.sampling.rate_limiter import (
    DISK_EVENT,
    CircuitBreaker,
    LimiterInputs,
    Verdict,
    decide,
)
from growcache.sampling.sizing import SizeEstimate, Sizing, takes_some_samples
from growcache.sampling.space_allocator import FULL_FOR_GOOD, SpaceAllocator, WriteQueue
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry


@dataclass(frozen=True, slots=True)
class RunLimits:
    until_full: bool = False
    duration_seconds: float | None = None
    samples: int | None = None


class PermitIssuer:
    """Issues permits. `Dispatcher` passes them to samplers, and handles their reports."""

    def __init__(
        self,
        config: Config,
        cache: Cache,
        catalog: Catalog,
        objects: Objects,
        identity: Identity,
        sizing: Sizing,
        limits: RunLimits,
        budget: ByteBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._cache = cache
        self._catalog = catalog
        self._ragged = identity.schema.is_ragged
        self._limit_bytes = int(identity.sizes.get("group_limit_bytes") or 0)
        self._memory_bytes = memory_bytes()
        self._sizing = sizing
        self._limits = limits
        self._run = uuid.uuid4().hex[:8]
        self._clock = clock
        self.space = SpaceAllocator(
            config.cache, cache, evicts=not limits.until_full, clock=clock
        )
        self.draws = DrawSequence(config, cache, catalog, objects, sizing)
        next_new = cache.meta.issued + 1
        unfinished = cache.unfinished(next_new, sizing.group_shards)
        self.queue = GroupQueue(next_new, unfinished)
        most = config.cache.max_samples if sizing.tops_up else None
        self._fixed_set = FixedSet(most, cache, self.queue)
        self._refetches = RefetchScheduler(
            cache,
            catalog,
            self.draws,
            self.queue,
            sizing.group_shards,
            in_order=most is not None,
        )
        self.makeups = Makeups(
            cache, self.draws, sizing, unfinished, config.sampling.timeout_seconds
        )
        self.writes = WriteQueue(cache, self.space, self._refetches, self._fixed_set, clock)
        self._objects = objects
        last_drawn = cache.meta.deferrals.last_drawn(next_new)
        last = self.draws.again(last_drawn) if last_drawn >= 0 else None
        self.round = last.round if last is not None else 0
        self._drawn_before = cache.totals().drawn
        self._forecast = SizeEstimate(sizing, identity.sizes["record_bytes"])
        self._skipped = HoleCounter()
        self.hole_kinds: Counter[str] = Counter()  # of holes that were committed in this run
        self.breaker = CircuitBreaker()
        self.failures = 0
        self.last_error = self._retry_event = ""
        self._budget = budget or ByteBudget()
        self._egress = EgressEstimate(self._budget)
        self.verdict = Verdict(False, "waiting", "the first samplers to start", reason="start")

    def next_permit(self) -> Permit | None:
        now = self._clock()
        refetch = self._refetches.next(now)
        if refetch is not None:
            return self._grant_refetch(refetch)
        group = self.queue.due(now)
        draw = self.draws.again(group) if group is not None else self._next_group()
        self.verdict = decide(self._outlook(draw))
        if not self.verdict.granted or draw is None or not self._issue(draw):
            return None
        fresh = self._shards_of(draw.group)
        if group is not None:
            fresh = tuple(self._cache.never_committed(fresh))
        return self._grant(draw, self.queue.start(draw.group), fresh, fresh)

    def _grant_refetch(self, refetch: Refetch) -> Permit | None:
        draw, share = refetch.draw, len(refetch.write) / refetch.shards
        outlook = self._outlook(draw, share=share, for_refetch=True)
        self.verdict = decide(outlook)
        if outlook.group_bytes > outlook.room_bytes and not self.space.evicts_for_refetches:
            self._refetches.refuse(draw.group, FULL_FOR_GOOD)
            return None
        if not self.verdict.granted or not self._issue(draw):
            return None
        tries = self.queue.start(draw.group, again=refetch.again)
        return self._grant(draw, tries, refetch.write, refetch.missing)

    def _issue(self, draw: GroupDraw) -> bool:
        """Record the number of a new group; return False if the disk has no room for that."""
        if draw.group < self.queue.next_new:
            return True
        try:
            self.makeups.record(draw)
            self._cache.meta.issue(draw.group)
        except CacheFullError as error:
            self.verdict = Verdict(False, "waiting", f"{DISK_EVENT}: {error}", reason="disk")
            return False
        if draw.group not in self._cache.meta.deferrals.makeups:
            self.round = draw.round
        return True

    def _shards_of(self, group: int) -> tuple[int, ...]:
        first = group * self._sizing.group_shards
        return tuple(range(first, first + self._sizing.group_shards))

    def _grant(
        self, draw: GroupDraw, tries: int, write: tuple[int, ...], fresh: tuple[int, ...]
    ) -> Permit:
        record = self._cache.meta.deferrals
        made_up = record.makeups.get(draw.group) or ()
        visits = self.draws.population.visits(draw)
        if made_up:
            visits = tuple(
                replace(visit, renewed=True) if record.renews(first, draw.group) else visit
                for visit, first in zip(visits, made_up, strict=True)
            )
        defers = len(fresh) == self._sizing.group_shards and self._may_set_aside(draw.group)
        left_out = self.makeups.left_out(draw.group, visits, defers=defers)
        permit = Permit(
            id=f"{self._run}-{draw.group:08d}-{tries}-{uuid.uuid4().hex[:4]}",
            group=draw.group,
            edition=draw.edition,
            round=draw.round,
            shards=self._shards_of(draw.group),
            visits=visits,
            take=self._sizing.samples_per_object
            if takes_some_samples(self._config.sampling)
            else None,
            editions=tuple(e.values for e in self._cache.meta.editions[: draw.edition + 1]),
            write=write,
            left_out=left_out,
            defers=defers,
            makeups=record.before(draw.group),
            made_up=tuple((*first, int(record.renews(first, draw.group))) for first in made_up),
            others=self._others(visits, left_out) if defers else (),
            purged=self._purged_places(visits),
        )
        estimate = int(self._estimate(len(draw.parts)) * len(write) / len(permit.shards))
        self.writes.permits[permit.id] = IssuedPermit(permit, estimate, fresh=fresh)
        self.breaker.granted(permit.id)
        self._egress.listed_bytes = sum(map(stored_bytes, visits)) / len(visits)
        return permit

    def _may_set_aside(self, group: int) -> bool:
        return self.makeups.may_defer or group in self._cache.meta.deferrals.makeups

    def _others(
        self, visits: Sequence[PartVisit], left_out: Sequence[int]
    ) -> tuple[Entry, ...]:
        """Return a few objects for probing the store, if all visits are to one object."""
        skipped = set(left_out)
        visited = {object_name(s) for place, s in enumerate(visits) if place not in skipped}
        if len(visited) != 1:
            return ()
        sources = range(len(self._config.sources))
        near = [self._objects.visits(self._objects.numbers(n, 0, 2)) for n in sources]
        is_purged = self._cache.purger.is_visit_purged
        others = (s for some in near for s in some if not is_purged(s.keys))
        return tuple(s.entry for s in others if object_name(s) not in visited)

    def _purged_places(self, visits: Sequence[PartVisit]) -> tuple[int, ...]:
        # Checking each visit takes a twentieth of this process's time.
        if not self._cache.purger.list:
            return ()
        is_purged = self._cache.purger.is_visit_purged
        return tuple(place for place, visit in enumerate(visits) if is_purged(visit.keys))

    def _next_group(self) -> GroupDraw | None:
        group = self.queue.next_new
        return (
            self.makeups.next(group) or self._next_draw() or self.makeups.next(group, idle=True)
        )

    def _next_draw(self) -> GroupDraw | None:
        draw = self.draws.next(self.queue.next_new, self.round)
        return draw if draw is not None and self._may_begin(draw) else None

    def _may_begin(self, draw: GroupDraw) -> bool:
        """Whether a group may start. A round starts after the last one cannot grow."""
        if self.draws.replacement or draw.round == self.round:
            return True
        return self._catalog.complete and not self._kept_everything

    @property
    def _kept_everything(self) -> bool:
        totals = self._cache.totals()
        return not totals.evicted_shards and not totals.lost_shards

    @property
    def complete(self) -> bool:
        """Whether everything that the cache may hold is cached."""
        if self._fixed_set.is_whole:
            return True
        if not self.queue.settled or self.makeups.missing or not self._listed_and_known:
            return False
        draw = self.draws.next(self.queue.next_new, self.round)
        if draw is None:
            return True
        ended = not self.draws.replacement and draw.round != self.round
        return ended and self._kept_everything

    @property
    def _listed_and_known(self) -> bool:
        return self._catalog.complete and self.draws.up_to_date

    @property
    def only_set_aside(self) -> bool:
        """Whether every missing part failed again after it was set aside."""
        if self.writes.permits or not self.makeups.missing or not self.makeups.tried:
            return False
        known = self.queue.only_set_aside and self._listed_and_known
        return known and self._next_draw() is None

    def _outlook(
        self, draw: GroupDraw | None, *, share: float = 1.0, for_refetch: bool = False
    ) -> LimiterInputs:
        sampling, cache = self._config.sampling, self._cache
        group_bytes = int(share * self._estimate(len(draw.parts))) if draw is not None else 0
        promised = sum(f.estimate_bytes for f in self.writes.permits.values() if not f.granted)
        room = cache.bytes_left_for_shards() - promised
        evictable, clearing, unused = 0, 0, ""
        if draw is not None and group_bytes > room:
            evictable, clearing = self.space.movable(for_refetch=for_refetch)
            unused = self.space.unused()
        samples = sum(
            len(f.permit.visits) * self._sizing.samples_per_object
            for f in self.writes.permits.values()
            if f.fresh
        )
        left = sum(len(f.permit.visits) - f.visited for f in self.writes.permits.values())
        now = self._clock()
        return LimiterInputs(
            refused=self.breaker.waiting_for if self.breaker.is_open(now) else "",
            parts_known=draw is not None,
            listing_complete=self._catalog.complete,
            needs_whole_listing=self.draws.needs_whole_listing,
            complete=self.complete if draw is None or self._fixed_set.is_whole else False,
            retrying=self.queue.failing if self.queue.due(now) is None else 0,
            max_retrying=2 * sampling.samplers,
            last_error=self.last_error,
            retry_event=self._retry_event,
            drawn_samples=0 if for_refetch else self.drawn_this_run + samples,
            max_drawn_samples=self._limits.samples,
            set_samples=self._fixed_set.expected(
                self.writes.permits.values(), self._sizing.samples_per_object
            ),
            max_set_samples=self._fixed_set.most
            if draw is not None and draw.group >= self.queue.next_new
            else None,
            egress_bytes=self._budget.spent,
            max_egress_bytes=self._budget.most,
            egress_spent=self._budget.is_spent,
            egress_in_flight=self._egress.of_visits(left),
            group_egress=self._egress.of_visits(0 if draw is None else len(draw.parts)),
            index_ok=cache.index_writer.ok,
            disk_ok=cache.free_disk_ok(),
            group_bytes=group_bytes,
            room_bytes=room,
            evictable_bytes=evictable,
            clearing_bytes=clearing,
            unused=unused,
            listing_bytes=cache.space.listing_ahead,
            evicts=self.space.evicts,
            shrinking=cache.shrinking,
            for_refetch=for_refetch,
            holders=self.space.awaited_for_refetch() if for_refetch else "",
            refetches=0 if for_refetch else self.queue.urgent,
            refetches_unlisted=self._refetches.listing_awaited,
            set_aside=self.makeups.words if self.queue.only_set_aside else "",
        )

    def _estimate(self, parts: int) -> int:
        # A larger request than the room would wait forever, so the exact size decides.
        most = self.space.capacity - self._cache.space.listing_ahead
        return max(0, min(most, self._forecast.group_bytes(parts)))

    @property
    def drawn_this_run(self) -> int:
        return self._cache.totals().drawn - self._drawn_before
