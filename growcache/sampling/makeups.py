"""What is set aside, and the groups that make up for it: between the dispatcher and the record."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from growcache.cache.cache import Cache
from growcache.cache.deferrals import MOST_MAKEUPS, Place
from growcache.cache.sidecar import Sidecar
from growcache.cache.status import SetAsideStatus
from growcache.sampling.drawing import Drawing
from growcache.sampling.draws import Draw, Sizing
from growcache.sampling.messages import Permit, Stop
from growcache.sampling.setbacks import EARLIER, Name, Setbacks
from growcache.usercode import printable, short

SHARE_PENDING = 4  # one part of so many of the record may be pending; the rest is history


class Makeups:
    """Decides which visits are set aside and when their parts come; keeps the record.

    Args:
        cache: that has the record.
        drawing: the draws.
        sizing: how many parts a group has.
        unfinished: groups that were issued and are not committed.
        timeout_seconds: of a read.
    """

    def __init__(
        self,
        cache: Cache,
        drawing: Drawing,
        sizing: Sizing,
        unfinished: Iterable[int],
        timeout_seconds: float,
    ) -> None:
        self._cache = cache
        self._drawing = drawing
        self._sizing = sizing
        self._setbacks = Setbacks(timeout_seconds)
        record = cache.deferrals
        held = {group: record.makeups[group] for group in unfinished if group in record.makeups}
        places = [*record.pending, *(first for firsts in held.values() for first in firsts)]
        self._names: dict[Place, Name] = dict(zip(places, self._resolved(places), strict=True))
        for name in self._names.values():
            self._setbacks.known(name, time.monotonic())
        # The objects of makeup groups that are issued, and not committed.
        self._open = {group: {self._names[p] for p in firsts} for group, firsts in held.items()}
        self._candidate: tuple[list[Place], Draw] | None = None
        self._follow()

    def _resolved(self, places: Sequence[Place]) -> list[Name]:
        if not places:
            return []
        stops = self._drawing.population.stops(self._drawing.gathered(0, places))
        return [name_of(stop) for stop in stops]

    def _follow(self) -> None:
        """Follow the record, which has changed."""
        self._names = {place: self._names[place] for place in self._cache.deferrals.pending}
        self._setbacks.wait(self._names)

    # What is left out of a group

    @property
    def may_defer(self) -> bool:
        """Whether the record has room for more."""
        record = self._cache.deferrals
        most = self._cache.most_deferred // SHARE_PENDING
        return len(record.pending) < most and len(record.numbers) < MOST_MAKEUPS

    def left_out(self, group: int, stops: Sequence[Stop], *, defers: bool) -> tuple[int, ...]:
        """Return the visits that are not even tried.

        Args:
            group: of the visits.
            stops: all of them.
            defers: whether visits may be set aside that were not before.
        """
        record, failing = self._cache.deferrals, self._setbacks.failing
        found = set(record.left_out(group))
        if defers and failing and group not in record.makeups:
            found.update(n for n, stop in enumerate(stops) if self._fails(name_of(stop)))
        return tuple(sorted(found))

    def _fails(self, name: Name) -> bool:
        """Whether an object failed in this run; what an earlier one left may have no fault."""
        failing = self._setbacks.failing.get(name)
        return failing is not None and failing.reason != EARLIER

    def set_back(self, permit: Permit, place: int, error: str) -> None:
        """Note that an object kept failing while others answered."""
        name, now = name_of(permit.stops[place]), time.monotonic()
        self._setbacks.failed(name, printable(error), now, again=bool(permit.made_up))

    def retry(self, group: int, stops: Sequence[Stop], places: Sequence[int]) -> int:
        """Let holes of a committed group be tried again; return how many.

        Raises:
            CacheFullError: no room on the disk.
        """
        record = self._cache.deferrals
        if not places:
            return 0
        for place in places:
            self._names[record.first_drawn((group, place))] = name_of(stops[place])
        self._cache.set_deferrals(record.retrying(group, places), retried=len(places))
        self._follow()
        return len(places)

    # Makeup groups

    def next(self, group: int, *, idle: bool = False) -> Draw | None:
        """Return what the next group holds, if it is to be a makeup group.

        Args:
            group: its number.
            idle: whether there is nothing else to draw.
        """
        record, now = self._cache.deferrals, time.monotonic()
        if group in record.makeups:  # it is recorded, and the disk was full when it was issued
            return self._drawing.again(group)
        if not record.pending:
            return None
        most = self._sizing.group_parts(record.draw_number(group))
        trying = set().union(*self._open.values())
        places = self._setbacks.due(now, most, trying, idle=idle)
        if not places:
            return None
        known = self._candidate
        if known is None or known[0] != places or known[1].group != group:
            self._candidate = (places, self._drawing.gathered(group, places))
        assert self._candidate is not None
        return self._candidate[1]

    def record(self, draw: Draw) -> None:
        """Note, durably, that a group is a makeup group, if `next` returned it as one.

        Raises:
            CacheFullError: no room on the disk.
        """
        if self._candidate is None or self._candidate[1] is not draw:
            return
        places, _ = self._candidate
        record = self._cache.deferrals
        if record.size + len(places) > self._cache.most_deferred:
            record = record.forgetting(self._oldest_half())
        self._cache.set_deferrals(record.making_up(draw.group, places))
        self._open[draw.group] = {self._names[place] for place in places}
        self._setbacks.made_up(time.monotonic())
        self._candidate = None
        self._follow()

    def _oldest_half(self) -> int:
        """Return the number below which makeup groups may be forgotten."""
        numbers = self._cache.deferrals.numbers
        stop = numbers[len(numbers) // 2] if numbers else 0
        return min([stop, *self._open])

    def failed_again(self, permit: Permit) -> float:
        """Return when a makeup group is tried again of which all objects still fail."""
        due = self._setbacks.next_try(map(name_of, permit.stops))
        return due if due < math.inf else time.monotonic()  # they answered another group since

    # Commits

    def committing(self, permit: Permit, shards: Sequence[Sidecar]) -> None:
        """Record, durably, what was set aside of a group that is about to be committed.

        Raises:
            CacheFullError: no room on the disk.
        """
        group, record = permit.group, self._cache.deferrals
        left = {place for shard in shards for place in shard.left_out} - record.left_out(group)
        if not left:
            return
        for place in left:
            self._names[record.first_drawn((group, place))] = name_of(permit.stops[place])
        self._cache.set_deferrals(record.deferring(group, left))
        self._follow()

    def committed(self, permit: Permit) -> None:
        """Note that a group is committed: objects of a makeup group that came answer again."""
        if self._open.pop(permit.group, None) is None:
            return
        left = self._cache.deferrals.left_out(permit.group)
        failing = {name_of(permit.stops[place]) for place in left}
        for name in {name_of(stop) for stop in permit.stops} - failing:
            self._setbacks.answered(name)

    # What there is to say

    @property
    def missing(self) -> int:
        """How many parts were drawn and are in no shard yet."""
        held = (self._cache.deferrals.makeups[group] for group in self._open)
        return len(self._cache.deferrals.pending) + sum(map(len, held))

    @property
    def tried(self) -> bool:
        """Whether every object of which parts are missing failed again, in this run."""
        return self._setbacks.tried(set().union(*self._open.values()))

    @property
    def status(self) -> SetAsideStatus:
        """What ``growcache status`` shows of it."""
        failing = self._setbacks.failing
        if not failing and not self.missing:
            return SetAsideStatus()
        latest = next(reversed(failing), None)
        if latest is None:
            return SetAsideStatus(self.missing)
        key, why = short(latest[1]), failing[latest].reason
        due = max(0.0, self._setbacks.next_try(failing) - time.monotonic())
        return SetAsideStatus(self.missing, len(failing), key, why, due)

    @property
    def words(self) -> str:
        """What is awaited where nothing else is left."""
        return f"{self.status.words}; it is tried again" if self.missing else ""


def name_of(stop: Stop) -> Name:
    """Return what tells the object of a visit from others."""
    return stop.entry.store, stop.entry.key
