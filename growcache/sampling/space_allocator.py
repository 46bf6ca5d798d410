"""Space in the cache: which group gets it, which shards are evicted for it, and which readers prevent that."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from growcache.cache import eviction_policy
from growcache.cache.cache import Cache
from growcache.cache.lease_views import foreign_leases_message
from growcache.config import CacheConfig
from growcache.errors import CacheFullError, ConfigError
from growcache.sampling.fixed_set import FixedSet
from growcache.sampling.group_queue import IssuedPermit, RefetchScheduler
from growcache.sampling.rate_limiter import LISTING_FIRST, WaitReason, reason_of_holders
from growcache.sampling.sizing import RAMP_END

WINDOW_SECONDS = 5.0
READERS_OF_OLDER = "readers to release shards of the generation that is being replaced"


class Rate:
    """Amount per second over a sliding window of `WINDOW_SECONDS`.

    >>> rate = Rate()
    >>> rate.note(0.0, 0); rate.note(1.0, 50); rate.note(2.0, 100)
    >>> rate.per_second
    50.0
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def note(self, now: float, total: float) -> None:
        self._points.append((now, total))
        while self._points[0][0] < now - WINDOW_SECONDS:
            self._points.popleft()

    @property
    def per_second(self) -> float:
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else 0.0


class SpaceAllocator:
    def __init__(
        self,
        bounds: CacheConfig,
        cache: Cache,
        *,
        evicts: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bounds = bounds
        self._clock = clock
        self._cache = cache
        self.evicts = evicts and bounds.eviction != "none"
        # Whether room has run out, so that new shards replace old ones.
        self.at_bound = False
        self._largest = 0  # bytes of the largest group of shards that requested room
        self._filled = 0  # bytes of shards that were added in this run
        self._filling = Rate()
        self._held_since: dict[str, float] = {}  # by lease, monotonic seconds

    @property
    def capacity(self) -> int:
        """Bytes that the bound leaves for shards."""
        cache = self._cache
        return max(0, cache.max_bytes - cache.space.budget.total - cache.space.catalog_bytes)

    @property
    def spare(self) -> int:
        """Part of the capacity that no group has needed so far."""
        return max(0, self.capacity - self._largest)

    @property
    def evicts_for_refetches(self) -> bool:
        return self._bounds.eviction != "none"

    def reserve(self, permit_id: str, nbytes: int, *, for_refetch: bool = False) -> bool:
        """Reserve bytes, and evict if needed; return False if the permit must wait."""
        if nbytes > self.capacity:
            raise ConfigError(
                f"cache.max_bytes: one group of shards takes {nbytes:,} bytes, and "
                f"{self.capacity:,} is all that the bound leaves for samples; raise it, or "
                "lower sampling.shard_samples",
                code="GC110",
            )
        self._largest = max(self._largest, nbytes)
        if self._cache.reserve(permit_id, nbytes):
            return True
        self.make_room(nbytes, for_refetch=for_refetch)
        return self._cache.reserve(permit_id, nbytes)

    def shrink(self) -> None:
        """Evict the excess over a bound that was lowered."""
        cache, bounds = self._cache, self._bounds
        if cache.older and (short := -cache.bytes_left()) > 0:
            self._take_from_older(short)
        short = -cache.bytes_left()
        if short <= 0 or cache.older:
            return
        evict, ahead = eviction_policy.choose_for_lower_bound(
            bounds.eviction,
            self._that_clear(self._candidates()),
            short,
            self._going_bytes,
            bounds.min_uses,
            cache.totals().drawn_shards,
        )
        if ahead:
            cache.retire(ahead)
        if evict:
            cache.evict(evict)

    def make_room(self, nbytes: int, *, for_refetch: bool = False) -> None:
        """Evict until ``nbytes`` are free, or retire shards ahead that readers still hold.

        A refetch ignores `min_uses`. Otherwise a reader, and a full cache that no job reads,
        would wait for each other.
        """
        short = nbytes - self._cache.bytes_left_for_shards()
        if short > 0 and self._cache.older:
            self._take_from_older(short)
            short = nbytes - self._cache.bytes_left_for_shards()
            if self._cache.older:
                return  # the shards that readers hold will be free before new samples should go
        if short <= 0 or not (self.evicts_for_refetches if for_refetch else self.evicts):
            return
        self.at_bound = True
        self._clear(short, 0 if for_refetch else self._bounds.min_uses)

    def _take_from_older(self, short: int) -> None:
        self._cache.older.give_way(short)
        self._cache.count_older()

    def make_room_for_listing(self, nbytes: int) -> None:
        """Make room for the listing.

        Without readers `min_uses` is ignored, because a full cache would block the listing.
        """
        if self._cache.older and (short := nbytes - self._cache.bytes_left()) > 0:
            self._take_from_older(short)
        if not self.evicts:
            return
        least = self._bounds.min_uses
        read = any(lease.open for lease in self._cache.leases)
        for min_uses in (least,) if read else (least, 0):
            if (short := nbytes - self._cache.bytes_left()) > 0:
                self._clear(short, min_uses)

    def _clear(self, short: int, min_uses: int) -> None:
        cache, bounds = self._cache, self._bounds
        candidates, totals = self._candidates(), cache.totals()
        seed = totals.drawn_shards + totals.refetched_shards
        choice = eviction_policy.choose_evictions(
            bounds.eviction, candidates, short, min_uses, seed
        )
        before = cache.bytes_left()
        if choice.evict:
            cache.evict(choice.evict)
        if cache.bytes_left() - before >= short:
            return
        gone = set(choice.evict)
        ahead = eviction_policy.choose_early_retirements(
            bounds.eviction,
            self._that_clear(c for c in candidates if c.number not in gone),
            cache.max_bytes,
            self._going_bytes,
            min_uses,
            seed,
        )
        if ahead:
            cache.retire(ahead)

    def _candidates(self) -> list[eviction_policy.Candidate]:
        """Return the live shards without those that a reader waits for."""
        wanted, candidates = self._cache.refetch_queue.wanted, self._cache.candidates()
        return [c for c in candidates if c.number not in wanted] if wanted else candidates

    def _that_clear(
        self, candidates: Iterable[eviction_policy.Candidate]
    ) -> list[eviction_policy.Candidate]:
        """Return those candidates that will be free soon, without shards kept for dead readers."""
        kept = self._cache.lease_table.kept
        return [candidate for candidate in candidates if candidate.number not in kept]

    @property
    def _going_bytes(self) -> int:
        """Bytes of shards that will be free.

        Shards for dead readers have their own fifth of the bound.
        """
        return self._cache.clearing_bytes

    def filled(self, nbytes: int) -> None:
        self._filled += nbytes

    def keep_ahead(self) -> None:
        """Retire shards for the next groups in advance, so that they are free when samplers need them.

        Readers release a shard about an epoch after it was retired. Samplers that waited for
        that would be idle half of the time.
        """
        now, cache, bounds = self._clock(), self._cache, self._bounds
        self._filling.note(now, self._filled)
        if not (self.at_bound and self.evicts):
            return
        totals = cache.totals()
        coming = max(0, cache.bytes_left_for_shards()) + self._going_bytes
        wanted = min(
            self._come_while_held(now), eviction_policy.RETIRED_SHARE * cache.max_bytes
        )
        if coming >= wanted:
            return
        ahead = eviction_policy.choose_early_retirements(
            bounds.eviction,
            self._that_clear(self._candidates()),
            int(wanted / eviction_policy.RETIRED_SHARE),
            coming,
            bounds.min_uses,
            totals.drawn_shards,
        )
        if ahead:
            cache.retire(ahead)

    def _come_while_held(self, now: float) -> float:
        """Return the bytes that arrive while readers hold a snapshot."""
        held = {lease.name for lease in self._cache.leases if lease.open and lease.holds}
        self._held_since = {name: self._held_since.get(name, now) for name in held}
        longest = now - min(self._held_since.values(), default=now)
        return self._filling.per_second * longest

    def movable(self, *, for_refetch: bool = False) -> tuple[int, int]:
        """Return the bytes of shards that can go now, and after their readers release them."""
        if self._cache.older:
            return self._cache.older.movable()
        free = held = 0
        min_uses = 0 if for_refetch else self._bounds.min_uses
        for candidate in self._candidates():
            if candidate.min_job_uses >= min_uses:
                if candidate.leased:
                    held += candidate.allocated
                else:
                    free += candidate.allocated
        return free, held

    def awaited_for_refetch(self) -> str:
        return self._holders(always=True) or "groups in flight to be written"

    def awaited(self) -> str:
        if self._cache.older:
            return READERS_OF_OLDER
        if not self.evicts:
            return "nothing: shards are never evicted here (cache.eviction, --until-full)"
        return self._holders() or self.unused()

    @property
    def _ripe_but_kept(self) -> bool:
        """Whether shards with enough uses are kept for dead or resuming readers."""
        kept = self._cache.lease_table.kept | self._cache.refetch_queue.wanted
        return bool(kept) and any(
            candidate.number in kept and candidate.min_job_uses >= self._bounds.min_uses
            for candidate in self._cache.candidates()
        )

    def awaited_to_shrink(self) -> tuple[str, WaitReason]:
        if self._bounds.eviction == "none":
            event = (
                "a higher cache.max_bytes: with cache.eviction none no shard is ever evicted"
            )
            return event, "bound"
        wanted = bool(self._cache.refetch_queue.wanted)  # those stay, and are not retired
        if holders := self._holders(always=wanted):
            return holders, reason_of_holders(holders)
        return "samplers to finish what they are writing", "room"

    def adopt_settings(self, bounds: CacheConfig) -> None:
        if int(bounds.max_bytes) > int(self._bounds.max_bytes):
            self.at_bound = False
        self._bounds = bounds

    def unused(self) -> str:
        """Return which readers must read more, or release shards, in words."""
        if self._ripe_but_kept:
            return self._holders(always=True)
        jobs = sorted({lease.job for lease in self._cache.leases if lease.open and lease.job})
        least = self._bounds.min_uses
        if not jobs:
            return f"a reader: no job reads the cache, and cache.min_uses is {least}"
        names = ", ".join(jobs)
        often = "once" if least == 1 else f"{least} times"
        return f"job {names} to read more shards {often} each (cache.min_uses)"

    def _holders(self, *, always: bool = False) -> str:
        if foreign := foreign_leases_message(self._cache.lease_table.foreign):
            return f"readers to release shards: {foreign}"
        kept = {one.lease.name: one for one in self._cache.lease_table.kept_for() if one.shards}
        leases = [
            lease
            for lease in self._cache.leases
            if (lease.holds if lease.open else lease.name in kept)
        ]
        if not leases or not (always or self._cache.totals().retired_shards):
            return ""
        if not self._cache.disk_holds_a_lease():
            return "free space on the disk: without it no reader can take a new snapshot"
        oldest = min(leases, key=lambda lease: lease.created)
        age = max(0, time.time() - oldest.created)
        who = f"for {age:.0f} s by job {oldest.job} (pid {oldest.pid} on {oldest.host})"
        if not oldest.open:
            who += (
                ", whose reader died and may come back for another "
                f"{kept[oldest.name].seconds:.0f} s (cache.resume_seconds); release it with: "
                f"growcache release {self._cache.layout.directory}"
            )
        if len(leases) == 1:
            return f"readers to release shards: a snapshot is held {who}"
        return f"readers to release shards: {len(leases)} snapshots are held, the oldest {who}"


IN_TURN_SECONDS = 5.0  # for which an encoded group waits for an earlier one
FULL_FOR_GOOD = (
    "the cache is full, and with cache.eviction none no shard makes room for another"
)


class WriteQueue:
    """The issued permits. ``blocked`` has the reason why no encoded group may be written."""

    def __init__(
        self,
        cache: Cache,
        space: SpaceAllocator,
        refetches: RefetchScheduler,
        fixed_set: FixedSet,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._space = space
        self._refetches = refetches
        self._fixed_set = fixed_set
        self._clock = clock
        self.permits: dict[str, IssuedPermit] = {}
        self.cuts: dict[str, Sequence[int]] = {}  # lengths to which shards are cut
        self.blocked = ""
        self.short_of_disk = False

    @property
    def stuck(self) -> bool:
        """Whether every permit waits for room that only eviction can make."""
        return all(issued.waits for issued in self.permits.values())

    def is_refetch(self, issued: IssuedPermit) -> bool:
        return bool(self._refetches.of(issued.permit.written))

    def grant(self) -> list[str]:
        granted: list[str] = []
        self.blocked, self.short_of_disk, self.cuts = "", False, {}
        self._space.shrink()
        if self.permits:
            self._space.keep_ahead()
        waiting = [f for f in self.permits.values() if f.waits and not self._is_early(f)]
        for issued in sorted(waiting, key=lambda f: (not self.is_refetch(f), f.asked_at)):
            lengths = self._fixed_set.cut(issued, self.permits.values())
            if lengths is not None:
                self.cuts[issued.permit.id], issued.need_bytes = lengths, None
                continue
            self.blocked = self._obstacle(issued)
            if self.blocked:
                evicts = self._space.evicts_for_refetches
                if not (issued.fresh or self.short_of_disk or evicts):
                    self._refetches.refuse(issued.permit.group, FULL_FOR_GOOD)
                break  # first come, first served, or a large group would wait forever
            issued.granted = True
            granted.append(issued.permit.id)
        return granted

    def _is_early(self, issued: IssuedPermit) -> bool:
        """Whether an encoded group of the ramp waits until earlier ones are written.

        A small cache with the groups that are encoded soonest would favour fast objects. The
        wait is short, because a store that hangs must not delay the first samples. Later groups
        in flight are few compared with those cached. Groups of a fixed set come in order.
        """
        if self._fixed_set.awaits_earlier(issued, self.permits.values()):
            return True
        group, now = issued.permit.group, self._clock()
        if group >= RAMP_END or not issued.fresh:
            return False
        earlier = [f for f in self.permits.values() if f.permit.group < group]
        for one in earlier:
            one.awaited_since = min(one.awaited_since, now)
        return any(now < one.awaited_since + IN_TURN_SECONDS for one in earlier)

    def _obstacle(self, issued: IssuedPermit) -> str:
        """Reserve the bytes; return the event that must happen before, or ""."""
        assert issued.need_bytes is not None
        permit, nbytes, for_refetch = (
            issued.permit.id,
            issued.need_bytes,
            self.is_refetch(issued),
        )
        try:
            reserved = self._space.reserve(permit, nbytes, for_refetch=for_refetch)
        except CacheFullError as error:  # it could not even record which shards it evicts
            self.short_of_disk = True
            return f"free space on the disk: {error}"
        if not reserved:
            if for_refetch:
                return f"room for shards of a checkpoint: {self._space.awaited_for_refetch()}"
            return (
                LISTING_FIRST if nbytes <= self._cache.bytes_left() else self._space.awaited()
            )
        if self._cache.disk_holds_promises():
            return ""
        self._cache.space.release(permit)  # half of the group would be written, and lost
        self.short_of_disk = True
        return f"free space on the disk: {nbytes:,} bytes for the next group of shards"
