"""Holes: how many this run may have, and which of them are tried again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from growcache.cache.cache import Cache
from growcache.cache.holes import NotedHole
from growcache.cache.index import Totals
from growcache.cache.sidecar import Sidecar, version_of
from growcache.errors import SamplingError
from growcache.remote.store import Entry
from growcache.sampling.drawing import Drawing
from growcache.sampling.makeups import Makeups
from growcache.sampling.messages import Permit, Stop
from growcache.sampling.reasons import reason

LEAST_HOLES = 10  # so few say nothing about the share of bad objects
IsRetried = Callable[[NotedHole, Stop], bool]


class Skipped:
    """Counts the visits of this run that yielded nothing: those of earlier ones doom no other.

    Nor do holes that were tried again, and are some still.
    """

    def __init__(self) -> None:
        self._holes = self._visits = 0
        self._reasons: deque[str] = deque(maxlen=3)

    def count(self, permit: Permit, shards: Iterable[Sidecar]) -> list[str]:
        """Count shards that were never committed before; return the reasons of their holes."""
        again = {(s.entry.key, s.part) for s in permit.stops if s.renewed}
        found: list[str] = []
        for shard in shards:
            self._visits += shard.parts
            found += [reason(hole.key, hole.reason) for hole in shard.holes]
            self._holes += sum((hole.key, hole.part) not in again for hole in shard.holes)
        self._reasons.extend(found)
        return found

    def check(self, allowed: float, totals: Totals, *, complete: bool) -> None:
        """End the service where there are too many, of this run's visits and of all.

        Args:
            allowed: `sampling.max_skipped`.
            totals: of the cache.
            complete: whether no more visits will come: of a first run few holes count then, too.

        Raises:
            SamplingError: there are.
        """
        first = self._visits >= totals.drawn_parts
        few = self._holes <= LEAST_HOLES and not (complete and first)
        of_all = totals.holes <= allowed * totals.drawn_parts
        if self._holes <= allowed * self._visits or few or of_all:
            return
        raise SamplingError(
            f"{self._holes} of {self._visits} visits yielded nothing, more than "
            f"sampling.max_skipped ({allowed:g}) allows; raise it to "
            "leave them out. The last: " + "; ".join(self._reasons)
        )


def retry_holes(
    cache: Cache,
    drawing: Drawing,
    makeups: Makeups,
    group_shards: int,
    is_retried: IsRetried = lambda hole, stop: True,
) -> int:
    """Let holes that are known be tried again; return how many.

    Args:
        cache: that has them.
        drawing: tells which visit each was.
        makeups: that bring them.
        group_shards: shards in a group.
        is_retried: tells, by the hole and its visit, which ones.
    """
    holes: dict[int, list[NotedHole]] = {}
    for hole in cache.holes():
        holes.setdefault(hole.shard // group_shards, []).append(hole)
    count = 0
    for group in sorted(holes):
        draw = drawing.again(group)
        if draw is None or not makeups.may_defer:
            continue
        stops = drawing.population.stops(draw)
        wanted = _places(holes[group], stops, cache.deferrals.left_out(group), is_retried)
        count += makeups.retry(group, stops, wanted)
    return count


def _places(
    holes: Sequence[NotedHole],
    stops: Sequence[Stop],
    left_out: frozenset[int],
    is_retried: IsRetried,
) -> list[int]:
    known = {(hole.key, hole.part): hole for hole in holes}
    found = ((at, known.get((s.entry.key, s.part)), s) for at, s in enumerate(stops))
    return [
        at
        for at, hole, stop in found
        if hole is not None and at not in left_out and is_retried(hole, stop)
    ]


def rewritten(relisted: Iterable[Entry]) -> IsRetried:
    """Return what tells holes of objects of which another version is listed now."""
    now = {
        (entry.store, entry.key): version_of(entry.etag, entry.size, entry.mtime)
        for entry in relisted
    }

    def is_retried(hole: NotedHole, stop: Stop) -> bool:
        return any(
            version not in (None, before)
            for entry in (stop.entry, *stop.partners)
            for version in [now.get((entry.store, entry.key))]
            for before in [
                (entry is stop.entry and hole.version)
                or version_of(entry.etag, entry.size, entry.mtime)
            ]
        )

    return is_retried
