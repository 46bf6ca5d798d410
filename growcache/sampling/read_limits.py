"""How many reads may be in flight at a store: as many as are configured, and fewer while it refuses some of them.

The supervisor owns one limit per source. Samplers report what the store answered, and get their shares over their
pipes, so that the limit holds for all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from growcache.sampling.sampler_pool import SamplerSlot

# A store refuses a request now and then however few there are, which says nothing.
TOLERATED_SHARE = 0.02
# Where half of the reads are refused as often, a bad gateway refuses them, and not a full store.
UNRELATED_READS = 0.5
UNRELATED_SHARE = (
    0.4  # of the share before: the one that made the reads fall was a large one by chance
)
MOST_UNRELATED = 0.1  # a larger share is always taken for a full store
UNRELATED_ANSWERS = 100
FOLLOWING = 0.05  # of that share per window
MARGIN = 1.5  # times the share that does not depend on the reads, because it varies
LEAST_ANSWERS = 8  # of a window whose refusals are judged
WINDOW_SECONDS = (
    0.5  # at least between two decisions: the effect of one has to be seen before the next
)
# Of a decrease: the share of the refusals, weighed, because a refused read comes again later than a served one.
REFUSAL_WEIGHT = 2.0
LEAST_FACTOR = 0.5
GROWTH_PER_SECOND = 0.05  # of the limit, and at least half a read
FASTER_AFTER_SECONDS = 5.0  # without refusals the growth doubles each second from then on
LEAST_SHARE = (
    16  # the limit never falls below 1/16 of what is configured, nor one read for each sampler
)


@dataclass(frozen=True, slots=True)
class Answers:
    """What a store did with the reads of some time."""

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
    since: float = 0.0  # when the window began, monotonic seconds
    quiet_since: float = 0.0  # the last decrease
    window: Answers = Answers()
    fell_from: tuple[float, float] | None = None  # reads and share of refusals, before a fall
    unrelated: float = 0.0  # the share that is refused however few reads there are

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
    """Return by how many reads a second the limit grows.

    It grows ever faster, because a store that refuses none any more is most likely over its trouble.

    >>> [growth_per_second(seconds, 20.0) for seconds in (1, 5, 6, 8)]
    [1.0, 1.0, 2.0, 8.0]
    """
    step = max(0.5, GROWTH_PER_SECOND * reads)
    return step * math.exp2(min(20.0, max(0.0, quiet_seconds - FASTER_AFTER_SECONDS)))


def shares(reads: int, samplers: int) -> list[int]:
    """Divide a limit among samplers; each has at least one read.

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
        """Take a sampler's report: pairs of served and refused reads, by source."""
        for number, pair in enumerate(answers):
            limit = self._limits[number]
            self._limits[number] = limit.after(Answers(*pair), now, self._least, self._most)

    def hand_out(self, slots: Sequence[SamplerSlot]) -> None:
        """Tell samplers their shares, where these have changed."""
        by_source = [shares(int(limit.reads), len(slots)) for limit in self._limits]
        for slot, *limits in zip(slots, *by_source, strict=True):
            if slot.ready and slot.reads != limits:
                slot.reads = limits
                slot.send({"type": "reads", "limits": limits})
