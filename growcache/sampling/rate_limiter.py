"""Decides whether the next group may be filled now, or which event has to happen first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

BURST_SECONDS = 0.25


class ByteRateLimit:
    """A debt model: the next read waits until the debt of earlier reads is paid off.

    So large objects need no special case. Hardly any burst is saved up: just enough that the
    delays of a busy event loop cost nothing.
    """

    def __init__(
        self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = 0.0

    def charge(self, nbytes: int) -> None:
        if self._rate:
            earliest = self._clock() - BURST_SECONDS
            self._free_at = max(self._free_at, earliest) + nbytes / self._rate

    def seconds_left(self) -> float:
        return max(0.0, self._free_at - self._clock()) if self._rate else 0.0


def reads_wanted(concurrency: int) -> int:
    """Return the number of visits that a sampler should have, so that no read slot is idle.

    It is half as many again as may be in flight, because the next permit takes some time.
    """
    return concurrency + (concurrency + 1) // 2


LimiterState = Literal["running", "waiting", "full", "complete"]

# The reason why a permit waits, in a word: the label `reason` of
# growcache_waiting_seconds_total.
WaitReason = Literal[
    "start",  # samplers, the schema, labels, a purge list
    "cluster",  # Ray, or a node of it for samplers
    "store",  # its answer, or credentials
    "objects",  # keep failing
    "listing",
    "refetch",  # shards of a checkpoint come first
    "work",  # groups in flight, which are the last wanted ones
    "budget",  # max_egress is reached
    "disk",  # free space, regardless of the bound
    "index",
    "room",  # within the bound
    "bound",  # a higher one, because nothing is ever evicted
    "readers",  # hold shards, or must use them more often
    "complete",
]
DISK_EVENT, STORE_EVENT = "free space on the disk", "the store to answer"


@dataclass(frozen=True, slots=True)
class LimiterInputs:
    refused: str = ""  # the store's reason, and the remedy
    parts_known: bool = True  # the next group has parts left in this round
    listing_complete: bool = True
    needs_whole_listing: bool = False
    complete: bool = False  # everything that the cache may hold is cached
    retrying: int = 0  # failed groups that wait for a retry
    max_retrying: int = 1  # with this many, no new groups start
    last_error: str = ""
    retry_event: str = STORE_EVENT  # event that lets the next attempt succeed
    drawn_samples: int = 0  # of this run, including those in flight
    max_drawn_samples: int | None = None
    set_samples: float = 0.0  # of a fixed set, including those expected from groups in flight
    max_set_samples: int | None = None
    egress_bytes: int = 0  # read from the store in this run
    max_egress_bytes: int | None = None
    egress_spent: bool = False  # a read was refused that does not fit
    egress_in_flight: float = 0.0  # expected reads of groups in flight; 0 without any
    group_egress: float = 0.0  # expected reads of the next group
    index_ok: bool = True  # within its budget
    disk_ok: bool = True  # has its ``min_free``
    group_bytes: int = 0  # of the next group on disk, estimated
    room_bytes: int = 0  # within the bound, without reservations for groups and the listing
    listing_bytes: int = 0  # reserved for the rest of the listing
    evictable_bytes: int = 0  # may be deleted now
    clearing_bytes: int = 0  # may be deleted when their readers release them
    unused: str = ""  # why the other shards must stay, in words
    evicts: bool = True  # by the policy, and in this run
    shrinking: bool = False  # the bound was lowered below the usage
    for_refetch: bool = False  # then only held shards can lack room
    holders: str = ""  # readers of held shards, in words
    refetches: int = 0  # groups that readers wait for, before new ones
    refetches_unlisted: bool = False  # some wait for the listing to end
    set_aside: str = ""  # failing objects, in words; empty while other groups are in progress


@dataclass(frozen=True, slots=True)
class Verdict:
    granted: bool
    state: LimiterState = "running"
    waiting_for: str | None = None  # an event, in words
    final: bool = False  # nothing in this run can change it
    reason: WaitReason | None = None  # of the same event


GRANTED = Verdict(True)
LISTING_FIRST = "the listing to end: room is kept for the rest of it"


def decide(outlook: LimiterInputs) -> Verdict:
    if outlook.refused:
        return _wait(outlook.refused, "store")
    if outlook.for_refetch:
        return _for_budgets(outlook) or _for_refetch_room(outlook) or GRANTED
    if outlook.refetches:
        return _for_refetches(outlook)
    if outlook.complete:
        return Verdict(False, "complete", final=True, reason="complete")
    return _for_work(outlook) or _for_budgets(outlook) or _for_room(outlook) or GRANTED


def _wait(event: str, reason: WaitReason) -> Verdict:
    return Verdict(False, "waiting", event, reason=reason)


def _for_refetches(o: LimiterInputs) -> Verdict:
    if o.refetches_unlisted:
        return _wait(
            "the listing to end: shards of a checkpoint were never drawn here", "listing"
        )
    groups = "1 group" if o.refetches == 1 else f"{o.refetches} groups"
    return _wait(f"refetches first: {groups} that a checkpoint needs", "refetch")


def _for_refetch_room(o: LimiterInputs) -> Verdict | None:
    if o.group_bytes <= o.room_bytes + o.evictable_bytes + o.clearing_bytes:
        return None
    event = f"room for shards of a checkpoint: {o.holders}"
    return _wait(event, reason_of_holders(o.holders))


def _for_work(o: LimiterInputs) -> Verdict | None:
    if o.retrying >= o.max_retrying:
        reason: WaitReason = "disk" if o.retry_event == DISK_EVENT else "store"
        return _wait(f"{o.retry_event} ({o.last_error})", reason)
    if not o.parts_known and not o.listing_complete and o.needs_whole_listing:
        return _wait(
            "the listing to end: the share of a stratum depends on all of it", "listing"
        )
    if not o.parts_known and not o.listing_complete:
        return _wait("the listing to continue: everything listed so far is drawn", "listing")
    if not o.parts_known:
        if o.set_aside:
            return _wait(o.set_aside, "objects")
        return _wait("the groups in flight, the last of this round", "work")
    return None


def _for_budgets(o: LimiterInputs) -> Verdict | None:
    if o.max_drawn_samples is not None and o.drawn_samples >= o.max_drawn_samples:
        return _wait("the groups in flight: --samples is reached", "work")
    if o.max_set_samples is not None and o.set_samples >= o.max_set_samples:
        return _wait("the groups in flight: with them cache.max_samples may be reached", "work")
    if o.max_egress_bytes is not None and (verdict := _for_egress(o, o.max_egress_bytes)):
        return verdict
    # Before the index, because a full disk keeps its log from being truncated.
    if not o.disk_ok:
        return _wait("free space on the disk: less than cache.min_free is left", "disk")
    if not o.index_ok:
        return _wait(
            "room in the index: its budget is used up, or a reader holds its log", "index"
        )
    return None


def _for_egress(o: LimiterInputs, most: int) -> Verdict | None:
    """Return a verdict if the egress budget allows no further group.

    The end of the budget is left to groups in flight, because the reads of an unfinished group
    are lost.
    """
    if o.egress_spent or o.egress_bytes >= most:
        event = f"a new run: sampling.max_egress is reached ({o.egress_bytes:,} bytes read)"
        return Verdict(False, "waiting", event, final=True, reason="budget")
    if o.egress_in_flight and o.egress_bytes + o.egress_in_flight + o.group_egress > most:
        return _wait(
            "the groups in flight: they may need what sampling.max_egress leaves", "work"
        )
    return None


def _for_room(o: LimiterInputs) -> Verdict | None:
    if o.shrinking:
        return _wait("usage to fall below cache.max_bytes, which was lowered", "room")
    short = o.group_bytes - o.room_bytes
    if short <= 0:
        return None
    if not o.evicts:
        return Verdict(False, "full", final=True, reason="room")
    if short <= o.evictable_bytes + o.clearing_bytes:
        return None  # held shards are retired ahead, and the sampler waits in memory
    if short <= o.listing_bytes + o.evictable_bytes + o.clearing_bytes:
        return _wait(LISTING_FIRST, "listing")
    event = o.unused or "shards that may be evicted"
    reason = reason_of_holders(o.unused) if o.unused else "room"
    return Verdict(False, "full", event, reason=reason)


def reason_of_holders(event: str) -> WaitReason:
    """Return why shards stay: readers hold them, but on a full disk no reader can continue.

    >>> reason_of_holders("readers to release shards: 2 snapshots are held")
    'readers'
    """
    return "disk" if event.startswith(DISK_EVENT) else "readers"


FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 5.0
NOTICE_SECONDS = 1.5  # of failures only, before a store counts as silent
SAY_SECONDS = OVER_SECONDS = 3.0  # of an outage, and after its end, before a message
RECENT_SECONDS = 30.0  # for which a failure counts: an attempt and the wait after it


class CircuitBreaker:
    """While the store refuses requests, no group is filled except one trial at intervals.

    It never gives up, because a login may be renewed the next morning. The first outage ends
    when a trial has read anything. A second one ends only with a whole group. One of several
    sources may be refused, and reads of the others would be wasted each time.
    """

    def __init__(self) -> None:
        self.waiting_for = ""
        self._due = 0.0  # monotonic seconds
        self._trial: str | None = None
        self._halts = self._refusals = 0  # since the last complete group

    def is_open(self, now: float) -> bool:
        return bool(self.waiting_for) and (self._trial is not None or now < self._due)

    def granted(self, permit_id: str) -> None:
        if self.waiting_for:
            self._trial = permit_id

    def refused(self, permit_id: str, waiting_for: str, now: float) -> None:
        if not self.waiting_for:
            self._halts += 1
        if not self.waiting_for or permit_id == self._trial:
            self._later(now)
        self.waiting_for = waiting_for

    def ended(self, permit_id: str, now: float) -> None:
        """Record that a permit ended without an answer from the store."""
        if permit_id == self._trial:
            self._later(now)

    def _later(self, now: float) -> None:
        delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(self._refusals, 10))
        self._trial, self._due = None, now + delay
        self._refusals += 1

    def answered(self, permit_id: str, *, whole: bool) -> None:
        """Record that some of a permit, or the ``whole`` group, was read."""
        if self.waiting_for and (permit_id != self._trial or (self._halts > 1 and not whole)):
            return
        self.waiting_for, self._trial = "", None
        if whole:
            self._halts = self._refusals = 0


class StoreSilence:
    def __init__(self) -> None:
        self._since = math.inf  # first failure after the last answer, monotonic seconds
        self._last = -math.inf
        self._awaited = ""
        self._refused = False

    def failed(self, waiting_for: str, now: float, *, refused: bool = False) -> None:
        """Record a failure that is retried. A refusal is an answer of the store."""
        if self._since == math.inf:
            self._since = now
        self._last, self._awaited, self._refused = now, waiting_for, refused

    def answered(self) -> None:
        self._since = math.inf

    def waiting_for(self, now: float) -> str:
        """Return the awaited event, in words; empty if the store answers."""
        noticed = self._refused or now - self._since >= NOTICE_SECONDS
        recent = now - self._last < RECENT_SECONDS
        return self._awaited if self._since < math.inf and noticed and recent else ""


class OutageNotice:
    """Reports an outage once, after some seconds, and its end."""

    def __init__(self) -> None:
        self._since = self._over_since = math.inf  # monotonic seconds
        self._said = False

    def look(self, missing: str, now: float) -> list[str]:
        if missing:
            self._since, self._over_since = min(self._since, now), math.inf
            if self._said or now - self._since < SAY_SECONDS:
                return []
            self._said = True
            return [f"service waits for {missing}, and retries until then"]
        self._over_since = min(self._over_since, now)
        if now - self._over_since < OVER_SECONDS:  # the trial may be refused again
            return []
        self._since = math.inf
        said, self._said = self._said, False
        return ["the store answers again"] if said else []
