"""Which parts a group of shards holds: a pure function of (seed, editions, group number).

The order is a keyed permutation that is computed, never stored: a Feistel network over
the next power of four, walked until it lands inside the population (Black & Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002). A later edition permutes all parts
anew and leaves out those that the earlier editions of the same round already drew, which
the inverse permutation tells without any record of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.sampling.cuts import Cut
from growcache.seeding import GOLDEN, derive, finalize64, generator

Ints = npt.NDArray[np.int64]
DRAW_VERSION = 1  # part of the fingerprint: raise it when any draw would change
TURNS_VERSION = 2  # of draws by `turns`; what they replace was of version 1
RAMP_GROUPS = 4  # groups of each size before the size doubles
RAMP_DOUBLINGS = 5  # the first shards hold a 32nd of a full one, so training can start
RAMP_END = RAMP_GROUPS * RAMP_DOUBLINGS  # from this group on shards are full
_CHUNK = 1 << 16  # positions walked at once where earlier draws must be left out
_ROUNDS = 6
_MARKS = 512  # places in the order that are remembered


@dataclass(frozen=True, slots=True)
class Sizing:
    """How objects are cut into parts and shards; measured once, then kept for good.

    Attributes:
        samples_per_object: about how many samples one visit yields.
        stride_bytes: bytes that an object advances per sample.
        overhead_bytes: bytes of an object that hold no sample.
        whole: each object is one part (it is read whole, or drawn at random and independently).
        shard_samples: samples in a full shard.
        group_shards: shards filled together.
        max_parts: parts of the fixed set; None where the set is not fixed.
        doublings: how often the size of groups doubles until they are full.
        cuts: where several sources are mixed, how the objects of each are cut. Then
            ``samples_per_object`` is the mean over visits, and the three after it mean nothing.
    """

    samples_per_object: int
    stride_bytes: float
    overhead_bytes: int
    whole: bool
    shard_samples: int
    group_shards: int = 1
    max_parts: int | None = None
    doublings: int = RAMP_DOUBLINGS
    cuts: tuple[Cut, ...] = ()

    def cut(self, source: int = 0, samples_per_whole: float = 1.0) -> Cut:
        """Return how the objects of a source are cut.

        Args:
            source: its number.
            samples_per_whole: of an object that is one part, where there is one source.
        """
        if self.cuts:
            return self.cuts[source]
        return Cut(
            self.samples_per_object,
            self.stride_bytes,
            self.overhead_bytes,
            self.whole,
            samples_per_whole=samples_per_whole,
        )

    def group_parts(self, group: int) -> int:
        """Return how many parts a group holds: the first groups are small (protocol 7)."""
        ahead = max(0, self.doublings - group // RAMP_GROUPS)
        samples = (self.shard_samples * self.group_shards) >> ahead
        return max(1, -(-samples // self.samples_per_object))

    def parts_before(self, group: int) -> int:
        """Return how many parts all groups before this one were given."""
        ramp = min(group, RAMP_GROUPS * RAMP_DOUBLINGS)
        full = group - ramp
        head = sum(self.group_parts(number) for number in range(ramp))
        return head + full * self.group_parts(RAMP_GROUPS * RAMP_DOUBLINGS)


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection of 0 … size-1."""

    size: int
    key: int
    _keys: tuple[np.uint64, ...] = field(init=False, repr=False)
    _half: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keys = tuple(
            np.uint64(derive(self.key, i) & 0xFFFFFFFFFFFFFFFF) for i in range(_ROUNDS)
        )
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_half", max(1, (max(2, self.size) - 1).bit_length() + 1 >> 1))

    def forward(self, positions: Ints) -> Ints:
        """Return the elements at these positions of the order."""
        return self._walk(positions, self._encrypt)

    def inverse(self, elements: Ints) -> Ints:
        """Return the positions at which these elements stand."""
        return self._walk(elements, self._decrypt)

    def _walk(self, values: Ints, step: Callable[[Ints], Ints]) -> Ints:
        values = step(values)
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = step(values[outside])
            outside = outside[values[outside] >= self.size]
        return values

    def _split(self, values: Ints) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        word = values.astype(np.uint64)
        return word >> np.uint64(self._half), word & self._mask

    @property
    def _mask(self) -> np.uint64:
        return np.uint64((1 << self._half) - 1)

    def _encrypt(self, values: Ints) -> Ints:
        left, right = self._split(values)
        for key in self._keys:
            left, right = right, left ^ (_mix(right, key) & self._mask)
        return (left << np.uint64(self._half) | right).astype(np.int64)

    def _decrypt(self, values: Ints) -> Ints:
        left, right = self._split(values)
        for key in reversed(self._keys):
            left, right = right ^ (_mix(left, key) & self._mask), left
        return (left << np.uint64(self._half) | right).astype(np.int64)


def _mix(word: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """The round function: SplitMix64's finalizer over word and key."""
    return finalize64((word + GOLDEN) ^ key)


class Order(Protocol):
    """A bijection of 0 … size-1: which parts come one after the other."""

    @property
    def size(self) -> int:
        """Of how many parts it is."""

    def forward(self, positions: Ints) -> Ints:
        """Return the parts at these positions of the order."""

    def inverse(self, elements: Ints) -> Ints:
        """Return the positions at which these parts stand."""


@dataclass(frozen=True, slots=True)
class Span:
    """From which group on how many parts are known: an edition, seen by the draws."""

    edition: int
    parts: int
    first_group: int
    objects: int = 0  # listed


# Returns the order of an edition in a round, and where the round began with an earlier edition,
# is told the order of that, and how many positions of it were passed.
MakeOrder: TypeAlias = Callable[[Span, int, tuple[Order, int] | None], Order]


def permuted(seed: int) -> MakeOrder:
    """Return what makes the orders in which every part is as likely to be next."""

    def make(span: Span, round_: int, before: tuple[Order, int] | None) -> Order:
        return Permutation(span.parts, derive(seed, "order", span.edition, round_))

    return make


@dataclass(frozen=True, slots=True)
class Draw:
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

    span: Span
    round: int
    order: Order
    earlier: tuple[tuple[Order, int], ...]  # of this round: order, positions consumed
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
        self._spans: list[Span] = []
        self._totals: dict[Span, int] = {}
        # Ascending. Each stands in front of its group before that is settled: an edition may
        # still be added for it.
        self._marks: list[_Cursor] = []

    @property
    def spans(self) -> Sequence[Span]:
        """The editions that were added, in order."""
        return self._spans

    def add(self, span: Span) -> None:
        """Let groups from ``span.first_group`` on draw from a larger edition."""
        self._spans.append(span)
        self._marks = [mark for mark in self._marks if mark.group <= span.first_group]

    def group(self, number: int) -> Draw | None:
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
        return Draw(number, cursor.segment.span.edition, cursor.segment.round, parts)

    def round_of(self, number: int) -> int:
        """Return the round that group ``number`` would draw from."""
        return number if self._replacement else self._at(number).segment.round

    def _count(self, number: int) -> int:
        count = self._sizing.group_parts(number)
        if self._sizing.max_parts is not None:
            count = min(count, self._sizing.max_parts - self._sizing.parts_before(number))
        return max(0, count)

    def _independent(self, number: int, count: int) -> Draw:
        span = self._span(number)
        rng = generator(self._seed, "replacement", number)
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
        return Draw(number, span.edition, number, np.concatenate(kept))

    def _span(self, number: int) -> Span:
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

    def _begin(self, group: int, span: Span, round_: int) -> _Cursor:
        """Return the cursor in front of a group that begins a round."""
        parts = self._total(span)
        if not parts:
            raise LookupError(f"edition {span.edition} has no part for this node")
        return _Cursor(group, self._segment(span, round_, (), parts), 0, parts)

    def _total(self, span: Span) -> int:
        """Return how many parts of an edition are ours."""
        if self._mine is None:
            return span.parts
        if span not in self._totals:
            starts = range(0, span.parts, _CHUNK)
            chunks = (np.arange(at, min(at + _CHUNK, span.parts)) for at in starts)
            self._totals[span] = sum(int(self._mine(chunk).sum()) for chunk in chunks)
        return self._totals[span]

    def _segment(
        self, span: Span, round_: int, earlier: tuple[tuple[Order, int], ...], parts: int
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


def locate(starts: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """Return (object ordinal, part within the object) of each part.

    Args:
        starts: first part of every object, and the total; int64 [objects + 1].
        parts: parts by their number in the edition.
    """
    ordinals = np.searchsorted(starts, parts, side="right") - 1
    return ordinals, parts - starts[ordinals]
