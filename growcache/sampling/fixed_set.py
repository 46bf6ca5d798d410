"""A fixed set of exactly `cache.max_samples` samples.

Shards count in the order of their numbers until the set is complete, and the last one is cut.
So the set depends on the shards, and not on the speed of samplers. A group is written after the
sizes of all earlier groups are known. Small groups follow the planned ones
(`Sizing.parts_given`), and make up for holes and skipped samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from growcache.cache.cache import Cache
from growcache.sampling.group_queue import GroupQueue, IssuedPermit


def kept_lengths(counts: Sequence[int], left: int) -> list[int]:
    """Return the number of samples of each shard that are kept.

    >>> kept_lengths([4, 3, 5], 6), kept_lengths([4, 3], 9)
    ([4, 2, 0], [4, 3])
    """
    kept = []
    for count in counts:
        kept.append(min(count, max(0, left)))
        left -= kept[-1]
    return kept


def until_reached(counts: Sequence[int], wanted: int) -> int:
    """Return the number of first shards that together have ``wanted`` samples, or all.

    >>> until_reached([4, 3, 5], 5), until_reached([4, 3, 5], 4), until_reached([4], 0)
    (2, 1, 0)
    """
    shards = 0
    while wanted > 0 and shards < len(counts):
        wanted -= counts[shards]
        shards += 1
    return shards


class FixedSet:
    def __init__(self, most: int | None, cache: Cache, group_queue: GroupQueue) -> None:
        """Start with the committed shards. ``most`` is None for a set without a fixed size.

        That is also the case if an earlier version began it.
        """
        self.most = most
        self._cache = cache
        self._group_queue = group_queue

    @property
    def is_whole(self) -> bool:
        return self.most is not None and self._samples >= self.most

    @property
    def _samples(self) -> int:
        """Samples of the set, including shards that return after they are rewritten."""
        return self._cache.totals().samples + self._cache.returning_samples

    def expected(self, permits: Iterable[IssuedPermit], per_visit: float) -> float:
        """Return the expected samples of the set after the groups in flight are committed."""
        totals = self._cache.totals()
        if totals.drawn_parts:
            per_visit = totals.drawn / totals.drawn_parts
        coming = (
            len(one.permit.visits) * per_visit if one.samples is None else sum(one.samples)
            for one in permits
            if one.fresh
        )
        return self._samples + sum(coming)

    def awaits_earlier(self, issued: IssuedPermit, permits: Iterable[IssuedPermit]) -> bool:
        """Whether an encoded group waits until the sizes of earlier groups are known."""
        if self.most is None or not issued.fresh:
            return False
        group, permits = issued.permit.group, list(permits)
        is_next = not any(
            one.permit.group < group and one.fresh and not one.granted for one in permits
        )
        return self.awaits_open(issued) or not is_next or self._left(permits) <= 0

    def awaits_open(self, issued: IssuedPermit) -> bool:
        """Whether an encoded group waits for a group that no sampler fills yet."""
        is_open = self._group_queue.has_open_below(issued.permit.group)
        return self.most is not None and bool(issued.fresh) and issued.waits and is_open

    def _left(self, permits: Iterable[IssuedPermit]) -> int:
        """Return the samples that the set lacks and that were not granted yet."""
        coming = (sum(one.samples or ()) for one in permits if one.granted and one.fresh)
        return (self.most or 0) - self._samples - sum(coming)

    def cut(
        self, issued: IssuedPermit, permits: Iterable[IssuedPermit]
    ) -> Sequence[int] | None:
        """Return the lengths to which the shards of an encoded group are cut, or None for no cut."""
        if self.most is None or issued.samples is None:
            return None
        if issued.fresh:
            lengths = kept_lengths(issued.samples, self._left(permits))
        else:  # lost shards return unchanged
            lengths = self._lengths_before(issued)
        return None if lengths == list(issued.samples) else lengths

    def _lengths_before(self, issued: IssuedPermit) -> list[int]:
        numbers = issued.permit.written
        known: Mapping[int, int] = self._cache.lengths(numbers)
        counts = zip(numbers, issued.samples or (), strict=True)
        return [min(count, known.get(number, count)) for number, count in counts]
