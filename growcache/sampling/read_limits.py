"""Limit the reads in flight at a store: as many as configured, and fewer while it refuses some of them.

The supervisor owns one limit per source. Samplers report the store's answers, and get their
shares over their pipes. So the limit applies to all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from growcache.sampling.sampler_pool import SamplerSlot

# A store refuses some requests even if there are few, which proves nothing.
TOLERATED_SHARE = 0.02
# If half of the reads are refused as often, the cause is a bad gateway, and not an overloaded
# store.
UNRELATED_READS = 0.5
UNRELATED_SHARE = 0.4  # of the share before, because that share was large by chance
MOST_UNRELATED = 0.1  # a larger share always means an overloaded store
UNRELATED_ANSWERS = 100
FOLLOWING = 0.05  # of that share per window
MARGIN = 1.5  # times the share that does not depend on the reads, because it varies
LEAST_ANSWERS = 8  # in a window before its refusals count
# At least, between two decisions, because the effect of one must show before the next.
WINDOW_SECONDS = 0.5
# Of a decrease: the weight of the share of refusals. A refused read returns later than a served
# one.
REFUSAL_WEIGHT = 2.0
LEAST_FACTOR = 0.5
GROWTH_PER_SECOND = 0.05  # of the limit, and at least half a read
FASTER_AFTER_SECONDS = 5.0  # without refusals, after which the growth doubles each second
LEAST_SHARE = 16  # the limit is at least 1/16 of the configured one, and one read per sampler


@dataclass(frozen=True, slots=True)
class Answers:
    """A store's answers to the reads of some time."""

    served: int = 0
    refused: int = 0  # 429, 503, 504, or no answer in time

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.served + other.served, self.refused + other.refused)

    @property
    def total(self) -> int:
        return self.served + self.refused

    @property
    def share(self) -> float:
        return self.refused / max(1, self.total)


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """The reads that may be in flight at one source."""

    reads: float
    since: float = 0.0  # start of the window, monotonic seconds
    quiet_since: float = 0.0  # time of the last decrease
    window: Answers = Answers()
    # Reads and share of refusals before a decrease.
    fell_from: tuple[float, float] | None = None
    unrelated: float = 0.0  # share that is refused even with few reads

    def after(self, answers: Answers, now: float, least: int, most: int) -> ReadLimit:
        """Return the limit after some answers: additive increase, multiplicative decrease."""
        noted = replace(self, window=self.window + answers)
        seconds, window = now - self.since, noted.window
        if seconds < WINDOW_SECONDS:
            return noted
        if window.share > max(TOLERATED_SHARE, MARGIN * self.unrelated):
            if window.total < LEAST_ANSWERS and seconds < 4 * WINDOW_SECONDS:
                return noted
            return noted._fallen(now, least)
        if not window.served:  # nothing is known
            return replace(self, since=now, window=Answers())
        grown = self.reads + seconds * growth_per_second(now - self.quiet_since, self.reads)
        followed = FOLLOWING * window.share + (1 - FOLLOWING) * self.unrelated
        return replace(
            self,
            reads=min(float(most), grown),
            since=now,
            window=Answers(),
            fell_from=self.fell_from if self.fell_from and grown < self.fell_from[0] else None,
            unrelated=followed if self.unrelated else 0.0,
        )

    def _fallen(self, now: float, least: int) -> ReadLimit:
        share = self.window.share
        from_reads, from_share = self.fell_from or (self.reads, share)
        low = max(float(least), UNRELATED_READS * from_reads)
        if self.fell_from and self.reads <= low and share <= MOST_UNRELATED:
            if self.window.total < UNRELATED_ANSWERS:
                return self
            if share >= UNRELATED_SHARE * from_share:
                return ReadLimit(from_reads, now, now, unrelated=share)
        excess = share - self.unrelated
        factor = max(LEAST_FACTOR, 1 - REFUSAL_WEIGHT * excess)
        return replace(
            self,
            reads=max(float(least), self.reads * factor),
            since=now,
            quiet_since=now,
            window=Answers(),
            fell_from=(from_reads, from_share),
        )


def growth_per_second(quiet_seconds: float, reads: float) -> float:
    """Return the growth of the limit, in reads per second.

    It accelerates, because a store without refusals has probably recovered.

    >>> [growth_per_second(seconds, 20.0) for seconds in (1, 5, 6, 8)]
    [1.0, 1.0, 2.0, 8.0]
    """
    step = max(0.5, GROWTH_PER_SECOND * reads)
    return step * math.exp2(min(20.0, max(0.0, quiet_seconds - FASTER_AFTER_SECONDS)))


def shares(reads: int, samplers: int) -> list[int]:
    """Divide a limit among samplers, with at least one read each.

    >>> shares(7, 3), shares(1, 2)
    ([3, 2, 2], [1, 1])
    """
    each, rest = divmod(reads, samplers)
    return [max(1, each + (number < rest)) for number in range(samplers)]


class ReadLimits:
    """The supervisor's side: a limit for each source."""

    def __init__(self, sources: int, workers: int, concurrency: int) -> None:
        self._most = workers * concurrency
        self._least = max(workers, self._most // LEAST_SHARE)
        self._limits = [ReadLimit(float(self._most)) for _ in range(sources)]

    def answered(self, answers: Sequence[Sequence[int]], now: float) -> None:
        """Apply a sampler's report: pairs of served and refused reads, by source."""
        for number, pair in enumerate(answers):
            limit = self._limits[number]
            self._limits[number] = limit.after(Answers(*pair), now, self._least, self._most)

    def hand_out(self, slots: Sequence[SamplerSlot]) -> None:
        """Send samplers their shares if these have changed."""
        by_source = [shares(int(limit.reads), len(slots)) for limit in self._limits]
        for slot, *limits in zip(slots, *by_source, strict=True):
            if slot.ready and slot.reads != limits:
                slot.reads = limits
                slot.send({"type": "reads", "limits": limits})
