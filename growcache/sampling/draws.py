"""The parts of a group of shards: a pure function of (seed, editions, group number).

Permuted blocks divide the draws of a group among the strata. Each stratum has its own order
(`stratum_draws`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from growcache.sampling.draw_notes import DrawNotes
from growcache.sampling.orders import Floats, Ints, PartOrder, Permutation, TurnOrders
from growcache.sampling.sizing import RAMP_END, Sizing
from growcache.sampling.stratum_draws import (
    DrawnEdition,
    EarlierOrder,
    EditionStrata,
    IndependentDraws,
    MakeOrder,
    StratumDraws,
)
from growcache.seeding import derive_seed, generator_at

_BLOCKS_IN_MEMORY = 4
_MEMOS = 512  # groups whose first draw is remembered


@dataclass(frozen=True, slots=True)
class GroupDraw:
    """The parts of one group, by their number in the edition."""

    group: int
    edition: int
    round: int  # the earliest of several strata
    parts: Ints
    rounds: Ints | None = None  # of each part; None: all are of ``round``
    weights: npt.NDArray[np.float32] | None = None  # undo the bias of strata


class StratumBlocks:
    def __init__(self, counts: Ints, *where: int | str) -> None:
        self.counts = counts
        self._where = where
        self._size = int(counts.sum())
        self._blocks: OrderedDict[int, Ints] = OrderedDict()

    def run(self, start: int, stop: int) -> Ints:
        first, last = start // self._size, -(-stop // self._size)
        blocks = [self._block(number) for number in range(first, last)]
        whole = np.concatenate([*blocks, np.zeros(0, np.int64)])
        return whole[start - first * self._size : stop - first * self._size]

    def before(self, number: int) -> Ints:
        whole, within = divmod(number, self._size)
        head = self._block(whole)[:within] if within else np.zeros(0, np.int64)
        return whole * self.counts + np.bincount(head, minlength=len(self.counts))

    def _block(self, number: int) -> Ints:
        if number not in self._blocks:
            strata = np.repeat(np.arange(len(self.counts)), self.counts)
            rng = generator_at("strata", *self._where, number)
            self._blocks[number] = rng.permutation(strata)
            if len(self._blocks) > _BLOCKS_IN_MEMORY:
                self._blocks.popitem(last=False)
        return self._blocks[number]


@dataclass(frozen=True)
class EditionDraws:
    edition: DrawnEdition
    blocks: StratumBlocks | None
    first: int  # number of its first draw
    drawn: Ints  # earlier draws of each stratum
    weights: Floats | None  # of the parts of each stratum

    def before(self, draw: int) -> Ints:
        within = draw - self.first
        found = np.array([within]) if self.blocks is None else self.blocks.before(within)
        found[: len(self.drawn)] += self.drawn
        return found

    def strata_of(self, start: int, stop: int) -> Ints:
        if self.blocks is None:
            return np.zeros(stop - start, np.int64)
        return self.blocks.run(start - self.first, stop - self.first)

    @property
    def drawn_strata(self) -> Ints:
        return (
            np.zeros(1, np.int64) if self.blocks is None else np.flatnonzero(self.blocks.counts)
        )


class Draws:
    """The draws of one cache, for groups in any order. Ascending is fastest."""

    def __init__(
        self,
        seed: int,
        sizing: Sizing,
        *,
        turns: bool = False,
        replacement: bool = False,
        notes: DrawNotes | None = None,
    ) -> None:
        self._notes = notes
        self._seed = seed
        self._sizing = sizing
        self._turns = turns
        self._replacement = replacement
        self._editions: list[EditionDraws] = []
        self._strata: list[StratumDraws | IndependentDraws] = []
        self._marks: list[tuple[int, int]] = []  # group, and number of earlier draws; ascending

    def add(self, edition: DrawnEdition) -> None:
        group = edition.first_group
        at = self._draws_before(group) if self._editions else 0
        # The last of several editions at one group counts.
        self._editions = [
            edition_draws
            for edition_draws in self._editions
            if edition_draws.edition.first_group < group
        ]
        drawn = self._editions[-1].before(at) if self._editions else np.zeros(0, np.int64)
        self._editions.append(self._edition_draws(edition, at, drawn))
        for stratum in range(len(self._strata), len(edition.strata.own)):
            self._strata.append(self._stratum_draws(stratum, dealt=edition.quotas is not None))
        for stratum, draws in enumerate(self._strata):
            draws.grow(edition, int(drawn[stratum]) if stratum < len(drawn) else 0)
        self._marks = [mark for mark in self._marks if mark[0] < group]
        self._marks.append((group, at))

    def recall(self) -> None:
        """Continue from the notes, after all editions were added."""
        for draws in self._strata:
            draws.recall()

    def _edition_draws(self, edition: DrawnEdition, at: int, drawn: Ints) -> EditionDraws:
        if edition.quotas is None:
            return EditionDraws(edition, None, at, drawn, None)
        blocks = StratumBlocks(edition.quotas, self._seed, edition.number)
        natural = edition.strata.natural / edition.strata.natural.sum()
        given = blocks.counts / blocks.counts.sum()
        weights = np.divide(natural, given, out=np.zeros(len(given)), where=given > 0)
        return EditionDraws(edition, blocks, at, drawn, weights)

    def _stratum_draws(self, stratum: int, *, dealt: bool) -> StratumDraws | IndependentDraws:
        where = (self._seed, "stratum", stratum) if dealt else (self._seed,)
        if self._replacement:
            return IndependentDraws(stratum, *where)
        make = _turns_of if self._turns else _permutations_of
        return StratumDraws(stratum, make(stratum, *where), self._notes)

    def group(self, number: int) -> GroupDraw | None:
        """Return the draw of a group, or None after the end of a fixed set.

        Raises:
            LookupError: No edition covers the group yet.
        """
        edition_draws = self._edition_of(number)
        start, stop = self._draws_before(number), self._draws_before(number + 1)
        if start == stop:
            return None
        strata, before = edition_draws.strata_of(start, stop), edition_draws.before(start)
        parts, rounds = np.zeros(len(strata), np.int64), np.zeros(len(strata), np.int64)
        for stratum in np.unique(strata).tolist():
            mine = np.flatnonzero(strata == stratum)
            first = int(before[stratum])
            local, rounds[mine] = self._strata[stratum].draw(first, first + len(mine))
            parts[mine] = edition_draws.edition.strata.place(stratum, local)
        weights = (
            None
            if edition_draws.weights is None
            else edition_draws.weights[strata].astype(np.float32)
        )
        is_one_round = weights is None and not self._replacement
        return GroupDraw(
            number,
            edition_draws.edition.number,
            self._round(edition_draws, before),
            parts,
            None if is_one_round else rounds,
            weights,
        )

    def round_of(self, number: int) -> int:
        edition_draws = self._edition_of(number)
        return self._round(edition_draws, edition_draws.before(self._draws_before(number)))

    def beginning(self, number: int) -> Ints:
        """Return the strata that start another round in a group."""
        edition_draws = self._edition_of(number)
        before = edition_draws.before(self._draws_before(number))
        after = edition_draws.before(self._draws_before(number + 1))
        drawn = np.flatnonzero((before > 0) & (after > before))
        rounds = (
            [self._strata[s].round_of(int(draws[s]) - 1) for draws in (before, after)]
            for s in drawn
        )
        return drawn[np.array([first != last for first, last in rounds], np.bool_)]

    def drawn(self, number: int) -> tuple[EditionStrata, Ints]:
        """Return the strata of a group, and the number of earlier draws of each."""
        edition_draws = self._edition_of(number)
        drawn = edition_draws.before(self._draws_before(number))
        return edition_draws.edition.strata, drawn

    def rounds(self, number: int) -> Floats:
        """Return the passes over each stratum before a group: float64 [strata]."""
        strata, drawn = self.drawn(number)
        found: Floats = drawn / np.maximum(strata.own, 1)
        return found

    def distinct(self, number: int) -> int:
        """Return the number of different parts in earlier groups."""
        if not self._editions:
            return 0
        strata, drawn = self.drawn(number)
        return int(np.minimum(drawn, strata.own).sum())

    def moved(self, number: int) -> tuple[int, int]:
        """Return the earlier draws that another node may have made, too, and the coming ones."""
        if not self._editions:
            return 0, 0
        before = self._edition_of(number).before(self._draws_before(number)).tolist()
        pairs = [s.moved(draw) for s, draw in zip(self._strata, before, strict=False)]
        return sum(drawn for drawn, _ in pairs), sum(left for _, left in pairs)

    def _round(self, edition_draws: EditionDraws, before: Ints) -> int:
        drawn: list[int] = edition_draws.drawn_strata.tolist()
        return min(self._strata[stratum].round_of(int(before[stratum])) for stratum in drawn)

    def _edition_of(self, number: int) -> EditionDraws:
        place = bisect_right(
            self._editions, number, key=lambda edition_draws: edition_draws.edition.first_group
        )
        if not place:
            raise LookupError(f"no edition covers group {number}")
        return self._editions[place - 1]

    def _given(self, group: int) -> int:
        return self._sizing.parts_given(group)

    def _draws_before(self, number: int) -> int:
        """Return the number of draws before a group.

        Without strata a group ends with its round.
        """
        if self._replacement or self._editions[0].blocks is not None:
            return self._given(number)
        group, draw = self._marks[bisect_right(self._marks, number, key=lambda m: m[0]) - 1]
        while group < number:
            before, left = self._given(group), self._strata[0].round_end(draw) - draw
            if self._given(number) - before < left:
                return draw + self._given(number) - before
            groups = range(group + 1, number + 1)  # the round ends before one of these
            place = bisect_left(groups, left, key=lambda g: self._given(g) - before)
            group, draw = self._after_like_rounds(groups[place], draw + left, number)
            self._mark(group, draw)
        return draw

    def _after_like_rounds(self, group: int, draw: int, number: int) -> tuple[int, int]:
        """Skip whole rounds from the start of one, because full groups divide them equally."""
        if group < RAMP_END or group == number or self._sizing.max_parts is not None:
            return group, draw
        own = self._strata[0].round_end(draw) - draw
        groups = -(-own // self._sizing.group_parts(group))
        rounds = (number - group) // groups
        return group + rounds * groups, draw + rounds * own

    def _mark(self, group: int, draw: int) -> None:
        place = bisect_left(self._marks, group, key=lambda mark: mark[0])
        if self._marks[place : place + 1] != [(group, draw)]:
            self._marks.insert(place, (group, draw))
        if len(self._marks) > _MEMOS:  # no step skips the start of an edition
            kept = {edition_draws.edition.first_group for edition_draws in self._editions}
            marks = enumerate(self._marks)
            self._marks = [mark for n, mark in marks if n % 2 == 0 or mark[0] in kept]


def _permutations_of(stratum: int, *where: int | str) -> MakeOrder:
    def make(edition: DrawnEdition, round_: int, earlier: EarlierOrder | None) -> PartOrder:
        size = int(edition.strata.sizes[stratum])
        return Permutation(size, derive_seed(*where, "order", edition.number, round_))

    return make


def _turns_of(stratum: int, *where: int | str) -> MakeOrder:
    orders = TurnOrders(*where)

    def make(edition: DrawnEdition, round_: int, earlier: EarlierOrder | None) -> PartOrder:
        before = None if earlier is None else (earlier.order, earlier.positions)
        return orders.make(edition.number, edition.strata.starts(stratum), round_, before)

    return make
