"""The draws of a cache whose strata are drawn by shares, not as often as they have samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from growcache.sampling.cycle import Cycle, Independent, OrderOf
from growcache.sampling.draws import Draw, Ints, Order, Sizing, Span
from growcache.sampling.strata import Floats, Slots, Weights, quotas, shares
from growcache.sampling.turns import TurnOrders


@dataclass(frozen=True)
class Strata:
    """The parts of an edition by their strata.

    Attributes:
        names: of the strata; the same number means the same stratum in every edition.
        parts: of each.
        place: returns parts by their number in the edition, for parts by their numbers in a
            stratum.
        starts: returns the first part of every object of a stratum, and the total, by their
            numbers in the stratum.
        natural: how often each is drawn where none is favoured.
    """

    names: Sequence[str]
    parts: Ints
    place: Callable[[int, Ints], Ints]
    starts: Callable[[int], Ints]
    natural: Ints


# Says how many draws of a block each stratum of an edition has.
Deal: TypeAlias = Callable[[Span, Strata], Ints]


def weighted(weights: Weights) -> Deal:
    """Return what deals by weights; see `strata.shares`."""
    return lambda _, strata: quotas(shares(strata.names, strata.natural, weights))


@dataclass(frozen=True)
class _Era:
    """The groups that one edition is drawn for.

    Attributes:
        span: of the edition.
        strata: its parts.
        slots: whose turn each draw is.
        passed: draws in front of the era, and
        drawn: how many of these each stratum had.
        weights: of the parts of each stratum.
    """

    span: Span
    strata: Strata
    slots: Slots
    passed: int
    drawn: Ints
    weights: Floats

    def before(self, number: int) -> Ints:
        """Return how many of the draws before this one each stratum had."""
        found = self.slots.before(number - self.passed)
        found[: len(self.drawn)] += self.drawn
        return found


class StratifiedDraws:
    """As `draws.Draws`, group after group, in any order, by shares of the strata.

    Args:
        seed: of the order.
        sizing: how many parts a group has.
        deal: says how many draws each stratum has.
        strata: returns the parts of so many listed objects, by their strata.
        replacement: independent draws within a stratum instead of permutations.
        turns: the objects of a stratum take turns.
    """

    def __init__(
        self,
        seed: int,
        sizing: Sizing,
        deal: Deal,
        strata: Callable[[int], Strata],
        *,
        replacement: bool = False,
        turns: bool = False,
    ) -> None:
        self._seed = seed
        self._sizing = sizing
        self._deal = deal
        self._strata = strata
        self._replacement = replacement
        self._turns = turns
        self._eras: list[_Era] = []
        self._cycles: list[Cycle | Independent] = []

    def add(self, span: Span) -> None:
        """Let groups from ``span.first_group`` on draw from a larger edition.

        Raises:
            ConfigError: the weights name a stratum that it does not have.
        """
        strata = self._strata(span.objects)
        slots = Slots(self._deal(span, strata), self._seed, span.edition)
        passed, drawn = 0, np.zeros(0, np.int64)
        if self._eras:
            passed = self._draws_before(span.first_group)
            drawn = self._eras[-1].before(passed)
        natural = strata.natural / strata.natural.sum()
        given = slots.counts / slots.counts.sum()
        weights = np.divide(natural, given, out=np.zeros(len(given)), where=given > 0)
        self._eras.append(_Era(span, strata, slots, passed, drawn, weights))
        self._grow(span.edition, strata.parts, drawn)

    def _grow(self, edition: int, parts: Ints, drawn: Ints) -> None:
        for stratum in range(len(self._cycles), len(parts)):
            self._cycles.append(self._cycle(stratum))
        for stratum, cycle in enumerate(self._cycles):
            passed = int(drawn[stratum]) if stratum < len(drawn) else 0
            cycle.grow(edition, int(parts[stratum]), passed)

    def _cycle(self, stratum: int) -> Cycle | Independent:
        where = (self._seed, "stratum", stratum)
        if self._replacement:
            return Independent(*where)
        return Cycle(*where, order=self._by_turns(stratum) if self._turns else None)

    def _by_turns(self, stratum: int) -> OrderOf:
        orders = TurnOrders(self._seed, "stratum", stratum)

        def make(
            edition: int, parts: int, round_: int, before: tuple[Order, int] | None
        ) -> Order:
            era = next(era for era in self._eras if era.span.edition == edition)
            return orders.make(edition, era.strata.starts(stratum), round_, before)

        return make

    def group(self, number: int) -> Draw | None:
        """Return what group ``number`` holds; None past the end of a fixed set.

        Raises:
            LookupError: no edition covers the group yet.
        """
        start, stop = self._draws_before(number), self._draws_before(number + 1)
        era = self._era(number)
        if start == stop:
            return None
        strata = era.slots.run(start - era.passed, stop - era.passed)
        parts, rounds = np.zeros(len(strata), np.int64), np.zeros(len(strata), np.int64)
        before = era.before(start)
        for stratum in np.unique(strata).tolist():
            mine = np.flatnonzero(strata == stratum)
            first = int(before[stratum])
            drawn = self._cycles[stratum].draw(first, first + len(mine))
            parts[mine] = era.strata.place(stratum, drawn.parts)
            rounds[mine] = drawn.rounds
        weights = era.weights[strata].astype(np.float32)
        edition = era.span.edition
        return Draw(number, edition, self._round(era, before), parts, rounds, weights)

    def round_of(self, number: int) -> int:
        """Return the earliest round that a stratum is in before group ``number``."""
        era = self._era(number)
        return self._round(era, era.before(self._draws_before(number)))

    def beginning(self, number: int) -> Ints:
        """Return the strata that another round of begins in a group."""
        era = self._era(number)
        before = era.before(self._draws_before(number))
        after = era.before(self._draws_before(number + 1))
        begun = np.flatnonzero((before > 0) & (after > before))
        rounds = (
            [self._cycles[s].round_of(int(draws[s]) - 1) for draws in (before, after)]
            for s in begun
        )
        mask = np.array([first != last for first, last in rounds], np.bool_)
        return begun[mask]

    def rounds(self, number: int) -> Floats:
        """Return how often each stratum was drawn before a group; float64 [strata]."""
        era = self._era(number)
        drawn = era.before(self._draws_before(number))
        found: Floats = drawn / np.maximum(era.strata.parts, 1)
        return found

    def distinct(self, number: int) -> int:
        """Return how many different parts the groups before this one hold."""
        if not self._eras:
            return 0
        era = self._era(number)
        before = era.before(self._draws_before(number))
        return int(np.minimum(before, era.strata.parts).sum())

    def _round(self, era: _Era, before: Ints) -> int:
        drawn = np.flatnonzero(era.slots.counts)
        return min(self._cycles[stratum].round_of(int(before[stratum])) for stratum in drawn)

    def _draws_before(self, group: int) -> int:
        draws = self._sizing.parts_before(group)
        limit = self._sizing.max_parts
        return draws if limit is None else min(draws, limit)

    def _era(self, number: int) -> _Era:
        known = [era for era in self._eras if era.span.first_group <= number]
        if not known:
            raise LookupError(f"no edition covers group {number}")
        return known[-1]
