"""The groups that were issued and not committed, and those to refetch, in the order of their attempts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from growcache.cache.cache import Cache
from growcache.cache.shard_refetches import never_fits, number_list, refetching_leases
from growcache.sampling.draw_sequence import DrawSequence
from growcache.sampling.draws import GroupDraw
from growcache.sampling.messages import Permit
from growcache.store.catalog import Catalog

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 15.0  # so that a service continues soon after a wait of hours
LONGEST_DISK_SECONDS = 2.0


@dataclass(slots=True)
class _OpenGroup:
    tries: int = 0
    due: float = 0.0  # monotonic seconds
    suspicion: int = 0
    set_aside: bool = False


@dataclass(slots=True)
class IssuedPermit:
    permit: Permit
    estimate_bytes: int
    need_bytes: int | None = None
    samples: Sequence[int] | None = None  # in each written shard, after encoding
    granted: bool = False
    asked_at: float = 0.0
    awaited_since: float = math.inf
    fresh: tuple[int, ...] = ()  # shards that were never committed
    visited: int = 0

    @property
    def waits(self) -> bool:
        return self.need_bytes is not None and not self.granted


class GroupQueue:
    """The open groups, and the groups to refetch.

    A group to refetch may be open, committed (it is filled *again*), or not issued yet.
    """

    def __init__(self, next_new: int, unfinished: Iterable[int]) -> None:
        self.next_new = next_new
        self._untried = sorted(unfinished)  # a heap, because there may be millions
        # Groups of these that were tried early, and are still in the heap.
        self._tried_early: set[int] = set()
        self._open: dict[int, _OpenGroup] = {}
        self._filling: dict[int, _OpenGroup] = {}
        self._refetches: dict[int, None] = {}
        self._again: dict[int, _OpenGroup] = {}
        self._filled_again: set[int] = set()

    @property
    def filling(self) -> int:
        return len(self._filling)

    @property
    def settled(self) -> bool:
        return not self.behind and not self._open and self._filling.keys() <= self._filled_again

    @property
    def behind(self) -> bool:
        """Whether this run has not yet tried some group that an earlier run issued."""
        while self._untried and self._untried[0] in self._tried_early:
            self._tried_early.remove(heapq.heappop(self._untried))
        return bool(self._untried)

    def has_open_below(self, group: int) -> bool:
        """Whether a lower group is open.

        Deferred ones do not count, because they may take hours.
        """
        if self.behind and self._untried[0] < group:
            return True
        return any(g < group and not entry.set_aside for g, entry in self._open.items())

    @property
    def failing(self) -> int:
        """Number of groups that failed and wait for a retry, without deferred ones."""
        return sum(1 for entry in self._open.values() if entry.tries and not entry.set_aside)

    @property
    def only_set_aside(self) -> bool:
        return not (self.behind or self._filling) and all(
            entry.set_aside for entry in self._open.values()
        )

    def due(self, now: float) -> int | None:
        """Return the lowest open group whose time has come, or None."""
        ready = [group for group, entry in self._open.items() if entry.due <= now]
        return min(ready + (self._untried[:1] if self.behind else []), default=None)

    def follow_refetches(self, groups: Iterable[int]) -> None:
        self._refetches = dict.fromkeys(groups)
        self._again = {g: entry for g, entry in self._again.items() if g in self._refetches}

    def due_refetch(self, now: float, *, issued: bool = False) -> int | None:
        """Return the first group to refetch that is due and that no sampler fills, or None."""
        for group in self._refetches:
            entry = self._entry(group)
            due = group not in self._filling and (entry is None or entry.due <= now)
            if due and not (issued and group >= self.next_new):
                return group
        return None

    @property
    def urgent(self) -> int:
        """Number of groups to refetch that have not failed yet. New groups come after them."""
        entries = map(self._entry, self._refetches)
        return sum(1 for entry in entries if entry is None or not entry.tries)

    def _entry(self, group: int) -> _OpenGroup | None:
        for entries in (self._filling, self._open, self._again):
            if group in entries:
                return entries[group]
        return None

    def start(self, group: int, *, again: bool = False) -> int:
        """Record that a sampler fills the group; return the number of this attempt, from 0.

        ``again``: the group was committed before. A group that was never issued opens all
        earlier ones.
        """
        entry = (self._again if again else self._open).pop(group, None)
        if again:
            self._filled_again.add(group)
        elif entry is None:
            self._begin(group)
        self._filling[group] = entry or _OpenGroup()
        return self._filling[group].tries

    def _begin(self, group: int) -> None:
        if group >= self.next_new:
            # Larger than all others, so it is still a heap.
            self._untried.extend(range(self.next_new, group))
            self.next_new = group + 1
        else:
            self._tried_early.add(group)

    def lost(self, group: int) -> None:
        """Reopen a committed group that has lost a shard."""
        if self._entry(group) is None and group < self.next_new:
            self._open[group] = _OpenGroup()

    def done(self, group: int) -> None:
        del self._filling[group]
        self._filled_again.discard(group)

    def failed(self, group: int, now: float, *, disk: bool = False) -> None:
        """Reopen the group, each time with a longer delay.

        After a failure of the local ``disk`` groups wait in memory, so an early retry costs
        little.
        """
        entry = self._filling[group]
        tries = entry.tries + 1
        longest = LONGEST_DISK_SECONDS if disk else LONGEST_DELAY_SECONDS
        delay = min(longest, FIRST_DELAY_SECONDS * 2 ** (tries - 1))
        self._reopen(group, _OpenGroup(tries, now + delay, entry.suspicion))

    def set_aside(self, group: int, due: float) -> None:
        """Reopen a makeup group whose objects all still fail."""
        entry = self._filling[group]
        self._reopen(group, _OpenGroup(entry.tries + 1, due, entry.suspicion, set_aside=True))

    def returned(self, group: int) -> None:
        """Reopen the group. The attempt does not count."""
        entry = self._filling[group]
        self._reopen(group, _OpenGroup(entry.tries, 0.0, entry.suspicion))

    def abandoned(self, group: int, suspicion: int = 1) -> int:
        """Reopen the group of a dead sampler; return the group's suspicion."""
        entry = self._filling[group]
        self._reopen(group, _OpenGroup(entry.tries, 0.0, entry.suspicion + suspicion))
        return entry.suspicion + suspicion

    def _reopen(self, group: int, entry: _OpenGroup) -> None:
        again = group in self._filled_again
        self.done(group)
        (self._again if again else self._open)[group] = entry


MOST_AHEAD = 100_000  # groups that a refetch may skip, all of which are drawn afterwards
LISTING = "the listing to end: shards of a checkpoint were never drawn here"
NO_SUCH = "shard {} does not exist here: the source, or its fixed set, ends before it"
TOO_FAR = "shard {} is more than {:,} groups ahead of what was ever drawn here"
NO_ROOM = (
    "{:,} bytes of shards are to be refetched, with what else their lease holds {:,}, but "
    "cache.max_bytes leaves {:,} for shards; raise it"
)


@dataclass(frozen=True, slots=True)
class Refetch:
    """The content of one permit for a refetch."""

    draw: GroupDraw
    missing: tuple[int, ...]  # shards that were never committed, ascending
    wanted: tuple[int, ...]  # shards that a reader waits for, ascending
    shards: int

    @property
    def write(self) -> tuple[int, ...]:
        return tuple(sorted({*self.missing, *self.wanted}))

    @property
    def again(self) -> bool:
        return not self.missing


def shards_by_group(numbers: Iterable[int], group_shards: int) -> dict[int, tuple[int, ...]]:
    """Return the shards of each group, in the order of the groups' first shards.

    >>> shards_by_group([9, 2, 8, 3], 4)
    {2: (8, 9), 0: (2, 3)}
    """
    found: dict[int, list[int]] = {}
    for number in numbers:
        found.setdefault(number // group_shards, []).append(number)
    return {group: tuple(sorted(mine)) for group, mine in found.items()}


class RefetchScheduler:
    """Passes the readers' refetches to the group queue, and refuses impossible ones."""

    def __init__(
        self,
        cache: Cache,
        catalog: Catalog,
        draws: DrawSequence,
        group_queue: GroupQueue,
        group_shards: int,
        *,
        in_order: bool = False,
    ) -> None:
        """Start without refetches. ``in_order``: each shard depends on earlier ones.

        Shards are then drawn only after all earlier ones.
        """
        self._cache = cache
        self._catalog = catalog
        self._draws = draws
        self._group_queue = group_queue
        self._group_shards = group_shards
        self._in_order = in_order
        self._seen: Mapping[int, str] = {}
        self._weighed: object = None
        self._groups: dict[int, tuple[int, ...]] = {}
        self._draw: GroupDraw | None = None

    def update_from_refetch_queue(
        self, shard_bytes: Callable[[int, int], int], capacity: int
    ) -> None:
        self._refuse_too_large(shard_bytes, capacity)
        if self._cache.refetch_queue.pending == self._seen:
            return
        self._refuse_too_far()
        self._follow()

    def _follow(self) -> None:
        self._seen = dict(self._cache.refetch_queue.pending)
        wanted: Collection[int] = self._seen
        if self._in_order:
            wanted = self._seen.keys() - self._cache.never_committed(sorted(self._seen))
        self._groups = shards_by_group(wanted, self._group_shards)
        self._group_queue.follow_refetches(self._groups)

    def refuse_never_drawn(self) -> None:
        """Refuse shards after the end of a complete set."""
        pending = sorted(self._cache.refetch_queue.pending)
        if never := self._cache.never_committed(pending):
            reason = NO_SUCH.format(number_list(never))
            self._cache.refetch_queue.refuse(dict.fromkeys(never, reason))

    def _refuse_too_large(self, shard_bytes: Callable[[int, int], int], capacity: int) -> None:
        leases = refetching_leases(self._cache.leases)
        # Repeated a few times, as shards are committed and their sizes become known.
        weighed = (
            {le.name for le in leases},
            len(self._cache.refetch_queue.pending).bit_length(),
            capacity,
        )
        if weighed == self._weighed:
            return
        self._weighed = weighed
        for lease in leases:
            held = lease.holding()
            known = self._cache.sizes(held)
            sizes = {n: known.get(n) or shard_bytes(n, capacity) for n in held}
            if found := never_fits(lease, sizes, capacity):
                reason = NO_ROOM.format(*found, capacity)
                self._cache.refetch_queue.refuse(dict.fromkeys(lease.wishing, reason))

    def _refuse_too_far(self) -> None:
        stop = (self._group_queue.next_new + MOST_AHEAD) * self._group_shards
        far = [number for number in self._cache.refetch_queue.pending if not 0 <= number < stop]
        if far:
            self._cache.refetch_queue.refuse({n: TOO_FAR.format(n, MOST_AHEAD) for n in far})

    def of(self, shards: Iterable[int]) -> tuple[int, ...]:
        return tuple(number for number in shards if number in self._cache.refetch_queue.pending)

    @property
    def listing_awaited(self) -> bool:
        """Whether a refetch must wait for the end of the listing."""
        return not self._catalog.complete and any(
            group >= self._group_queue.next_new for group in self._groups
        )

    def next(self, now: float) -> Refetch | None:
        """Return the refetch that is due, or None.

        It may have to wait for the end of the listing.
        """
        listed = self._catalog.complete
        while (group := self._group_queue.due_refetch(now, issued=not listed)) is not None:
            draw = self._drawn(group)
            if draw is not None:
                first = group * self._group_shards
                numbers = range(first, first + self._group_shards)
                missing = tuple(self._cache.never_committed(numbers))
                return Refetch(draw, missing, self.of(numbers), self._group_shards)
            self.refuse(group, NO_SUCH.format(number_list(self._groups[group])))
        return None

    def _drawn(self, group: int) -> GroupDraw | None:
        if self._draw is None or self._draw.group != group:
            try:
                self._draw = (
                    self._draws.ahead(group, self._group_queue.next_new)
                    if group >= self._group_queue.next_new
                    else self._draws.again(group)
                )
            except LookupError:  # no part for this node
                self._draw = None
        return self._draw

    def refuse(self, group: int, reason: str) -> None:
        self._cache.refetch_queue.refuse(dict.fromkeys(self._groups.get(group, ()), reason))
        self._follow()
