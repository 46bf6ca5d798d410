"""Which samples a visit yields where some can only be fetched together. Pure.

A chunk or a row group is such a unit: whoever wants one of its samples fetches them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from growcache.remote.formats.objects import Visit
from growcache.seeding import generator

UnitOf = Callable[[int], range]
"""The ordinals of the samples that share a unit with the sample of this ordinal."""


def chosen(samples: int, visit: Visit, key: str, unit_of: UnitOf) -> Sequence[int]:
    """Return the ordinals of a visit's samples, ascending.

    Args:
        samples: of the object.
        visit: which of them.
        key: of the object.
        unit_of: what is fetched together.
    """
    if (given := visit.given(samples)) is not None:
        return given
    mine = share_of_units(samples, visit, unit_of)
    return mine if visit.take is None else _taken(mine, visit, key, unit_of)


def share_of_units(samples: int, visit: Visit, unit_of: UnitOf) -> range:
    """Return the ordinals of the samples in the visit's part: contiguous, possibly none.

    As `objects.share` does, but a border that lies within half a part of one of a unit is
    moved there: parts that are worth about a unit are units, far smaller ones stay as they
    are. Borders keep their order, so every sample is in exactly one part.

    >>> tens = lambda ordinal: range(ordinal // 10 * 10, ordinal // 10 * 10 + 10)
    >>> [share_of_units(32, Visit(part, 3, 0, 0), tens) for part in range(3)]
    [range(0, 10), range(10, 20), range(20, 32)]
    """
    return range(
        _border(samples, visit.part, visit.parts, unit_of),
        _border(samples, visit.part + 1, visit.parts, unit_of),
    )


def _border(samples: int, part: int, parts: int, unit_of: UnitOf) -> int:
    at = part * samples // parts
    if part in (0, parts) or at >= samples:
        return at
    unit = unit_of(at)
    near = unit.start if at - unit.start <= unit.stop - at else unit.stop
    return near if 2 * parts * abs(near - at) <= samples else at


def _taken(mine: range, visit: Visit, key: str, unit_of: UnitOf) -> Sequence[int]:
    """Return so many at random, out of as few units as hold them.

    The first unit is that of a random sample, so a large one is as much likelier as it has
    more samples, and all samples are alike in that.
    """
    missing = visit.take or 0
    if missing >= len(mine):
        return mine
    rng = generator(
        "take", visit.seed, visit.round, visit.chosen_by(key), visit.part, visit.parts
    )
    found: list[int] = []
    seen: set[int] = set()
    while missing > 0:
        unit = unit_of(mine[int(rng.integers(len(mine)))])
        if unit.start in seen:
            continue
        seen.add(unit.start)
        first, stop = max(unit.start, mine.start), min(unit.stop, mine.stop)
        count = min(missing, stop - first)
        picked = rng.choice(stop - first, count, replace=False)
        found += [first + int(i) for i in picked]
        missing -= count
    return sorted(found)
