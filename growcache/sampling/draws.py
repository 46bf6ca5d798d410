"""Which parts a group of shards holds: a pure function of (seed, editions, group number).

A stratum is a sequence of numbered draws, and each number gives a part and a round. Within a
round no part comes twice: an edition that is added in its middle permutes all parts anew, and
skips those that earlier orders of the round gave. The inverse permutation identifies them, so
no record is kept. Permuted blocks deal the draws of a group to the strata.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.sampling.lanes import lane_mask
from growcache.sampling.orders import Floats, Ints, PartOrder, Permutation, TurnOrders
from growcache.sampling.sizing import RAMP_END, Sizing
from growcache.seeding import derive_seed, finalize64, generator_at, stream64

Mask: TypeAlias = npt.NDArray[np.bool_]

_CHUNK = 1 << 16  # positions walked at once where some parts are skipped
_MEMOS = 512  # places in the orders of a stratum, and rounds, that are remembered


@dataclass(frozen=True)
class EditionStrata:
    """The parts of an edition by their strata, numbered within each."""

    names: Sequence[str]  # a number means the same stratum in every edition
    sizes: Ints  # parts of each, which an order permutes
    own: Ints  # parts of each in this node's lanes: the draws of a round
    natural: Ints  # how often each is drawn where none is favoured
    place: Callable[[int, Ints], Ints]  # (stratum, numbers in it) -> numbers in the edition
    starts: Callable[[int], Ints]  # stratum -> the first part of every object, and the total
    owned: Callable[[int, Ints], Mask] | None = None  # None: all parts
    lane_of: Callable[[int, Ints], Ints] | None = None

    def mask(self, stratum: int, parts: Ints) -> Mask:
        return (
            np.ones(len(parts), np.bool_) if self.owned is None else self.owned(stratum, parts)
        )


@dataclass(frozen=True)
class DrawnEdition:
    number: int
    first_group: int
    strata: EditionStrata
    lanes: str | None = None  # that this node owned
    quotas: Ints | None = None  # draws of each stratum in a block; None: one stratum


@dataclass(frozen=True, slots=True)
class GroupDraw:
    """The parts of one group, by their number in the edition."""

    group: int
    edition: int
    round: int  # of several strata the earliest
    parts: Ints
    rounds: Ints | None = None  # of each part; None: all are of ``round``
    weights: npt.NDArray[np.float32] | None = None  # to undo what the strata favour


# ------------------------------------------------------------------ draws of one stratum


@dataclass(frozen=True, slots=True)
class EarlierOrder:
    order: PartOrder
    positions: int
    edition: DrawnEdition


MakeOrder: TypeAlias = Callable[[DrawnEdition, int, EarlierOrder | None], PartOrder]


@dataclass(frozen=True, slots=True)
class DrawRun:
    first: int
    draws: int
    round: int
    edition: DrawnEdition
    order: PartOrder
    earlier: tuple[EarlierOrder, ...] = ()
    moved: int = 0  # draws of parts that were another node's earlier in the round

    @property
    def changes_lanes(self) -> bool:
        return any(one.edition.lanes != self.edition.lanes for one in self.earlier)

    @property
    def end(self) -> int:
        return self.first + self.draws

    @property
    def is_plain(self) -> bool:
        return not self.earlier and self.edition.strata.owned is None


class StratumDraws:
    """Draws a part again only after all parts came, however the stratum grows meanwhile."""

    def __init__(self, stratum: int, make_order: MakeOrder) -> None:
        self._stratum = stratum
        self._make_order = make_order
        # Ascending. Behind the last one, full rounds of its edition follow for ever.
        self._runs: list[DrawRun] = []
        self._later: DrawRun | None = None  # of these rounds the one asked for last
        self._memos: list[tuple[int, int]] = []  # draw, position behind it; ascending
        self._moved: dict[int, tuple[int, int]] = {}  # of a run: draw, moved parts before it

    def grow(self, edition: DrawnEdition, at: int) -> None:
        """Let draws from number ``at`` on choose among the parts of ``edition``."""
        self._runs = [s for s in self._runs if s.first < at]
        self._memos = [memo for memo in self._memos if memo[0] < at]
        self._moved = {run: memo for run, memo in self._moved.items() if memo[0] <= at}
        self._later = None
        if not self._runs:
            if edition.strata.own[self._stratum]:
                self._runs = [self._whole_round(at, 0, edition)]
            return
        last = self._run(at - 1)  # its round goes on, also where it just ended
        self._later = None
        same_lanes = last.edition.lanes == edition.lanes
        if same_lanes and edition.strata.sizes[self._stratum] == last.order.size:
            return
        if last is not self._runs[-1]:
            self._runs.append(last)
        earlier = EarlierOrder(last.order, self._position(last, at - last.first), last.edition)
        order = self._make_order(edition, last.round, earlier)
        left = last.end - at + self._own(edition) - self._own(last.edition)
        grown = DrawRun(at, left, last.round, edition, order, (*last.earlier, earlier))
        self._runs.append(self._counted(grown) if grown.changes_lanes else grown)

    def draw(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the parts of the draws [start, stop), and the round of each."""
        parts, rounds = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while start < stop:
            run = self._run(start)
            count = min(stop, self._end(run)) - start
            parts.append(self._take(run, start - run.first, count))
            rounds.append(np.full(count, run.round, np.int64))
            start += count
        return np.concatenate(parts), np.concatenate(rounds)

    def round_of(self, draw: int) -> int:
        return self._run(draw).round

    def round_end(self, draw: int) -> int:
        """Return the first draw behind the round of a draw, as far as known."""
        return self._run(draw).end

    def _own(self, edition: DrawnEdition) -> int:
        return int(edition.strata.own[self._stratum])

    def _run(self, draw: int) -> DrawRun:
        place = bisect_right(self._runs, draw, key=lambda s: s.first)
        if not place:
            raise LookupError("the stratum has no part yet")
        found = self._runs[place - 1]
        if draw < found.end:
            return found
        own = self._own(found.edition)
        if not own:
            raise LookupError("the stratum has no part for this node")
        if self._later is None or not self._later.first <= draw < self._later.end:
            rounds = (draw - found.end) // own
            first, round_ = found.end + rounds * own, found.round + 1 + rounds
            self._later = self._whole_round(first, round_, found.edition)
        return self._later

    def _end(self, run: DrawRun) -> int:
        """Return where the next run begins, because an edition may begin within this one."""
        place = bisect_right(self._runs, run.first, key=lambda s: s.first)
        return min([run.end, *(s.first for s in self._runs[place : place + 1])])

    def _whole_round(self, first: int, round_: int, edition: DrawnEdition) -> DrawRun:
        order = self._make_order(edition, round_, None)
        return DrawRun(first, self._own(edition), round_, edition, order)

    def _counted(self, s: DrawRun) -> DrawRun:
        """Count the draws in the order of the parts, because few inverse orders are needed then."""
        size = s.order.size
        draws = moved = 0
        for at in range(0, size, _CHUNK):
            parts = np.arange(at, min(size, at + _CHUNK))
            fresh = parts[self._fresh(s, parts)]
            draws += len(fresh)
            moved += self._moved_among(s, fresh)
        return replace(s, draws=draws, moved=moved)

    def _moved_among(self, run: DrawRun, parts: Ints) -> int:
        lane_of = run.edition.strata.lane_of
        if lane_of is None:
            return 0
        stayed = np.logical_and.reduce([lane_mask(one.edition.lanes) for one in run.earlier])
        return int((~stayed[lane_of(self._stratum, parts)]).sum())

    def moved(self, draw: int) -> tuple[int, int]:
        """Return how many draws before one took parts that another node owned earlier in their round.

        And how many more will, in the round of this draw.
        """
        known = [run for run in self._runs if run.moved and run.first < draw]
        drawn = sum(self._moved_before(run, draw) for run in known)
        last = next((run for run in self._runs if run.first <= draw < self._end(run)), None)
        if last is None or not last.moved:
            return drawn, 0
        return drawn, last.moved - self._moved_before(last, draw)

    def _moved_before(self, run: DrawRun, draw: int) -> int:
        draw = min(draw, self._end(run))
        at, count = self._moved.get(run.first, (run.first, 0))
        if at > draw:
            at, count = run.first, 0
        while at < draw:
            step = min(_CHUNK, draw - at)
            count += self._moved_among(run, self._take(run, at - run.first, step))
            at += step
        self._moved[run.first] = (draw, count)
        return count

    def _take(self, run: DrawRun, skip: int, count: int) -> Ints:
        if run.is_plain:
            return run.order.forward(np.arange(skip, skip + count))
        kept: list[Ints] = []
        stop = skip + count
        for start, parts, offsets in self._walk(run, self._position(run, skip), count):
            kept.append(parts[:count])
            if len(parts) >= count:
                self._remember(run.first + stop, start + int(offsets[count - 1]) + 1)
                break
            count -= len(parts)
        return np.concatenate(kept)

    def _position(self, run: DrawRun, draws: int) -> int:
        if run.is_plain:
            return draws
        draw, position = self._nearest(run, run.first + draws)
        left = run.first + draws - draw
        if not left:
            return position
        for start, parts, offsets in self._walk(run, position, left):
            if len(parts) >= left:
                return start + int(offsets[left - 1]) + 1
            left -= len(parts)
        return run.order.size

    def _nearest(self, run: DrawRun, draw: int) -> tuple[int, int]:
        """Return the last remembered (draw, position) of a run up to a draw."""
        place = bisect_right(self._memos, draw, key=lambda memo: memo[0])
        if place and self._memos[place - 1][0] > run.first:
            return self._memos[place - 1]
        return run.first, 0

    def _remember(self, draw: int, position: int) -> None:
        place = bisect_left(self._memos, draw, key=lambda memo: memo[0])
        if self._memos[place : place + 1] == [(draw, position)]:
            return
        self._memos.insert(place, (draw, position))
        if len(self._memos) > _MEMOS:  # every other one is forgotten, but not the last
            self._memos = [*self._memos[:-2:2], *self._memos[-2:]]

    def _walk(
        self, run: DrawRun, position: int, wanted: int
    ) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield where each chunk starts, its parts, and their offsets in it."""
        size = run.order.size
        enough = 1.1 * wanted * size / max(1, run.draws)  # mostly, to give what is wanted
        step = max(_CHUNK // 64, int(min(enough, _CHUNK)))
        while position < size:
            stop = min(size, position + step)
            parts = run.order.forward(np.arange(position, stop))
            offsets = np.flatnonzero(self._fresh(run, parts))
            yield position, parts[offsets], offsets
            position, step = stop, min(_CHUNK, step * 4)

    def _fresh(self, run: DrawRun, parts: Ints) -> Mask:
        """Return which parts are this node's and not drawn yet in the round."""
        mask = run.edition.strata.mask(self._stratum, parts)
        for one in run.earlier:
            known = np.flatnonzero(mask & (parts < one.order.size))
            if one.edition.lanes != run.edition.lanes:  # a lane that was not ours then
                known = known[one.edition.strata.mask(self._stratum, parts[known])]
            drawn = one.order.inverse(parts[known]) < one.positions
            mask[known] = ~drawn
        return mask


class IndependentDraws:
    """Draws with replacement; each is a round of its own."""

    def __init__(self, stratum: int, *where: int | str) -> None:
        self._stratum = stratum
        self._key = np.uint64(derive_seed(*where, "independent") & 0xFFFFFFFFFFFFFFFF)
        self._editions: list[tuple[int, DrawnEdition]] = []  # first draw, what it is drawn from

    def grow(self, edition: DrawnEdition, at: int) -> None:
        self._editions = [*(known for known in self._editions if known[0] < at), (at, edition)]

    def draw(self, start: int, stop: int) -> tuple[Ints, Ints]:
        known = [edition for first, edition in self._editions if first <= start]
        if not known or not known[-1].strata.own[self._stratum]:
            raise LookupError("the stratum has no part for this node")
        strata, numbers = known[-1].strata, np.arange(start, stop)
        size = np.uint64(strata.sizes[self._stratum])
        words = stream64(np.full(len(numbers), self._key), numbers.astype(np.uint64))
        # 64 bits over at most 2^40 parts: none is likelier than another by more than 2^-24.
        parts = (words % size).astype(np.int64)
        left = np.flatnonzero(~strata.mask(self._stratum, parts))
        while len(left):
            words[left] = finalize64(words[left])
            parts[left] = (words[left] % size).astype(np.int64)
            left = left[~strata.mask(self._stratum, parts[left])]
        return parts, numbers

    def moved(self, draw: int) -> tuple[int, int]:
        return 0, 0  # there is no round in which a part may come only once

    def round_of(self, draw: int) -> int:
        return draw

    def round_end(self, draw: int) -> int:
        return draw + 1


# ----------------------------------------------------------------------- draws of groups

_BLOCKS_IN_MEMORY = 4


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
    first: int  # draw
    drawn: Ints  # draws of each stratum before it
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
    """The draws of one cache, in any order of groups; ascending is fastest."""

    def __init__(
        self, seed: int, sizing: Sizing, *, turns: bool = False, replacement: bool = False
    ) -> None:
        self._seed = seed
        self._sizing = sizing
        self._turns = turns
        self._replacement = replacement
        self._editions: list[EditionDraws] = []
        self._strata: list[StratumDraws | IndependentDraws] = []
        self._marks: list[tuple[int, int]] = []  # group, draws before it; ascending

    def add(self, edition: DrawnEdition) -> None:
        group = edition.first_group
        at = self._draws_before(group) if self._editions else 0
        # Of several editions at one group the last one counts.
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
        return StratumDraws(stratum, make(stratum, *where))

    def group(self, number: int) -> GroupDraw | None:
        """None past the end of a fixed set; LookupError while no edition covers the group."""
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
        """Return the strata that begin another round in a group."""
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
        """Return the strata of a group, and how many draws of each were before it."""
        edition_draws = self._edition_of(number)
        drawn = edition_draws.before(self._draws_before(number))
        return edition_draws.edition.strata, drawn

    def rounds(self, number: int) -> Floats:
        """Return the passes over each stratum before a group; float64 [strata]."""
        strata, drawn = self.drawn(number)
        found: Floats = drawn / np.maximum(strata.own, 1)
        return found

    def distinct(self, number: int) -> int:
        """Return the number of different parts in the groups before this one."""
        if not self._editions:
            return 0
        strata, drawn = self.drawn(number)
        return int(np.minimum(drawn, strata.own).sum())

    def moved(self, number: int) -> tuple[int, int]:
        """Return how many draws before a group another node may have made, too, and how many follow."""
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
        """Without strata a group ends where its round ends."""
        if self._replacement or self._editions[0].blocks is not None:
            return self._given(number)
        group, draw = self._marks[bisect_right(self._marks, number, key=lambda m: m[0]) - 1]
        while group < number:
            before, left = self._given(group), self._strata[0].round_end(draw) - draw
            if self._given(number) - before < left:
                return draw + self._given(number) - before
            groups = range(group + 1, number + 1)  # before one of these the round ends
            place = bisect_left(groups, left, key=lambda g: self._given(g) - before)
            group, draw = self._after_like_rounds(groups[place], draw + left, number)
            self._mark(group, draw)
        return draw

    def _after_like_rounds(self, group: int, draw: int, number: int) -> tuple[int, int]:
        """Skip whole rounds from the start of one, because full groups divide them alike."""
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
        if len(self._marks) > _MEMOS:  # nothing leaps over the beginning of an edition
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
