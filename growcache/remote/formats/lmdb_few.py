"""A few of very many values, at random, by reading a few leaves of their tree.

No page says how many values lie below it, so to number all of them would take all leaves. Leaves
are met by random positions instead, which favour some: those of branches with few pages, and
the values of leaves with few. Against that, of the leaves that were met the less favoured is taken
always, and each other one as seldom as it is favoured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from growcache.remote.formats.lmdb_pages import BRANCH, LEAF, Page
from growcache.remote.formats.lmdb_tree import Found, Top, Trees, Walk, refuse_names
from growcache.remote.formats.objects import Reader, Visit
from growcache.seeding import generator

LEAVES = 8  # that are met at a time, side by side, and that values are taken of
MOST_TIMES = 32  # after which there are no more values
_STEPS = 1 << 62  # of random positions


@dataclass(frozen=True, slots=True)
class _Spot:
    """A page on the way to a random position.

    Attributes:
        page: its number.
        start: its own first position,
        width: and how many are its own; a page of the upper end has one.
        at: the position that is looked for.
    """

    page: int
    start: Fraction
    width: Fraction
    at: Fraction

    def below(self, page: Page) -> _Spot:
        """Return the same of the page below that has the position."""
        page.must_be(BRANCH)
        width = self.width / page.count
        index = math.floor((self.at - self.start) / width)
        return _Spot(page.child(index), self.start + index * width, width, self.at)


@dataclass(frozen=True, slots=True)
class _Met:
    """A leaf that was met.

    Attributes:
        start: its first position.
        page: it.
        values: those of the visit's part.
        share: its positions in the part.
    """

    start: Fraction
    page: Page
    values: list[Found]
    share: Fraction

    @property
    def slighted(self) -> float:
        """How much too seldom its values would be taken."""
        return len(self.values) / float(self.share)


async def few(trees: Trees, reader: Reader, top: Top, visit: Visit) -> list[Found]:
    """Return as many values of a part at random as the visit takes, in their order.

    Args:
        trees: what is read.
        reader: of the object.
        top: of its tree.
        visit: to it; it takes some.
    """
    take, place = visit.take or 0, (visit.part, visit.parts)
    rng = generator("take", visit.seed, visit.round, reader.entry.key, *place)
    near = top.levels <= 1 and len(top.pages) <= LEAVES * visit.parts
    if not near and take * visit.parts < top.entries:
        return await _Meeting(trees, reader, top, visit).some(take, rng)
    found = await trees.find(reader, top, *place)
    if take >= len(found):
        return found
    return [found[i] for i in sorted(rng.choice(len(found), take, replace=False))]


class _Meeting:
    """One visit's leaves."""

    def __init__(self, trees: Trees, reader: Reader, top: Top, visit: Visit) -> None:
        self._trees = trees
        self._reader = reader
        self._top = top
        pages = len(top.pages)
        self._first = Fraction(visit.part * pages, visit.parts)
        self._last = Fraction((visit.part + 1) * pages, visit.parts)
        self._met: dict[Fraction, _Met] = {}

    async def some(self, take: int, rng: np.random.Generator) -> list[Found]:
        """Return so many values."""
        chosen: set[tuple[Fraction, int]] = set()
        for _ in range(MOST_TIMES):
            leaves = await self._meet(rng.integers(_STEPS, size=LEAVES).tolist())
            most = max(leaf.slighted for leaf in self._met.values())
            for leaf in leaves:
                if rng.random() * most < leaf.slighted:
                    missing = min(-(-take // LEAVES), take - len(chosen))
                    chosen |= _picked(leaf, missing, chosen, rng)
            if len(chosen) == take:
                break
        if not any(leaf.values for leaf in self._met.values()):
            refuse_names(self._walk, [leaf.page for leaf in self._met.values()])
        return [self._met[at].values[i] for at, i in sorted(chosen)]

    @property
    def _walk(self) -> Walk:
        return self._trees.walk(self._reader, self._top)

    async def _meet(self, draws: Sequence[int]) -> list[_Met]:
        """Return the leaves of random positions; one may be there twice."""
        top, walk, length = self._top, self._walk, self._last - self._first
        places = [self._first + length * Fraction(n, _STEPS) for n in draws]
        spots = [_Spot(top.pages[int(at)], Fraction(int(at)), Fraction(1), at) for at in places]
        for _ in range(top.levels - 1):
            pages = await _read(walk, spots)
            spots = [spot.below(pages[spot.page]) for spot in spots]
        leaves = await _read(walk, spots)
        for spot in spots:
            if spot.start not in self._met:
                self._met[spot.start] = await self._leaf(spot, leaves[spot.page])
        return [self._met[spot.start] for spot in spots]

    async def _leaf(self, spot: _Spot, page: Page) -> _Met:
        page.must_be(LEAF)
        start, walk = max(self._first, spot.start), self._walk
        stop = min(self._last, spot.start + spot.width)
        first = math.ceil((start - spot.start) / spot.width * page.count)
        last = math.ceil((stop - spot.start) / spot.width * page.count)
        values = [one for i in range(first, last) for one in await walk.values(page, i)]
        return _Met(spot.start, page, values, stop - start)


async def _read(walk: Walk, spots: Sequence[_Spot]) -> dict[int, Page]:
    numbers = list(dict.fromkeys(spot.page for spot in spots))
    return dict(zip(numbers, await walk.read(numbers), strict=True))


def _picked(
    leaf: _Met, most: int, chosen: set[tuple[Fraction, int]], rng: np.random.Generator
) -> set[tuple[Fraction, int]]:
    """Return values of a leaf that were not chosen yet, at random."""
    fresh = [i for i in range(len(leaf.values)) if (leaf.start, i) not in chosen]
    picked = rng.permutation(len(fresh))[:most]
    return {(leaf.start, fresh[i]) for i in picked}
