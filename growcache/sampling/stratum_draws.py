"""The draws of one stratum: a pure function of (seed, editions, draw number).

A stratum is a sequence of numbered draws, and each number gives a part and a round. Within a
round no part occurs twice. An edition that is added within a round permutes all parts anew, and
skips those that earlier orders of the round gave. The inverse permutation identifies them, so
no record is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.sampling.draw_notes import DrawNotes, GrownRun, Place
from growcache.sampling.lanes import lane_mask
from growcache.sampling.orders import Ints, PartOrder
from growcache.seeding import derive_seed, finalize64, stream64

Mask: TypeAlias = npt.NDArray[np.bool_]

_CHUNK = 1 << 16  # positions processed together if some parts are skipped
_MEMOS = 512  # remembered places in the orders of a stratum


@dataclass(frozen=True)
class EditionStrata:
    """The parts of an edition by their strata, numbered within each."""

    names: Sequence[str]  # a number means the same stratum in every edition
    sizes: Ints  # parts of each, which an order permutes
    own: Ints  # parts of each in this node's lanes, which are the draws of a round
    natural: Ints  # draws of each if none is favoured
    place: Callable[[int, Ints], Ints]  # (stratum, numbers in it) -> numbers in the edition
    starts: Callable[[int], Ints]  # stratum -> first part of every object, and the total
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
    lanes: str | None = None  # of this node
    quotas: Ints | None = None  # draws of each stratum in a block; None: one stratum


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
    moved: int = 0  # draws of parts that another node owned earlier in the round

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
    """Draws a part again only after all parts were drawn, however the stratum grows meanwhile."""

    def __init__(
        self, stratum: int, make_order: MakeOrder, notes: DrawNotes | None = None
    ) -> None:
        self._stratum = stratum
        self._make_order = make_order
        self._notes = notes or DrawNotes()
        # Ascending. After the last run, full rounds of its edition follow endlessly.
        self._runs: list[DrawRun] = []
        self._later: DrawRun | None = None  # the last requested one of these rounds
        self._memos: list[Place] = []  # ascending
        self._moved: dict[int, tuple[int, int]] = {}  # of a run: draw, earlier moved parts

    def grow(self, edition: DrawnEdition, at: int) -> None:
        """Let draws from number ``at`` on choose among the parts of ``edition``."""
        self._runs = [s for s in self._runs if s.first < at]
        self.recall()
        self._memos = [memo for memo in self._memos if memo.draw < at]
        self._moved = {run: memo for run, memo in self._moved.items() if memo[0] <= at}
        self._later = None
        if not self._runs:
            if edition.strata.own[self._stratum]:
                self._runs = [self._whole_round(at, 0, edition)]
            return
        last = self._run(at - 1)  # its round continues, even if it just ended
        self._later = None
        same_lanes = last.edition.lanes == edition.lanes
        if same_lanes and edition.strata.sizes[self._stratum] == last.order.size:
            return
        if last is not self._runs[-1]:
            self._runs.append(last)
        known = self._notes.grown(self._stratum, edition.number)
        positions = known.positions if known else self._position(last, at - last.first)
        earlier = EarlierOrder(last.order, positions, last.edition)
        order = self._make_order(edition, last.round, earlier)
        left = last.end - at + self._own(edition) - self._own(last.edition)
        grown = DrawRun(at, left, last.round, edition, order, (*last.earlier, earlier))
        if known:
            grown = replace(grown, draws=known.draws, moved=known.moved)
        elif grown.changes_lanes:
            grown = self._counted(grown)
        self._runs.append(grown)
        found = GrownRun(positions, grown.draws, grown.moved)
        self._notes.note_grown(self._stratum, edition.number, found)

    def recall(self) -> None:
        """Continue from the notes if they are about the last edition so far."""
        if not self._runs:
            return
        last = self._runs[-1]
        place = self._notes.place(self._stratum, last.edition.number)
        if place is not None and not self._memos and place.draw > last.first:
            self._memos = [place]

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
        """Return the first draw after the round of a draw, as far as known."""
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
        """Return the start of the next run, because an edition may start within this one."""
        place = bisect_right(self._runs, run.first, key=lambda s: s.first)
        return min([run.end, *(s.first for s in self._runs[place : place + 1])])

    def _whole_round(self, first: int, round_: int, edition: DrawnEdition) -> DrawRun:
        order = self._make_order(edition, round_, None)
        return DrawRun(first, self._own(edition), round_, edition, order)

    def _counted(self, s: DrawRun) -> DrawRun:
        """Count the draws in the order of the parts, because that needs few inverse orders."""
        size = s.order.size
        draws = moved = 0
        for at in range(0, size, _CHUNK):
            parts = np.arange(at, min(size, at + _CHUNK))
            fresh = parts[self._fresh(s, parts)]
            self._notes.walked(len(parts))
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
        """Return the earlier draws of parts that another node owned earlier in their round.

        The second number counts those that will follow in the round of this draw.
        """
        known = [run for run in self._runs if run.moved and run.first < draw]
        drawn = sum(self._moved_before(run, draw) for run in known)
        last = next((run for run in self._runs if run.first <= draw < self._end(run)), None)
        if last is None or not last.moved:
            return drawn, 0
        return drawn, last.moved - self._moved_before(last, draw)

    def _moved_before(self, run: DrawRun, draw: int) -> int:
        draw = min(draw, self._end(run))
        where = (self._stratum, run.edition.number, run.first)
        noted = self._moved.get(run.first) or self._notes.moved(*where)
        at, count = noted or (run.first, 0)
        if at > draw:
            at, count = run.first, 0
        while at < draw:
            step = min(_CHUNK, draw - at)
            count += self._moved_among(run, self._take(run, at - run.first, step))
            at += step
        self._moved[run.first] = (draw, count)
        self._notes.note_moved(*where, (draw, count))
        return count

    def _take(self, run: DrawRun, skip: int, count: int) -> Ints:
        if run.is_plain:
            return run.order.forward(np.arange(skip, skip + count))
        kept: list[Ints] = []
        stop = skip + count
        for start, parts, offsets in self._walk(run, self._position(run, skip), count):
            kept.append(parts[:count])
            if len(parts) >= count:
                end = start + int(offsets[count - 1]) + 1
                self._remember(run.edition.number, run.first + stop, end)
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

    def _remember(self, edition: int, draw: int, position: int) -> None:
        place = bisect_left(self._memos, draw, key=lambda memo: memo[0])
        found = Place(draw, position)
        if self._memos[place : place + 1] == [found]:
            return
        self._memos.insert(place, found)
        if place == len(self._memos) - 1:
            self._notes.note_place(self._stratum, edition, found)
        if len(self._memos) > _MEMOS:  # every other one is forgotten, but not the last
            self._memos = [*self._memos[:-2:2], *self._memos[-2:]]

    def _walk(
        self, run: DrawRun, position: int, wanted: int
    ) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield the start of each chunk, its parts, and their offsets in it."""
        size = run.order.size
        enough = 1.1 * wanted * size / max(1, run.draws)  # usually enough for the wanted draws
        step = max(_CHUNK // 64, int(min(enough, _CHUNK)))
        while position < size:
            stop = min(size, position + step)
            self._notes.walked(stop - position)
            parts = run.order.forward(np.arange(position, stop))
            offsets = np.flatnonzero(self._fresh(run, parts))
            yield position, parts[offsets], offsets
            position, step = stop, min(_CHUNK, step * 4)

    def _fresh(self, run: DrawRun, parts: Ints) -> Mask:
        """Return which parts belong to this node and were not drawn yet in the round."""
        mask = run.edition.strata.mask(self._stratum, parts)
        for one in run.earlier:
            known = np.flatnonzero(mask & (parts < one.order.size))
            # A lane that belonged to another node then.
            if one.edition.lanes != run.edition.lanes:
                known = known[one.edition.strata.mask(self._stratum, parts[known])]
            drawn = one.order.inverse(parts[known]) < one.positions
            mask[known] = ~drawn
        return mask


class IndependentDraws:
    """Draws with replacement. Each draw is a round by itself."""

    def __init__(self, stratum: int, *where: int | str) -> None:
        self._stratum = stratum
        self._key = np.uint64(derive_seed(*where, "independent") & 0xFFFFFFFFFFFFFFFF)
        # First draw, and the edition that is drawn from.
        self._editions: list[tuple[int, DrawnEdition]] = []

    def grow(self, edition: DrawnEdition, at: int) -> None:
        self._editions = [*(known for known in self._editions if known[0] < at), (at, edition)]

    def draw(self, start: int, stop: int) -> tuple[Ints, Ints]:
        known = [edition for first, edition in self._editions if first <= start]
        if not known or not known[-1].strata.own[self._stratum]:
            raise LookupError("the stratum has no part for this node")
        strata, numbers = known[-1].strata, np.arange(start, stop)
        size = np.uint64(strata.sizes[self._stratum])
        words = stream64(np.full(len(numbers), self._key), numbers.astype(np.uint64))
        # 64 bits over at most 2^40 parts, so chances differ by at most 2^-24.
        parts = (words % size).astype(np.int64)
        left = np.flatnonzero(~strata.mask(self._stratum, parts))
        while len(left):
            words[left] = finalize64(words[left])
            parts[left] = (words[left] % size).astype(np.int64)
            left = left[~strata.mask(self._stratum, parts[left])]
        return parts, numbers

    def recall(self) -> None:
        """Do nothing, because independent draws have no state."""

    def moved(self, draw: int) -> tuple[int, int]:
        return 0, 0  # there is no round in which a part may occur only once

    def round_of(self, draw: int) -> int:
        return draw

    def round_end(self, draw: int) -> int:
        return draw + 1
