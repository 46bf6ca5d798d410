"""The parts of one stratum, round after round, while it grows: a function of how many were drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from growcache.sampling.draws import Ints, Order, Permutation
from growcache.seeding import derive, stream64

_CHUNK = 1 << 16  # positions walked at once where earlier draws must be left out


@dataclass(frozen=True, slots=True)
class _Stretch:
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
    order: Order
    earlier: tuple[tuple[Order, int], ...] = ()


# As `draws.MakeOrder`, of an edition and the parts that the stratum has in it.
OrderOf: TypeAlias = Callable[[int, int, int, tuple[Order, int] | None], Order]


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
        self._stretches: list[_Stretch] = []
        self._walked: tuple[_Stretch, int, int] | None = None  # draws and positions passed

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
        self._stretches += [last, _Stretch(drawn, left, edition, last.round, order, earlier)]

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

    def _stretch(self, number: int) -> _Stretch:
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

    def _end(self, stretch: _Stretch) -> int:
        """Return where the next stretch begins; an edition may begin within this one."""
        following = [s.first for s in self._stretches if s.first > stretch.first]
        return min([stretch.first + stretch.draws, *following])

    def _full(self, first: int, parts: int, edition: int, round_: int) -> _Stretch:
        order = self._order(edition, parts, round_, None)
        return _Stretch(first, parts, edition, round_, order)

    def _permuted(
        self, edition: int, parts: int, round_: int, before: tuple[Order, int] | None
    ) -> Order:
        return Permutation(parts, derive(*self._where, "order", edition, round_))

    def _parts(self, stretch: _Stretch, skip: int, count: int) -> Ints:
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

    def _position(self, stretch: _Stretch, draws: int) -> int:
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

    def _walk(self, stretch: _Stretch, position: int) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield from a position on: where a chunk starts, its parts, and their offsets in it."""
        for start in range(position, stretch.order.size, _CHUNK):
            stop = min(stretch.order.size, start + _CHUNK)
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
        self._key = np.uint64(derive(*where, "independent") & 0xFFFFFFFFFFFFFFFF)
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
