"""Visits without a result: setbacks, deferrals with their makeup groups, and holes.

Parts of an object that keeps failing, while others answer, are deferred without an attempt.
This ends when a makeup group finds that the object answers again. Makeup groups retry it with
growing delays.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from growcache.cache.cache import Cache
from growcache.cache.deferrals import MOST_MAKEUPS, Place
from growcache.cache.index.schema import CacheTotals
from growcache.cache.sidecar import Sidecar, version_of
from growcache.cache.space import KnownHole
from growcache.cache.status_model import SetAsideStatus
from growcache.errors import SamplingError
from growcache.sampling.draw_sequence import DrawSequence
from growcache.sampling.draws import GroupDraw
from growcache.sampling.messages import PartVisit, Permit, hole_reason
from growcache.sampling.sizing import Sizing
from growcache.store.contract import Entry
from growcache.usercode import printable, short_key

ObjectName: TypeAlias = tuple[int, str]  # store and key of an object

# Until the first retry; less if `timeout_seconds` is below a third of it.
FIRST_RETRY_SECONDS = 30.0
LONGEST_RETRY_SECONDS = 600.0
# At least, between two makeup groups that are not full; grows with their number.
MAKEUP_SECONDS = 10.0
# By this factor, so that the largest number that a cache may have (`MOST_MAKEUPS`) lasts a
# year.
MAKEUP_GROWTH = 1.005
DEFERRED_EARLIER = "set aside by an earlier run"


@dataclass(slots=True)
class FailingObject:
    reason: str
    due: float  # monotonic seconds
    tries: int = 0


class FailingObjects:
    def __init__(self, timeout_seconds: float) -> None:
        self._first = min(FIRST_RETRY_SECONDS, 3 * timeout_seconds)
        self._longest = min(LONGEST_RETRY_SECONDS, 60 * timeout_seconds)
        self.failing: dict[ObjectName, FailingObject] = {}
        self._between = min(MAKEUP_SECONDS, timeout_seconds)
        self._pending: dict[ObjectName, list[Place]] = {}
        self._made_up_at = float("-inf")

    def known(self, name: ObjectName, now: float) -> None:
        self.failing.setdefault(name, FailingObject(DEFERRED_EARLIER, now))

    def failed(self, name: ObjectName, reason: str, now: float, *, again: bool) -> None:
        """Record a failure. ``again``: a makeup group retried the object.

        Otherwise one more group in flight failed.
        """
        found = self.failing.get(name)
        if found is None:
            self.failing[name] = FailingObject(reason, now + self._first)
            return
        found.reason = reason
        if again and found.due <= now:
            found.tries += 1
            found.due = now + min(self._longest, self._first * 2**found.tries)

    def answered(self, name: ObjectName) -> None:
        """Record that a failing object was read, so that all of its deferred parts are due."""
        self.failing.pop(name, None)

    def wait(self, places: Mapping[Place, ObjectName]) -> None:
        """Replace the pending places, each with its object."""
        self._pending = {}
        for place, name in places.items():
            self._pending.setdefault(name, []).append(place)

    def due(
        self,
        now: float,
        most: int,
        trying: Collection[ObjectName] = (),
        *,
        idle: bool = False,
        made: int = 0,
    ) -> list[Place]:
        """Return the places for the next makeup group, or none before its time.

        Args:
            now: Current time, in monotonic seconds.
            most: Largest number of places.
            trying: Objects that other makeup groups are trying.
            idle: Whether nothing else is left to draw.
            made: Number of makeup groups so far.
        """
        found: list[Place] = []
        waiting = 0  # parts of groups that outgrew their limits, although no object failed
        for name, places in self._pending.items():
            failing = self.failing.get(name)
            if name not in trying and (failing is None or failing.due <= now):
                found += places
                waiting += len(places) if failing is None else 0
        soon = len(found) >= most or 2 * waiting >= most or (idle and waiting)
        between = self._between * (1.0 if idle else MAKEUP_GROWTH**made)
        if not soon and now < self._made_up_at + between:
            return []
        return sorted(found)[:most]

    def made_up(self, now: float) -> None:
        self._made_up_at = now

    def next_try(self, names: Iterable[ObjectName]) -> float:
        """Return the time of the first retry among some objects, or infinity without one."""
        return min(
            (self.failing[n].due for n in names if n in self.failing), default=float("inf")
        )

    def tried(self, trying: Collection[ObjectName]) -> bool:
        """Whether every object with pending parts failed again after it was set aside."""
        names = {*self._pending, *trying}
        return all(n in self.failing and self.failing[n].tries for n in names)


IsRetried = Callable[[KnownHole, PartVisit], bool]
PENDING_SHARE = 4  # 1/4 of the record may be pending; the rest is history


class Makeups:
    def __init__(
        self,
        cache: Cache,
        draws: DrawSequence,
        sizing: Sizing,
        unfinished: Iterable[int],
        timeout_seconds: float,
        most_makeups: int = MOST_MAKEUPS,
    ) -> None:
        self._cache = cache
        self._most_makeups = most_makeups
        self._draws = draws
        self._sizing = sizing
        self._setbacks = FailingObjects(timeout_seconds)
        record = cache.meta.deferrals
        held = {group: record.makeups[group] for group in unfinished if group in record.makeups}
        places = [*record.pending, *(first for firsts in held.values() for first in firsts)]
        self._names: dict[Place, ObjectName] = dict(
            zip(places, self._resolved(places), strict=True)
        )
        for name in self._names.values():
            self._setbacks.known(name, time.monotonic())
        # Objects of makeup groups that are issued and not committed.
        self._open = {group: {self._names[p] for p in firsts} for group, firsts in held.items()}
        self._candidate: tuple[list[Place], GroupDraw] | None = None
        self._follow()

    def _resolved(self, places: Sequence[Place]) -> list[ObjectName]:
        if not places:
            return []
        visits = self._draws.population.visits(self._draws.gathered(0, places))
        return [object_name(visit) for visit in visits]

    def _follow(self) -> None:
        self._names = {
            place: self._names[place] for place in self._cache.meta.deferrals.pending
        }
        self._setbacks.wait(self._names)

    # --- visits that are left out ---

    @property
    def may_defer(self) -> bool:
        record = self._cache.meta.deferrals
        most = self._cache.space.budget.deferred // PENDING_SHARE
        return len(record.pending) < most and len(record.numbers) < self._most_makeups

    def left_out(
        self, group: int, visits: Sequence[PartVisit], *, defers: bool
    ) -> tuple[int, ...]:
        """Return the places of visits that are not attempted.

        ``defers``: more visits may be set aside.
        """
        record, failing = self._cache.meta.deferrals, self._setbacks.failing
        found = set(record.left_out(group))
        if defers and failing and group not in record.makeups:
            found.update(n for n, visit in enumerate(visits) if self._fails(object_name(visit)))
        return tuple(sorted(found))

    def _fails(self, name: ObjectName) -> bool:
        """Whether an object failed in this run. Deferrals of earlier runs prove nothing."""
        failing = self._setbacks.failing.get(name)
        return failing is not None and failing.reason != DEFERRED_EARLIER

    def set_back(self, permit: Permit, place: int, error: str) -> None:
        name, now = object_name(permit.visits[place]), time.monotonic()
        self._setbacks.failed(name, printable(error), now, again=bool(permit.made_up))

    def forget_purged(self, is_purged: Callable[[list[str]], bool]) -> None:
        """Forget the failures of purged objects. Their parts are due, and yield nothing."""
        for name in [one for one in self._setbacks.failing if is_purged([one[1]])]:
            self._setbacks.answered(name)

    def retry_holes(self, is_retried: IsRetried = lambda hole, visit: True) -> int:
        holes: dict[int, list[KnownHole]] = {}
        for hole in self._cache.holes():
            holes.setdefault(hole.shard // self._sizing.group_shards, []).append(hole)
        count = 0
        for group in sorted(holes):
            draw = self._draws.again(group)
            if draw is None or not self.may_defer:
                continue
            visits = self._draws.population.visits(draw)
            left_out = self._cache.meta.deferrals.left_out(group)
            places = _places_of_holes(holes[group], visits, left_out, is_retried)
            count += len(places)
            if places:
                self.retry(group, visits, places)
        return count

    def retry(self, group: int, visits: Sequence[PartVisit], places: Sequence[int]) -> None:
        record = self._cache.meta.deferrals
        for place in places:
            self._names[record.first_drawn((group, place))] = object_name(visits[place])
        self._cache.meta.set_deferrals(record.retrying(group, places), retried=len(places))
        self._follow()

    # --- makeup groups ---

    def next(self, group: int, *, idle: bool = False) -> GroupDraw | None:
        """Return the draw of a makeup group if the next group is to be one, or else None."""
        record, now = self._cache.meta.deferrals, time.monotonic()
        # Already recorded, because the disk was full when it was issued.
        if group in record.makeups:
            return self._draws.again(group)
        if not record.pending:
            return None
        most = self._sizing.group_parts(record.draw_number(group))
        trying = set().union(*self._open.values())
        places = self._setbacks.due(now, most, trying, idle=idle, made=len(record.numbers))
        if not places:
            return None
        known = self._candidate
        if known is None or known[0] != places or known[1].group != group:
            self._candidate = (places, self._draws.gathered(group, places))
        assert self._candidate is not None
        return self._candidate[1]

    def record(self, draw: GroupDraw) -> None:
        """Record durably that a group is a makeup group, if `next` returned it."""
        if self._candidate is None or self._candidate[1] is not draw:
            return
        places, _ = self._candidate
        record = self._cache.meta.deferrals
        if record.size + len(places) > self._cache.space.budget.deferred:
            record = record.forgetting(self._oldest_half())
        self._cache.meta.set_deferrals(record.making_up(draw.group, places))
        self._open[draw.group] = {self._names[place] for place in places}
        self._setbacks.made_up(time.monotonic())
        self._candidate = None
        self._follow()

    def _oldest_half(self) -> int:
        """Return the first makeup group that must not be forgotten."""
        numbers = self._cache.meta.deferrals.numbers
        stop = numbers[len(numbers) // 2] if numbers else 0
        return min([stop, *self._open])

    def failed_again(self, permit: Permit) -> float:
        """Return the time for a retry of a makeup group whose objects all still fail."""
        due = self._setbacks.next_try(map(object_name, permit.visits))
        # They answered another group meanwhile.
        return due if due < math.inf else time.monotonic()

    # --- commits ---

    def committing(self, permit: Permit, shards: Sequence[Sidecar]) -> None:
        """Record durably which parts were set aside, before the group is committed."""
        group, record = permit.group, self._cache.meta.deferrals
        left = {place for shard in shards for place in shard.left_out} - record.left_out(group)
        if not left:
            return
        for place in left:
            self._names[record.first_drawn((group, place))] = object_name(permit.visits[place])
        self._cache.meta.set_deferrals(record.deferring(group, left))
        self._follow()

    def committed(self, permit: Permit) -> None:
        """Record that the objects of a committed makeup group answer again."""
        if self._open.pop(permit.group, None) is None:
            return
        left = self._cache.meta.deferrals.left_out(permit.group)
        failing = {object_name(permit.visits[place]) for place in left}
        for name in {object_name(visit) for visit in permit.visits} - failing:
            self._setbacks.answered(name)

    # --- reports ---

    @property
    def missing(self) -> int:
        """Number of parts that were drawn and are not in a shard yet."""
        held = (self._cache.meta.deferrals.makeups[group] for group in self._open)
        return len(self._cache.meta.deferrals.pending) + sum(map(len, held))

    @property
    def tried(self) -> bool:
        return self._setbacks.tried(set().union(*self._open.values()))

    @property
    def status(self) -> SetAsideStatus:
        failing = self._setbacks.failing
        if not failing and not self.missing:
            return SetAsideStatus()
        latest = next(reversed(failing), None)
        if latest is None:
            return SetAsideStatus(self.missing)
        key, why = short_key(latest[1]), failing[latest].reason
        due = max(0.0, self._setbacks.next_try(failing) - time.monotonic())
        return SetAsideStatus(self.missing, len(failing), key, why, due)

    @property
    def words(self) -> str:
        return f"{self.status.words}; it is retried" if self.missing else ""


def object_name(visit: PartVisit) -> ObjectName:
    return visit.entry.store, visit.entry.key


LEAST_HOLES = 10  # fewer prove nothing about the share of bad objects


class HoleCounter:
    """Counts the holes of this run. Those of earlier runs, and retried ones, do not end it."""

    def __init__(self) -> None:
        self._holes = self._visits = 0
        self._reasons: deque[str] = deque(maxlen=3)

    def count(self, permit: Permit, shards: Iterable[Sidecar]) -> list[str]:
        """Count shards that are committed for the first time; return the reasons of their holes."""
        again = {(s.entry.key, s.part) for s in permit.visits if s.renewed}
        found: list[str] = []
        for shard in shards:
            self._visits += shard.parts
            found += [hole_reason(hole.key, hole.reason) for hole in shard.holes]
            self._holes += sum((hole.key, hole.part) not in again for hole in shard.holes)
        self._reasons.extend(found)
        return found

    def check(self, allowed: float, totals: CacheTotals, *, complete: bool) -> None:
        """Raise if holes exceed ``allowed``, both among this run's visits and among all visits."""
        first = self._visits >= totals.drawn_parts
        few = self._holes <= LEAST_HOLES and not (complete and first)
        of_all = totals.holes <= allowed * totals.drawn_parts
        if self._holes <= allowed * self._visits or few or of_all:
            return
        raise SamplingError(
            f"{self._holes} of {self._visits} visits yielded nothing, more than "
            f"sampling.max_skipped ({allowed:g}) allows; raise it to "
            "leave them out. The last: " + "; ".join(_without_repetition(self._reasons)),
            code="GC502",
        )


def _without_repetition(reasons: Iterable[str]) -> list[str]:
    """Return a reason that several objects share only once.

    >>> _without_repetition(["a: it is cut off", "b: it is cut off", "c: it is empty"])
    ['a: it is cut off (likewise b)', 'c: it is empty']
    """
    keys: dict[str, list[str]] = {}
    for reason in reasons:
        key, _, why = reason.partition(": ")
        keys.setdefault(why, []).append(key)
    found = []
    for why, (first, *others) in keys.items():
        more = f" (likewise {', '.join(others)})" if others else ""
        found.append((f"{first}: {why}" if why else first) + more)
    return found


def _places_of_holes(
    holes: Sequence[KnownHole],
    visits: Sequence[PartVisit],
    left_out: frozenset[int],
    is_retried: IsRetried,
) -> list[int]:
    known = {(hole.key, hole.part): hole for hole in holes}
    found = ((at, known.get((s.entry.key, s.part)), s) for at, s in enumerate(visits))
    return [
        at
        for at, hole, visit in found
        if hole is not None and at not in left_out and is_retried(hole, visit)
    ]


def has_new_version(relisted: Iterable[Entry]) -> IsRetried:
    now = {
        (entry.store, entry.key): version_of(entry.etag, entry.size, entry.mtime)
        for entry in relisted
    }

    def is_retried(hole: KnownHole, visit: PartVisit) -> bool:
        return any(
            version not in (None, before)
            for entry in (visit.entry, *visit.partners)
            for version in [now.get((entry.store, entry.key))]
            for before in [
                (entry is visit.entry and hole.version)
                or version_of(entry.etag, entry.size, entry.mtime)
            ]
        )

    return is_retried
