"""Which parts a group of shards holds: a pure function of (seed, editions, group number).

A later edition permutes all parts anew and skips those that earlier editions drew in the same round. The inverse
permutation tells which those are, so no record of them is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.sampling.orders import Floats, Ints, PartOrder, Permutation, TurnOrders
from growcache.sampling.sizing import RAMP_END, Sizing
from growcache.seeding import derive_seed, generator_at, stream64

_CHUNK = 1 << 16  # positions walked at once where earlier draws must be left out


_MARKS = 512  # places in the order that are remembered


@dataclass(frozen=True, slots=True)
class DrawnEdition:
    """From which group on how many parts are known: an edition, seen by the draws."""

    edition: int
    parts: int
    first_group: int
    objects: int = 0  # listed


# Returns the order of an edition in a round, and where the round began with an earlier edition,
# is told the order of that, and how many positions of it were passed.
MakeOrder: TypeAlias = Callable[[DrawnEdition, int, tuple[PartOrder, int] | None], PartOrder]


def permuted(seed: int) -> MakeOrder:
    """Return what makes the orders in which every part is as likely to be next."""

    def make(
        span: DrawnEdition, round_: int, before: tuple[PartOrder, int] | None
    ) -> PartOrder:
        return Permutation(span.parts, derive_seed(seed, "order", span.edition, round_))

    return make


@dataclass(frozen=True, slots=True)
class GroupDraw:
    """The parts of one group, by their number in the edition.

    Attributes:
        group: its number.
        edition: that it was drawn from.
        round: pass of the permutation; of several strata the earliest.
        parts: of the group.
        rounds: that each part is of; None: all are of ``round``.
        weights: by which each part is to be counted to undo what the strata favour.
    """

    group: int
    edition: int
    round: int
    parts: Ints
    rounds: Ints | None = None
    weights: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of groups that follow one order."""

    span: DrawnEdition
    round: int
    order: PartOrder
    earlier: tuple[tuple[PartOrder, int], ...]  # of this round: order, positions consumed
    parts: int  # that it yields in all


@dataclass(frozen=True, slots=True)
class _Cursor:
    group: int
    segment: _Segment
    position: int
    left: int  # parts that the segment still yields


class Draws:
    """The draws of one cache, group after group, in any order (ascending is fastest).

    Places that were passed are remembered, every so many: to go back to an old group takes a
    walk from the last of them in front of it, not from the start.

    Args:
        seed: of the order.
        sizing: see `Sizing`.
        mine: which parts this node may draw, as a mask; None for all.
        replacement: independent draws instead of a permutation.
        order: makes the orders; by default parts are permuted.
    """

    def __init__(
        self,
        seed: int,
        sizing: Sizing,
        *,
        mine: Callable[[Ints], npt.NDArray[np.bool_]] | None = None,
        replacement: bool = False,
        order: MakeOrder | None = None,
    ) -> None:
        self._seed = seed
        self._order = order or permuted(seed)
        self._sizing = sizing
        self._mine = mine
        self._replacement = replacement
        self._spans: list[DrawnEdition] = []
        self._totals: dict[DrawnEdition, int] = {}
        # Ascending. Each stands in front of its group before that is settled: an edition may
        # still be added for it.
        self._marks: list[_Cursor] = []

    @property
    def spans(self) -> Sequence[DrawnEdition]:
        """The editions that were added, in order."""
        return self._spans

    def add(self, span: DrawnEdition) -> None:
        """Let groups from ``span.first_group`` on draw from a larger edition."""
        self._spans.append(span)
        self._marks = [mark for mark in self._marks if mark.group <= span.first_group]

    def group(self, number: int) -> GroupDraw | None:
        """Return what group ``number`` holds; None past the end of a fixed set.

        Raises:
            LookupError: no edition with a part of ours covers the group yet.
        """
        count = self._count(number)
        if count == 0:
            return None
        if self._replacement:
            return self._independent(number, count)
        cursor = self._at(number)
        parts, position = self._take(cursor.segment, cursor.position, count)
        left = cursor.left - len(parts)
        self._mark(_Cursor(number + 1, cursor.segment, position, left))
        return GroupDraw(number, cursor.segment.span.edition, cursor.segment.round, parts)

    def round_of(self, number: int) -> int:
        """Return the round that group ``number`` would draw from."""
        return number if self._replacement else self._at(number).segment.round

    def _count(self, number: int) -> int:
        count = self._sizing.group_parts(number)
        if self._sizing.max_parts is not None:
            count = min(count, self._sizing.max_parts - self._sizing.parts_before(number))
        return max(0, count)

    def _independent(self, number: int, count: int) -> GroupDraw:
        span = self._span(number)
        rng = generator_at(self._seed, "replacement", number)
        kept: list[Ints] = []
        missing, tries = count, 0
        while missing and tries < 1000:
            parts = rng.integers(0, span.parts, missing)
            mask = self._mine(parts) if self._mine else np.ones(len(parts), np.bool_)
            kept.append(parts[mask])
            missing -= int(mask.sum())
            tries += 1
        if missing == count:
            raise LookupError(f"edition {span.edition} has no part for this node")
        return GroupDraw(number, span.edition, number, np.concatenate(kept))

    def _span(self, number: int) -> DrawnEdition:
        known = [span for span in self._spans if span.first_group <= number]
        if not known:
            raise LookupError(f"no edition covers group {number}")
        return known[-1]

    def _at(self, number: int) -> _Cursor:
        """The cursor before group ``number``, at a position that still yields a part."""
        place = bisect_right(self._marks, number, key=lambda mark: mark.group)
        cursor = self._marks[place - 1] if place else self._begin(0, self._span(0), 0)
        while cursor.group < number:
            cursor = self._leap(self._settle(cursor), number)
            self._mark(cursor)
        return self._settle(cursor)

    def _mark(self, cursor: _Cursor) -> None:
        """Remember the place; beyond so many, every other one but the last is forgotten."""
        marks = self._marks
        place = bisect_right(marks, cursor.group, key=lambda mark: mark.group)
        if place and marks[place - 1].group == cursor.group:
            return
        marks.insert(place, cursor)
        if len(marks) > _MARKS:
            self._marks = [*marks[:-2:2], *marks[-2:]]

    def _leap(self, cursor: _Cursor, number: int) -> _Cursor:
        """Jump over groups of one edition: towards ``number``, by one group at least."""
        begins = [span.first_group for span in self._spans if span.first_group > cursor.group]
        target = min([number, *begins])
        cursor = self._leap_rounds(cursor, target)
        before, segment = self._given(cursor.group), cursor.segment
        if self._given(target) - before < cursor.left:
            count = self._given(target) - before
            position = self._skip(cursor, count)
            return _Cursor(target, segment, position, cursor.left - count)
        groups = range(cursor.group + 1, target + 1)  # in one of these the segment ends
        ends = bisect_left(groups, cursor.left, key=lambda g: self._given(g) - before)
        return _Cursor(groups[ends], segment, segment.span.parts, 0)

    def _leap_rounds(self, cursor: _Cursor, target: int) -> _Cursor:
        """Jump over whole rounds, which have equally many groups once shards are full."""
        segment = cursor.segment
        begun = bool(segment.earlier) or cursor.left < segment.parts
        if begun or self._sizing.max_parts is not None or cursor.group < RAMP_END:
            return cursor
        groups = -(-segment.parts // self._sizing.group_parts(cursor.group))
        rounds = (target - cursor.group - 1) // groups
        group, round_ = cursor.group + rounds * groups, segment.round + rounds
        return self._begin(group, segment.span, round_) if rounds > 0 else cursor

    def _given(self, number: int) -> int:
        limit = self._sizing.max_parts
        parts = self._sizing.parts_before(number)
        return parts if limit is None else min(parts, limit)

    def _skip(self, cursor: _Cursor, count: int) -> int:
        segment = cursor.segment
        if self._plain(segment):
            return min(segment.span.parts, cursor.position + count)
        return self._take(segment, cursor.position, count)[1]

    def _plain(self, segment: _Segment) -> bool:
        """Whether every position of the segment yields a part."""
        return not segment.earlier and self._mine is None

    def _settle(self, cursor: _Cursor) -> _Cursor:
        """Enter a new edition or round where the cursor's group begins one."""
        span = self._span(cursor.group)
        segment = cursor.segment
        if span != segment.span:
            earlier = (*segment.earlier, (segment.order, cursor.position))
            # What this round yields is what the edition adds to what it had still to yield.
            parts = self._total(span) - self._total(segment.span) + cursor.left
            segment = self._segment(span, segment.round, earlier, parts)
            cursor = _Cursor(cursor.group, segment, 0, parts)
        if cursor.left:
            return cursor
        return self._begin(cursor.group, span, segment.round + 1)

    def _begin(self, group: int, span: DrawnEdition, round_: int) -> _Cursor:
        """Return the cursor in front of a group that begins a round."""
        parts = self._total(span)
        if not parts:
            raise LookupError(f"edition {span.edition} has no part for this node")
        return _Cursor(group, self._segment(span, round_, (), parts), 0, parts)

    def _total(self, span: DrawnEdition) -> int:
        """Return how many parts of an edition are ours."""
        if self._mine is None:
            return span.parts
        if span not in self._totals:
            starts = range(0, span.parts, _CHUNK)
            chunks = (np.arange(at, min(at + _CHUNK, span.parts)) for at in starts)
            self._totals[span] = sum(int(self._mine(chunk).sum()) for chunk in chunks)
        return self._totals[span]

    def _segment(
        self,
        span: DrawnEdition,
        round_: int,
        earlier: tuple[tuple[PartOrder, int], ...],
        parts: int,
    ) -> _Segment:
        order = self._order(span, round_, earlier[-1] if earlier else None)
        return _Segment(span, round_, order, earlier, parts)

    def _take(self, segment: _Segment, position: int, count: int) -> tuple[Ints, int]:
        """The next parts from a position on, and the position behind them."""
        kept: list[Ints] = []
        for start, parts, offsets in self._walk(segment, position, count):
            if len(parts) >= count:
                return np.concatenate([*kept, parts[:count]]), start + int(
                    offsets[count - 1]
                ) + 1
            kept.append(parts)
            count -= len(parts)
        empty = np.empty(0, np.int64)
        return np.concatenate([*kept, empty]), segment.span.parts

    def _walk(
        self, segment: _Segment, position: int, count: int
    ) -> Iterator[tuple[int, Ints, Ints]]:
        step = count
        if not self._plain(segment):  # mostly enough: what earlier draws left, and some more
            enough = 1.1 * count * segment.span.parts / segment.parts
            step = max(_CHUNK // 64, int(min(enough, _CHUNK)))
        while position < segment.span.parts:
            stop = min(segment.span.parts, position + step)
            parts = segment.order.forward(np.arange(position, stop))
            offsets = np.flatnonzero(self._fresh(segment, parts))
            yield position, parts[offsets], offsets
            position, step = stop, min(_CHUNK, step * 4)

    def _fresh(self, segment: _Segment, parts: Ints) -> npt.NDArray[np.bool_]:
        mask = np.ones(len(parts), np.bool_) if self._mine is None else self._mine(parts)
        for order, consumed in segment.earlier:
            known = np.flatnonzero(mask & (parts < order.size))
            mask[known] = order.inverse(parts[known]) >= consumed
        return mask


_STRATUM_CHUNK = 1 << 16  # positions walked at once where earlier draws must be left out


@dataclass(frozen=True, slots=True)
class _OrderedDraws:
    """Draws that follow one permutation.

    Attributes:
        first: number of its first draw.
        draws: that it yields.
        edition: that was drawn from.
        round: that they belong to.
        order: of all parts that were known.
        earlier: orders of the same round, each with the positions that it yielded.
    """

    first: int
    draws: int
    edition: int
    round: int
    order: PartOrder
    earlier: tuple[tuple[PartOrder, int], ...] = ()


# As `draws.MakeOrder`, of an edition and the parts that the stratum has in it.
OrderOf: TypeAlias = Callable[[int, int, int, tuple[PartOrder, int] | None], PartOrder]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Consecutive draws.

    Attributes:
        parts: by their number in the stratum.
        rounds: that each is of.
    """

    parts: Ints
    rounds: Ints


class Cycle:
    """No part comes twice before all came once, however the stratum grows meanwhile.

    Args:
        where: what the orders depend on, beside edition and round.
        order: makes the orders; by default parts are permuted.
    """

    def __init__(self, *where: int | str, order: OrderOf | None = None) -> None:
        self._where = where
        self._order = order or self._permuted
        # Ascending; the last goes on for ever, with full rounds of its edition behind it.
        self._stretches: list[_OrderedDraws] = []
        self._walked: tuple[_OrderedDraws, int, int] | None = None  # draws and positions passed

    def grow(self, edition: int, parts: int, drawn: int) -> None:
        """Let draws from number ``drawn`` on choose among ``parts`` parts, the old ones included."""
        if not parts:
            return
        if not self._stretches:
            self._stretches = [self._full(drawn, parts, edition, 0)]
            return
        last = self._stretch(drawn)
        if parts == last.order.size:
            return
        yielded = drawn - last.first
        self._stretches = [s for s in self._stretches if s.first < last.first]
        if not yielded and not last.earlier:  # a round that did not begin yet
            self._stretches.append(self._full(drawn, parts, edition, last.round))
            return
        earlier = (*last.earlier, (last.order, self._position(last, yielded)))
        left = last.draws - yielded + parts - last.order.size
        order = self._order(edition, parts, last.round, earlier[-1])
        self._stretches += [
            last,
            _OrderedDraws(drawn, left, edition, last.round, order, earlier),
        ]

    def draw(self, start: int, stop: int) -> Drawn:
        """Return the draws [start, stop).

        Raises:
            LookupError: the stratum has no part yet.
        """
        parts: list[Ints] = [np.zeros(0, np.int64)]
        rounds: list[Ints] = [np.zeros(0, np.int64)]
        while start < stop:
            stretch = self._stretch(start)
            count = min(stop, self._end(stretch)) - start
            parts.append(self._parts(stretch, start - stretch.first, count))
            rounds.append(np.full(count, stretch.round, np.int64))
            start += count
        return Drawn(np.concatenate(parts), np.concatenate(rounds))

    def round_of(self, number: int) -> int:
        """Return the round that a draw is of."""
        return self._stretch(number).round

    def _stretch(self, number: int) -> _OrderedDraws:
        known = [s for s in self._stretches if s.first <= number]
        if not known:
            raise LookupError("the stratum has no part yet")
        last = known[-1]
        if number < last.first + last.draws:
            return last
        # Rounds behind the last known stretch are all alike.
        size, ended = last.order.size, last.first + last.draws
        rounds = (number - ended) // size
        return self._full(ended + rounds * size, size, last.edition, last.round + 1 + rounds)

    def _end(self, stretch: _OrderedDraws) -> int:
        """Return where the next stretch begins; an edition may begin within this one."""
        following = [s.first for s in self._stretches if s.first > stretch.first]
        return min([stretch.first + stretch.draws, *following])

    def _full(self, first: int, parts: int, edition: int, round_: int) -> _OrderedDraws:
        order = self._order(edition, parts, round_, None)
        return _OrderedDraws(first, parts, edition, round_, order)

    def _permuted(
        self, edition: int, parts: int, round_: int, before: tuple[PartOrder, int] | None
    ) -> PartOrder:
        return Permutation(parts, derive_seed(*self._where, "order", edition, round_))

    def _parts(self, stretch: _OrderedDraws, skip: int, count: int) -> Ints:
        if not stretch.earlier:
            return stretch.order.forward(np.arange(skip, skip + count))
        position = self._position(stretch, skip)
        kept: list[Ints] = []
        for start, fresh, offsets in self._walk(stretch, position):
            kept.append(fresh[:count])
            if len(fresh) >= count:
                self._walked = (stretch, skip + count, start + int(offsets[count - 1]) + 1)
                break
            count -= len(fresh)
            skip += len(fresh)
        return np.concatenate(kept)

    def _position(self, stretch: _OrderedDraws, draws: int) -> int:
        """Return the position in the order behind so many draws of the stretch."""
        if not stretch.earlier:
            return draws
        passed, position = 0, 0
        if self._walked is not None and self._walked[0] == stretch and self._walked[1] <= draws:
            _, passed, position = self._walked
        if passed == draws:
            return position
        for start, fresh, offsets in self._walk(stretch, position):
            if passed + len(fresh) >= draws:
                return start + int(offsets[draws - passed - 1]) + 1
            passed += len(fresh)
        return stretch.order.size

    def _walk(self, stretch: _OrderedDraws, position: int) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield from a position on: where a chunk starts, its parts, and their offsets in it."""
        for start in range(position, stretch.order.size, _STRATUM_CHUNK):
            stop = min(stretch.order.size, start + _STRATUM_CHUNK)
            parts = stretch.order.forward(np.arange(start, stop))
            fresh = np.ones(len(parts), np.bool_)
            for order, yielded in stretch.earlier:
                known = np.flatnonzero(fresh & (parts < order.size))
                fresh[known] = order.inverse(parts[known]) >= yielded
            offsets = np.flatnonzero(fresh)
            yield start, parts[offsets], offsets


class Independent:
    """Draws that know nothing of one another; each is a round of its own.

    Args:
        where: what they depend on.
    """

    def __init__(self, *where: int | str) -> None:
        self._key = np.uint64(derive_seed(*where, "independent") & 0xFFFFFFFFFFFFFFFF)
        self._eras: list[tuple[int, int]] = []  # first draw, parts

    def grow(self, edition: int, parts: int, drawn: int) -> None:
        """Let draws from number ``drawn`` on choose among ``parts`` parts."""
        if parts:
            self._eras.append((drawn, parts))

    def draw(self, start: int, stop: int) -> Drawn:
        """Return the draws [start, stop).

        Raises:
            LookupError: the stratum has no part yet.
        """
        known = [parts for first, parts in self._eras if first <= start]
        if not known:
            raise LookupError("the stratum has no part yet")
        numbers = np.arange(start, stop)
        words = stream64(np.full(len(numbers), self._key), numbers.astype(np.uint64))
        # 64 bits over at most 2^40 parts: none is likelier than another by more than 2^-24.
        return Drawn((words % np.uint64(known[-1])).astype(np.int64), numbers)

    def round_of(self, number: int) -> int:
        """Return the round that a draw is of."""
        return number


@dataclass(frozen=True)
class EditionStrata:
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
BlockQuotas: TypeAlias = Callable[[DrawnEdition, EditionStrata], Ints]


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

    span: DrawnEdition
    strata: EditionStrata
    slots: StratumBlocks
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
        deal: BlockQuotas,
        strata: Callable[[int], EditionStrata],
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

    def add(self, span: DrawnEdition) -> None:
        """Let groups from ``span.first_group`` on draw from a larger edition.

        Raises:
            ConfigError: the weights name a stratum that it does not have.
        """
        strata = self._strata(span.objects)
        slots = StratumBlocks(self._deal(span, strata), self._seed, span.edition)
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
            edition: int, parts: int, round_: int, before: tuple[PartOrder, int] | None
        ) -> PartOrder:
            era = next(era for era in self._eras if era.span.edition == edition)
            return orders.make(edition, era.strata.starts(stratum), round_, before)

        return make

    def group(self, number: int) -> GroupDraw | None:
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
        return GroupDraw(number, edition, self._round(era, before), parts, rounds, weights)

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


_BLOCKS_IN_MEMORY = 4


class StratumBlocks:
    """Which stratum each draw is of, by its number.

    Args:
        counts: draws of each stratum in a block.
        where: what the order within blocks depends on, beside the block's number.
    """

    def __init__(self, counts: Ints, *where: int | str) -> None:
        self.counts = counts
        self._where = where
        self._size = int(counts.sum())
        self._blocks: OrderedDict[int, Ints] = OrderedDict()

    def run(self, start: int, stop: int) -> Ints:
        """Return the strata of the draws [start, stop)."""
        first, last = start // self._size, -(-stop // self._size)
        blocks = [self._block(number) for number in range(first, last)]
        whole = np.concatenate([*blocks, np.zeros(0, np.int64)])
        return whole[start - first * self._size : stop - first * self._size]

    def before(self, number: int) -> Ints:
        """Return how many of the draws before this one each stratum has."""
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
