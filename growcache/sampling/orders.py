"""Orders in which parts are drawn: bijections that are computed in both directions, and never stored.

A permutation is a Feistel network over the next power of four, iterated until it is inside the
population (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).

If objects have equal weights, turn t visits one more part of every object that still has one,
in a separate order. Objects that are listed later join the current turn. They do not catch up
on earlier turns, because that would fill shard after shard only with new objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.seeding import GOLDEN, Uint64Array, derive_seed, finalize64, stream64

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

_FEISTEL_ROUNDS = 6
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class ManyPermutations:
    """A keyed bijection of 0 … size-1 for each element of an array."""

    sizes: Ints
    keys: Uint64Array

    def forward(self, positions: Ints) -> Ints:
        return self._walk(positions, range(_FEISTEL_ROUNDS), backward=False)

    def inverse(self, elements: Ints) -> Ints:
        return self._walk(elements, range(_FEISTEL_ROUNDS - 1, -1, -1), backward=True)

    def _walk(self, values: Ints, rounds: range, *, backward: bool) -> Ints:
        found = np.zeros(len(values), np.int64)
        left = np.flatnonzero(self.sizes > 1)
        words = values[left].astype(np.uint64)
        halves = _half_bits(self.sizes)
        while len(left):
            of_rounds = (np.full(len(left), number, np.uint64) for number in rounds)
            keys = (stream64(self.keys[left], number) for number in of_rounds)
            words = _feistel(words, halves[left], keys, backward=backward)
            inside = words < self.sizes[left].astype(np.uint64)
            found[left[inside]] = words[inside].astype(np.int64)
            left, words = left[~inside], words[~inside]
        return found


def _half_bits(sizes: Ints) -> Uint64Array:
    """Return half the bits of the smallest power of four that is at least ``sizes``."""
    bits = np.frexp((np.maximum(2, sizes) - 1).astype(np.float64))[1]
    halves: Uint64Array = np.maximum(1, (bits + 1) >> 1).astype(np.uint64)
    return halves


def _feistel(
    words: Uint64Array,
    halves: Uint64Array | np.uint64,
    keys: Iterable[Uint64Array | np.uint64],
    *,
    backward: bool,
) -> Uint64Array:
    """Return the words after one round per key, or the inverse with the keys in reverse."""
    masks = (np.uint64(1) << halves) - np.uint64(1)
    left, right = words >> halves, words & masks
    if backward:
        left, right = right, left
    for key in keys:
        left, right = right, left ^ (finalize64((right + GOLDEN) ^ key) & masks)
    if backward:
        left, right = right, left
    found: Uint64Array = left << halves | right
    return found


@dataclass(frozen=True, slots=True)
class CohortStart:
    first: int
    turn: int


@dataclass(frozen=True)
class _Cohort:
    """Objects that joined in the same turn, those with most parts first."""

    turn: int
    objects: Ints
    parts: Ints

    def visited(self, turns: Ints) -> Ints:
        passed = turns - self.turn
        left = len(self.parts) - np.searchsorted(self.parts, passed, side="right")
        return np.where(passed < 0, 0, left)


class TurnTable:
    """The objects of each turn. ``starts``: first part of every object, and the total."""

    def __init__(
        self, starts: Ints, joined: Sequence[CohortStart] = (CohortStart(0, 0),)
    ) -> None:
        self.starts = starts
        self.joined = tuple(joined)
        parts = np.diff(starts)
        self.parts = parts
        self._ranks = np.zeros(len(parts), np.int64)
        self._cohorts: list[_Cohort] = []
        ends = [*(one.first for one in self.joined[1:]), len(parts)]
        for one, end in zip(self.joined, ends, strict=True):
            self._add(one, parts[one.first : end])
        # Turns at which the number of visited objects changes.
        breaks = [[c.turn, *(c.turn + np.unique(c.parts))] for c in self._cohorts]
        self._turns = np.unique(np.array([turn for some in breaks for turn in some], np.int64))
        self._counts = self._visited(self._turns)
        lengths = self._counts[:-1] * np.diff(self._turns)
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def _add(self, joined: CohortStart, parts: Ints) -> None:
        order = np.argsort(-parts, kind="stable")
        self._ranks[joined.first + order] = np.arange(len(order))
        cohort = _Cohort(joined.turn, joined.first + order, parts[order][::-1])
        self._cohorts.append(cohort)

    @property
    def end(self) -> int:
        return int(self._turns[-1])

    def _visited(self, turns: Ints) -> Ints:
        found = np.zeros(len(turns), np.int64)
        for cohort in self._cohorts:
            found += cohort.visited(turns)
        return found

    def counts(self, turns: Ints) -> Ints:
        found: Ints = self._counts[np.searchsorted(self._turns, turns, side="right") - 1]
        return found

    def before(self, turns: Ints) -> Ints:
        places = np.searchsorted(self._turns, turns, side="right") - 1
        passed = turns - self._turns[places]
        found: Ints = self._before[places] + passed * self._counts[places]
        return found

    def locate(self, visits: Ints) -> tuple[Ints, Ints]:
        """Return the turn of each visit, and its place in the turn."""
        places = np.searchsorted(self._before, visits, side="right") - 1
        turns, within = np.divmod(visits - self._before[places], self._counts[places])
        return self._turns[places] + turns, within

    def objects(self, turns: Ints, ranks: Ints) -> Ints:
        """Return the objects with these ranks among those that a turn visits."""
        found = np.full(len(ranks), -1)
        left = ranks.copy()
        for cohort in self._cohorts:
            visited = cohort.visited(turns)
            mine = (found < 0) & (left < visited)
            found[mine] = cohort.objects[left[mine]]
            left -= visited
        return found

    def ranks(self, turns: Ints, objects: Ints) -> Ints:
        """Return the ranks of objects, the inverse of `objects`."""
        found = self._ranks[objects]
        numbers = self._cohort(objects)
        for number, cohort in enumerate(self._cohorts):
            found += np.where(numbers > number, cohort.visited(turns), 0)
        return found

    def first_turns(self, objects: Ints) -> Ints:
        return np.array([cohort.turn for cohort in self._cohorts])[self._cohort(objects)]

    def _cohort(self, objects: Ints) -> Ints:
        firsts = np.array([one.first for one in self.joined])
        return np.searchsorted(firsts, objects, side="right") - 1


class TurnOrder:
    """An order of all parts, turn by turn. Turns before ``first`` come last.

    ``part_key`` is the same for every edition, so that an object continues where it was.
    """

    def __init__(self, table: TurnTable, turn_key: int, part_key: int, first: int = 0) -> None:
        self.table = table
        self._turn_key = np.uint64(turn_key & _WORD)
        self._part_key = np.uint64(part_key & _WORD)
        self.size = int(table.starts[-1])
        self._skipped = int(table.before(np.array([first]))[0])

    def forward(self, positions: Ints) -> Ints:
        turns, within = self.table.locate((positions + self._skipped) % self.size)
        ranks = self._of_turns(turns).forward(within)
        objects = self.table.objects(turns, ranks)
        parts = self._of_objects(objects).forward(turns - self.table.first_turns(objects))
        found: Ints = self.table.starts[objects] + parts
        return found

    def inverse(self, parts: Ints) -> Ints:
        objects, within = locate(self.table.starts, parts)
        visits = self._of_objects(objects).inverse(within)
        turns = self.table.first_turns(objects) + visits
        places = self._of_turns(turns).inverse(self.table.ranks(turns, objects))
        found: Ints = (self.table.before(turns) + places - self._skipped) % self.size
        return found

    def turn(self, consumed: int) -> int:
        """Return the turn of the order after ``consumed`` positions."""
        visit = consumed + self._skipped
        if visit >= self.size:  # the next part was drawn before the order started
            return self.table.end
        return int(self.table.locate(np.array([visit]))[0][0])

    def _of_turns(self, turns: Ints) -> ManyPermutations:
        keys = stream64(np.full(len(turns), self._turn_key), turns.astype(np.uint64))
        return ManyPermutations(self.table.counts(turns), keys)

    def _of_objects(self, objects: Ints) -> ManyPermutations:
        keys = stream64(np.full(len(objects), self._part_key), objects.astype(np.uint64))
        return ManyPermutations(self.table.parts[objects], keys)


class TurnOrders:
    def __init__(self, *where: int | str) -> None:
        self._where = where
        self._table: TurnTable | None = None

    def make(
        self, edition: int, starts: Ints, round_: int, before: tuple[PartOrder, int] | None
    ) -> TurnOrder:
        """Return the order of an edition.

        ``before``: the round's order of an earlier edition, and the positions drawn from it.
        """
        turn_key = derive_seed(*self._where, "turns", edition, round_)
        part_key = derive_seed(*self._where, "parts of an object", round_)
        if before is None:
            return TurnOrder(self._shared(starts), turn_key, part_key)
        order, passed = before
        assert isinstance(order, TurnOrder)
        turn = order.turn(passed)
        joined = (*order.table.joined, CohortStart(len(order.table.parts), turn))
        return TurnOrder(TurnTable(starts, joined), turn_key, part_key, turn)

    def _shared(self, starts: Ints) -> TurnTable:
        if self._table is None or len(self._table.starts) != len(starts):
            self._table = TurnTable(starts)
        return self._table


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection of 0 … size-1."""

    size: int
    key: int
    _keys: tuple[np.uint64, ...] = field(init=False, repr=False)
    _half: np.uint64 = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keys = tuple(
            np.uint64(derive_seed(self.key, i) & 0xFFFFFFFFFFFFFFFF)
            for i in range(_FEISTEL_ROUNDS)
        )
        object.__setattr__(self, "_keys", keys)
        half = max(1, (max(2, self.size) - 1).bit_length() + 1 >> 1)
        object.__setattr__(self, "_half", np.uint64(half))

    def forward(self, positions: Ints) -> Ints:
        return self._walk(positions, backward=False)

    def inverse(self, elements: Ints) -> Ints:
        return self._walk(elements, backward=True)

    def _walk(self, values: Ints, *, backward: bool) -> Ints:
        keys = self._keys[::-1] if backward else self._keys
        words = _feistel(values.astype(np.uint64), self._half, keys, backward=backward)
        size = np.uint64(self.size)
        outside = np.flatnonzero(words >= size)
        while len(outside):
            words[outside] = _feistel(words[outside], self._half, keys, backward=backward)
            outside = outside[words[outside] >= size]
        return words.astype(np.int64)


class PartOrder(Protocol):
    """A bijection of 0 … size-1: the order of parts."""

    @property
    def size(self) -> int:
        """The number of parts."""

    def forward(self, positions: Ints) -> Ints:
        """Return the parts at these positions of the order."""

    def inverse(self, elements: Ints) -> Ints:
        """Return the positions of these parts."""


def locate(starts: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """Return (object, part within it) of each part. ``starts`` is int64 [objects + 1]."""
    ordinals = np.searchsorted(starts, parts, side="right") - 1
    return ordinals, parts - starts[ordinals]
