"""Permits out, reports in: which sampler fills which group.

The decisions are pure functions elsewhere (`rate_limiter.decide`, `eviction.choose`). This module gathers what they
need and does what they say.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from growcache.cache.cache import Cache
from growcache.cache.side_files import Identity
from growcache.cache.sidecar import Sidecar
from growcache.cache.status import SetAsideStatus
from growcache.config import Config
from growcache.errors import CacheFullError, SamplingError
from growcache.sampling.draw_sequence import DrawSequence
from growcache.sampling.draws import GroupDraw
from growcache.sampling.evictor import SpaceAllocator
from growcache.sampling.failed_visits import (
    HoleCounter,
    Makeups,
    has_new_version,
    object_name,
    retry_holes,
)
from growcache.sampling.group_queue import NO_ROOM, GroupQueue, Refetch, RefetchQueue
from growcache.sampling.messages import PartVisit, Permit
from growcache.sampling.objects import Objects
from growcache.sampling.population import Population
from growcache.sampling.rate_limiter import (
    LISTING_FIRST,
    CircuitBreaker,
    LimiterInputs,
    Verdict,
    decide,
)
from growcache.sampling.sizing import (
    LIMIT_OF_EXPECTED,
    RAMP_END,
    SizeEstimate,
    Sizing,
    check_bound,
    takes_some_samples,
)
from growcache.sampling.worker_pool import MOST_SUSPICION, SamplerDeath, crash_suspects
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from growcache.usercode import printable, short_key

FULL_FOR_GOOD = (
    "the cache is full, and with cache.eviction none no shard makes room for another"
)
IN_TURN_SECONDS = 5.0  # that a finished group waits for an earlier one


@dataclass(slots=True)
class IssuedPermit:
    """A permit that is out.

    Attributes:
        fresh: its shards that were never committed.
    """

    permit: Permit
    estimate_bytes: int
    need_bytes: int | None = None
    granted: bool = False
    asked_at: float = 0.0
    awaited_since: float = math.inf
    fresh: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunLimits:
    """When a run ends by itself.

    Attributes:
        until_full: when the cache is full or complete.
        duration_seconds: after so long.
        samples: after so many were drawn.
    """

    until_full: bool = False
    duration_seconds: float | None = None
    samples: int | None = None


class Dispatcher:
    """Everything between a sampler with room for work and a committed shard.

    Args:
        cache: the open cache; this object and the supervisor are its only users.
    """

    def __init__(
        self,
        config: Config,
        cache: Cache,
        catalog: Catalog,
        objects: Objects,
        identity: Identity,
        sizing: Sizing,
        limits: RunLimits,
    ) -> None:
        self._config = config
        self._cache = cache
        self._catalog = catalog
        self._ragged = identity.schema.is_ragged
        self._limit_bytes = int(identity.sizes.get("group_limit_bytes") or 0)
        self._sizing = sizing
        self._limits = limits
        self._run = uuid.uuid4().hex[:8]
        self.landlord = SpaceAllocator(config.cache, cache, evicts=not limits.until_full)
        self._drawing = DrawSequence(config, cache, catalog, objects, sizing)
        next_new = cache.meta.issued + 1
        unfinished = cache.unfinished(next_new, sizing.group_shards)
        self._book = GroupQueue(next_new, unfinished)
        self._wished = RefetchQueue(
            cache, catalog, self._drawing, self._book, sizing.group_shards
        )
        self._makeups = Makeups(
            cache, self._drawing, sizing, unfinished, config.sampling.timeout_seconds
        )
        self._objects = objects
        last_drawn = cache.meta.deferrals.last_drawn(next_new)
        last = self._drawing.again(last_drawn) if last_drawn >= 0 else None
        self._round = last.round if last is not None else 0
        self._drawn_before = cache.totals().drawn
        self._forecast = SizeEstimate(sizing, identity.sizes["record_bytes"])
        self._skipped = HoleCounter()
        self._halt = CircuitBreaker()
        self.flights: dict[str, IssuedPermit] = {}
        self.failures = 0
        self.last_error = self._retry_event = ""
        self.egress_bytes = 0
        self.short_of_disk = False
        self.blocked = ""  # why finished groups cannot be written, in words
        self.verdict = Verdict(False, "waiting", "the first samplers to start")

    # ----------------------------------------------------------------- permits

    def next_permit(self) -> Permit | None:
        """Return the next permit, if one may be given now; `verdict` says why not."""
        now = time.monotonic()
        wish = self._wished.next(now)
        if wish is not None:
            return self._grant_wish(wish)
        group = self._book.due(now)
        draw = self._drawing.again(group) if group is not None else self._next_group()
        self.verdict = decide(self._outlook(draw))
        if not self.verdict.granted or draw is None or not self._issue(draw):
            return None
        fresh = self._shards_of(draw.group)
        if group is not None:
            fresh = tuple(self._cache.never_committed(fresh))
        return self._take_off(draw, self._book.start(draw.group), fresh, fresh)

    def _grant_wish(self, wish: Refetch) -> Permit | None:
        draw, share = wish.draw, len(wish.write) / wish.shards
        outlook = self._outlook(draw, share=share, wished=True)
        self.verdict = decide(outlook)
        if outlook.group_bytes > outlook.room_bytes and not self.landlord.evicts_for_wishes:
            self._wished.refuse(draw.group, FULL_FOR_GOOD)
            return None
        if not self.verdict.granted or not self._issue(draw):
            return None
        tries = self._book.start(draw.group, again=wish.again)
        return self._take_off(draw, tries, wish.write, wish.missing)

    def _issue(self, draw: GroupDraw) -> bool:
        """Note that the group is issued, unless it was before; False where that cannot be."""
        if draw.group < self._book.next_new:
            return True
        try:
            self._makeups.record(draw)
            self._cache.meta.issue(draw.group)
        except CacheFullError as error:
            self.verdict = Verdict(False, "waiting", f"free space on the disk: {error}")
            return False
        if draw.group not in self._cache.meta.deferrals.makeups:
            self._round = draw.round
        return True

    def _shards_of(self, group: int) -> tuple[int, ...]:
        first = group * self._sizing.group_shards
        return tuple(range(first, first + self._sizing.group_shards))

    def _take_off(
        self, draw: GroupDraw, tries: int, write: tuple[int, ...], fresh: tuple[int, ...]
    ) -> Permit:
        record = self._cache.meta.deferrals
        made_up = record.makeups.get(draw.group) or ()
        stops = self._drawing.population.stops(draw)
        if made_up:
            stops = tuple(
                replace(stop, renewed=True) if record.renews(first, draw.group) else stop
                for stop, first in zip(stops, made_up, strict=True)
            )
        defers = len(fresh) == self._sizing.group_shards and self._may_set_aside(draw.group)
        left_out = self._makeups.left_out(draw.group, stops, defers=defers)
        permit = Permit(
            id=f"{self._run}-{draw.group:08d}-{tries}-{uuid.uuid4().hex[:4]}",
            group=draw.group,
            edition=draw.edition,
            round=draw.round,
            shards=self._shards_of(draw.group),
            stops=stops,
            take=self._sizing.samples_per_object
            if takes_some_samples(self._config.sampling)
            else None,
            editions=tuple(e.values for e in self._cache.meta.editions[: draw.edition + 1]),
            write=write,
            left_out=left_out,
            defers=defers,
            makeups=record.before(draw.group),
            made_up=tuple((*first, int(record.renews(first, draw.group))) for first in made_up),
            others=self._others(stops, left_out) if defers else (),
        )
        estimate = int(self._estimate(len(draw.parts)) * len(write) / len(permit.shards))
        self.flights[permit.id] = IssuedPermit(permit, estimate, fresh=fresh)
        self._halt.took_off(permit.id)
        return permit

    def _may_set_aside(self, group: int) -> bool:
        """Whether visits of a group, of which nothing was ever committed, may be set aside."""
        return self._makeups.may_defer or group in self._cache.meta.deferrals.makeups

    def _others(self, stops: Sequence[PartVisit], left_out: Sequence[int]) -> tuple[Entry, ...]:
        """Return a few objects of the source, where all visits are to one of them."""
        skipped = set(left_out)
        visited = {object_name(s) for place, s in enumerate(stops) if place not in skipped}
        if len(visited) != 1:
            return ()
        sources = range(len(self._config.sources))
        near = [self._objects.stops(self._objects.numbers(n, 0, 2)) for n in sources]
        return tuple(s.entry for some in near for s in some if object_name(s) not in visited)

    def _next_group(self) -> GroupDraw | None:
        group = self._book.next_new
        return (
            self._makeups.next(group)
            or self._next_draw()
            or self._makeups.next(group, idle=True)
        )

    def _next_draw(self) -> GroupDraw | None:
        draw = self._drawing.next(self._book.next_new, self._round)
        return draw if draw is not None and self._may_begin(draw) else None

    def _may_begin(self, draw: GroupDraw) -> bool:
        """Whether the draw's round may begin: not while the last one may still grow."""
        if self._drawing.replacement or draw.round == self._round:
            return True
        return self._catalog.complete and not self._kept_everything

    @property
    def _kept_everything(self) -> bool:
        """Whether nothing that was drawn has ever left the cache."""
        totals = self._cache.totals()
        return not totals.evicted_shards and not totals.lost_shards

    @property
    def complete(self) -> bool:
        """Whether all that shall be cached is; then nothing more is drawn."""
        if not self._book.settled or self._makeups.missing or not self._listed_and_known:
            return False
        draw = self._drawing.next(self._book.next_new, self._round)
        if draw is None:
            return True
        ended = not self._drawing.replacement and draw.round != self._round
        return ended and self._kept_everything

    @property
    def _listed_and_known(self) -> bool:
        return self._catalog.complete and self._drawing.up_to_date

    @property
    def only_set_aside(self) -> bool:
        """Whether all that is left to be cached failed again after it was set aside."""
        if self.flights or not self._makeups.missing or not self._makeups.tried:
            return False
        known = self._book.only_set_aside and self._listed_and_known
        return known and self._next_draw() is None

    @property
    def set_aside(self) -> SetAsideStatus:
        """What keeps failing while the rest of the store answers."""
        return self._makeups.status

    def follow_wishes(self) -> list[str]:
        """Take up what readers wish for; return permits that nobody waits for any more."""
        self._wished.follow(self._forecast.shard_bytes, self.landlord.capacity)
        vain = [
            id_
            for id_, flight in self.flights.items()
            if flight.need_bytes is not None
            and not (flight.granted or flight.fresh or self._is_wished(flight))
        ]
        for id_ in vain:
            group = self.flights.pop(id_).permit.group
            self._book.done(group)
        return vain

    @property
    def wishes(self) -> int:
        """How many shards readers wish for that are to be drawn again."""
        return len(self._cache.remover.wishlist.pending)

    @property
    def wish_due(self) -> bool:
        """Whether a wish waits for a sampler."""
        return self._book.due_wish(time.monotonic()) is not None

    def _is_wished(self, flight: IssuedPermit) -> bool:
        return bool(self._wished.of(flight.permit.written))

    def _outlook(
        self, draw: GroupDraw | None, *, share: float = 1.0, wished: bool = False
    ) -> LimiterInputs:
        sampling, cache = self._config.sampling, self._cache
        group_bytes = int(share * self._estimate(len(draw.parts))) if draw is not None else 0
        promised = sum(f.estimate_bytes for f in self.flights.values() if not f.granted)
        room = cache.room_for_shards() - promised
        evictable, clearing, unused = 0, 0, ""
        if draw is not None and group_bytes > room:
            evictable, clearing = self.landlord.movable(wished=wished)
            unused = self.landlord.unused()
        samples = sum(
            len(f.permit.stops) * self._sizing.samples_per_object
            for f in self.flights.values()
            if f.fresh
        )
        now = time.monotonic()
        return LimiterInputs(
            refused=self._halt.waiting_for if self._halt.holds_back(now) else "",
            parts_known=draw is not None,
            listing_complete=self._catalog.complete,
            needs_whole_listing=self._drawing.needs_whole_listing,
            complete=self.complete if draw is None else False,
            retrying=self._book.failing if self._book.due(now) is None else 0,
            max_retrying=2 * sampling.workers,
            last_error=self.last_error,
            retry_event=self._retry_event,
            drawn_samples=0 if wished else self.drawn_this_run + samples,
            max_drawn_samples=self._limits.samples,
            egress_bytes=self.egress_bytes,
            max_egress_bytes=sampling.max_egress,
            index_ok=cache.index.ok,
            disk_ok=cache.free_disk_ok(),
            group_bytes=group_bytes,
            room_bytes=room,
            evictable_bytes=evictable,
            clearing_bytes=clearing,
            unused=unused,
            listing_bytes=cache.space.listing_ahead,
            evicts=self.landlord.evicts,
            shrinking=cache.shrinking,
            wished=wished,
            holders=self.landlord.awaited_for_wishes() if wished else "",
            wishes=0 if wished else self._book.urgent,
            wishes_unlisted=self._wished.listing_awaited,
            set_aside=self._makeups.words if self._book.only_set_aside else "",
        )

    def _estimate(self, parts: int) -> int:
        # More than there can ever be room for would wait for ever; the exact size decides.
        most = self.landlord.capacity - self._cache.space.listing_ahead
        return max(0, min(most, self._forecast.group_bytes(parts)))

    def follow(self, config: Config) -> None:
        """Go by a configuration that differs in what may change while the service runs.

        Raises:
            ConfigError: its bound cannot hold what the samplers have to write (protocol 11).
        """
        self.check_bound(config)
        self._config = config
        self.landlord.follow(config.cache)
        self._cache.follow(config.cache)

    def check_bound(self, config: Config) -> None:
        """Refuse a bound that cannot hold groups of full shards, and those that are made.

        Raises:
            ConfigError: names the bound that would do.
        """
        expected = self._forecast.full_group_bytes()
        larger = min(self._limit_bytes, LIMIT_OF_EXPECTED * expected) if self._ragged else 0
        check_bound(
            config,
            expected,
            self._catalog.allocated_bytes,
            largest_bytes=max([larger, *(f.need_bytes or 0 for f in self.flights.values())]),
        )

    @property
    def population(self) -> Population:
        """The parts of the source, as far as they are listed."""
        return self._drawing.population

    @property
    def at_bound(self) -> bool:
        """Whether the cache is kept at its bound, by eviction or for want of it."""
        return self.landlord.at_bound or self.verdict.mood == "full"

    @property
    def ramping(self) -> bool:
        """Whether shards are still smaller than later ones will be."""
        return self._cache.meta.deferrals.draw_number(self._book.next_new) < RAMP_END

    @property
    def drawn_this_run(self) -> int:
        """Samples that this run committed."""
        return self._cache.totals().drawn - self._drawn_before

    @property
    def rounds(self) -> list[float]:
        """How often each of several sources was drawn; nothing where there is one."""
        return self._drawing.rounds(self._book.next_new)

    def coverage(self, population: int) -> float:
        """Return the share of the population's parts that were ever drawn, 0 to 1."""
        drawn, missing = self._cache.totals().drawn_parts, self._makeups.missing
        distinct = self._drawing.distinct(self._book.next_new)
        if distinct is not None and not self._drawing.replacement:
            return max(0, min(distinct - missing, drawn)) / population
        if self._drawing.replacement:
            return -math.expm1(-drawn / population)  # expected, for independent draws
        # A wish may have skipped ahead, to a later round even.
        whole = bool(self._round) and not self._book.behind
        return max(0.0, 1.0 - missing / population) if whole else min(1.0, drawn / population)

    # -------------------------------------------------------------------- room

    def grant_waiting(self) -> list[str]:
        """Make room for the samplers that wait with a finished group; return whom to tell."""
        waiting = [
            f for f in self.flights.values() if f.need_bytes is not None and not f.granted
        ]
        granted: list[str] = []
        self.blocked, self.short_of_disk = "", False
        self.landlord.shrink()
        if self.flights:
            self.landlord.keep_ahead()
        waiting = [f for f in waiting if not self._leaves_the_first_place(f)]
        for flight in sorted(waiting, key=lambda f: (not self._is_wished(f), f.asked_at)):
            assert flight.need_bytes is not None
            wished = self._is_wished(flight)
            self.blocked = self._obstacle(flight.permit.id, flight.need_bytes, wished=wished)
            if self.blocked:
                if not (flight.fresh or self.short_of_disk or self.landlord.evicts_for_wishes):
                    self._wished.refuse(flight.permit.group, FULL_FOR_GOOD)
                break  # first come, first served: else a large group would wait for ever
            flight.granted = True
            granted.append(flight.permit.id)
        return granted

    def _leaves_the_first_place(self, flight: IssuedPermit) -> bool:
        """Whether a finished group of the ramp waits for earlier ones to be written first.

        A group is done sooner where none of its objects is slow, and a small cache of such
        groups would favour fast objects. A store that hangs must not keep training from its
        first samples, so no group is waited for long; later on, those in flight are few beside
        those cached.
        """
        group, now = flight.permit.group, time.monotonic()
        if group >= RAMP_END or not flight.fresh:
            return False
        earlier = [f for f in self.flights.values() if f.permit.group < group]
        for one in earlier:
            one.awaited_since = min(one.awaited_since, now)
        return any(now < one.awaited_since + IN_TURN_SECONDS for one in earlier)

    def _obstacle(self, permit: str, nbytes: int, *, wished: bool) -> str:
        """Reserve the bytes; return what has to happen before that can be done."""
        try:
            reserved = self.landlord.reserve(permit, nbytes, wished=wished)
        except CacheFullError as error:  # it could not even note what it evicts
            self.short_of_disk = True
            return f"free space on the disk: {error}"
        if not reserved:
            if wished:
                return f"room for shards of a checkpoint: {self.landlord.awaited_for_wishes()}"
            if nbytes <= self._cache.room():
                return LISTING_FIRST
            return self.landlord.awaited()
        if self._cache.disk_holds_promises():
            return ""
        self._cache.space.release(
            permit
        )  # better to keep it in memory than to write half of it
        self.short_of_disk = True
        return f"free space on the disk: {nbytes:,} bytes for the next group of shards"

    @property
    def stuck(self) -> bool:
        """Whether every group in flight waits for room that only eviction could make."""
        flights = self.flights.values()
        return all(f.need_bytes is not None and not f.granted for f in flights)

    @property
    def at_work(self) -> bool:
        """Whether groups are being filled, or will be as soon as the store answers."""
        return bool(self.flights) or self._book.failing > 0

    @property
    def at_rest(self) -> bool:
        """Whether nothing in this run can change any more what is cached."""
        if (
            not self.stuck
            or self.short_of_disk
            or (self._cache.shrinking and self._config.cache.eviction != "none")
        ):
            return False
        spent = self.verdict.final and self.verdict.mood == "waiting"
        if self._cache.remover.wishlist.pending and not spent:
            return False
        return self.verdict.final or bool(self.flights and not self.landlord.evicts)

    @property
    def rest(self) -> str:
        """Why nothing can change any more, in words; see `at_rest`."""
        if self.verdict.mood == "complete":
            return "all that is to be cached is cached"
        spent = self.verdict.final and self.verdict.mood == "waiting"
        return (self.verdict.waiting_for or "") if spent else FULL_FOR_GOOD

    # ----------------------------------------------------------------- reports

    def need(self, permit: str, nbytes: int) -> None:
        """Note that a group is encoded and how much room it takes."""
        if flight := self.flights.get(permit):
            flight.need_bytes, flight.asked_at = nbytes, time.monotonic()
            if nbytes > self.landlord.capacity and not flight.fresh:
                self._wished.refuse(
                    flight.permit.group, NO_ROOM.format(nbytes, nbytes, self.landlord.capacity)
                )
            self._forecast.learn(flight.permit, nbytes)
            self._halt.answered(permit, whole=True)

    def visited(self, permit: str) -> None:
        """Note that the store answered for a group that is being filled."""
        self._halt.answered(permit, whole=False)

    @property
    def refused(self) -> str:
        """What the store refuses everybody for, and what has to be done; empty where it does not."""
        return self._halt.waiting_for

    def written(self, permit: str) -> list[str]:
        """Commit a group that is on disk; return the reasons of its holes.

        Raises:
            SamplingError: too many objects of the source cannot be used.
        """
        flight = self.flights.pop(permit, None)
        if flight is None:
            return []  # of a permit that was taken back
        shards = [self._sidecar(permit, number) for number in flight.permit.written]
        try:
            self._makeups.committing(flight.permit, shards)
            rows = self._cache.commit(permit, shards)
        except CacheFullError as error:  # nothing is left of it: it is filled again
            self._cache.discard(permit, flight.permit.shards)
            self._fail(flight.permit.group, str(error), disk=True)
            return []
        self._makeups.committed(flight.permit)
        self.landlord.filled(sum(row.allocated for row in rows))
        self._book.done(flight.permit.group)
        fresh = [shard for shard in shards if shard.number in flight.fresh]
        reasons = self._skipped.count(flight.permit, fresh)
        allowed = self._config.sampling.max_skipped
        self._skipped.check(allowed, self._cache.totals(), complete=self.complete)
        return reasons

    def _sidecar(self, permit: str, number: int) -> Sidecar:
        path = self._cache.layout.incoming_path(permit, number, ".json")
        return Sidecar.from_bytes(path.read_bytes(), str(path))

    def refuse(self, permit: str, waiting_for: str) -> None:
        """Note that the store refuses a group, as it would all others: it is filled again."""
        if flight := self._land(permit):
            self._halt.refused(permit, printable(waiting_for), time.monotonic())
            self._book.returned(flight.permit.group)

    def failed(self, permit: str, error: str, *, disk: bool) -> None:
        """Note a transient failure: the group is filled again later.

        ``disk``: it was the local disk that failed, so there must be less in the cache.
        """
        if flight := self._land(permit):
            self._fail(flight.permit.group, error, disk=disk)
            if self._halt.waiting_for and not disk:  # it was on trial
                self._halt.waiting_for = f"the store to answer ({self.last_error})"
            if disk:
                self.landlord.make_room(self._cache.room_for_shards() + flight.estimate_bytes)

    def retry_holes(self) -> int:
        """Let all holes that are known be tried again; return how many."""
        return retry_holes(self._cache, self._drawing, self._makeups, self._sizing.group_shards)

    def retry_rewritten(self, relisted: Iterable[Entry]) -> int:
        """Let holes of objects be tried again of which another version is listed now."""
        return retry_holes(
            self._cache,
            self._drawing,
            self._makeups,
            self._sizing.group_shards,
            has_new_version(relisted),
        )

    def set_back(self, permit: str, place: int, error: str) -> None:
        """Note that a visit is set aside: its object keeps failing while others answer."""
        if flight := self.flights.get(permit):
            self._makeups.set_back(flight.permit, place, error)

    def failed_again(self, permit: str) -> None:
        """Note that all objects of a makeup group still fail: it is tried again later."""
        if flight := self._land(permit):
            due = self._makeups.failed_again(flight.permit)
            self._book.set_aside(flight.permit.group, due)

    def _fail(self, group: int, error: str, *, disk: bool) -> None:
        self.failures += 1
        self._retry_event = "free space on the disk" if disk else "the store to answer"
        self.last_error = printable(error)
        self._book.failed(group, time.monotonic(), disk=disk)

    def abandoned(self, permit: str, death: SamplerDeath) -> None:
        """Note that the sampler of a group died: the group is filled again at once.

        Raises:
            SamplingError: it has cost too many samplers to be chance.
        """
        if flight := self._land(permit):
            group = flight.permit.group
            if self._book.abandoned(group, death.suspicion) >= MOST_SUSPICION:
                if not flight.fresh:
                    self._wished.refuse(group, f"sampler after sampler died on it: {death}")
                    return
                first = short_key(flight.permit.stops[0].entry.key)
                raise SamplingError(
                    f"sampler after sampler died on group {group} (its first object is "
                    f"{first}), the last {death}"
                    + ("" if death.stalled else crash_suspects(self._config))
                )

    def ground(self) -> None:
        """Remove what samplers left unfinished; they are all gone."""
        for permit in list(self.flights):
            self._land(permit)

    def _land(self, permit: str) -> IssuedPermit | None:
        flight = self.flights.pop(permit, None)
        if flight is not None:
            self._cache.discard(permit, flight.permit.shards)
            self._halt.ended(permit, time.monotonic())
        return flight
