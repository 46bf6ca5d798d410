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
LEAST_ANSWERS = 8  # of a window whose refusals are judged
WINDOW_SECONDS = (
    0.5  # at least between two decisions: the effect of one has to be seen before the next
)
# Of a decrease: the share of the refusals, weighed, because a refused read comes again later than a served one.
REFUSAL_WEIGHT = 2.0
LEAST_FACTOR = 0.5
GROWTH_PER_SECOND = 0.05  # of what is configured, and at least one read
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


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """The reads that may be in flight at one source."""

    reads: float
    since: float = 0.0  # when the window began, monotonic seconds
    quiet_since: float = 0.0  # the last decrease
    window: Answers = Answers()

    def after(self, answers: Answers, now: float, least: int, most: int) -> ReadLimit:
        """Return the limit after some answers: additive increase, multiplicative decrease."""
        window = self.window + answers
        seconds = now - self.since
        if seconds < WINDOW_SECONDS:
            return replace(self, window=window)
        share = window.refused / max(1, window.total)
        if share > TOLERATED_SHARE:
            if window.total < LEAST_ANSWERS and seconds < 4 * WINDOW_SECONDS:
                return replace(self, window=window)
            factor = max(LEAST_FACTOR, 1 - REFUSAL_WEIGHT * share)
            return ReadLimit(max(float(least), self.reads * factor), now, now)
        if not window.served:  # nothing is known
            return replace(self, since=now, window=Answers())
        grown = self.reads + seconds * growth_per_second(now - self.quiet_since, most)
        return ReadLimit(min(float(most), grown), now, self.quiet_since)


def growth_per_second(quiet_seconds: float, most: int) -> float:
    """Return by how many reads a second the limit grows.

    It grows ever faster, because a store that refuses none any more is most likely over its trouble.

    >>> [growth_per_second(seconds, 32) for seconds in (1, 5, 6, 8)]
    [1.6, 1.6, 3.2, 12.8]
    """
    step = max(1.0, GROWTH_PER_SECOND * most)
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
