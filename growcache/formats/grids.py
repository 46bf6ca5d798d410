"""Places of an array's samples: single rows, windows along an axis, or blocks.

Samples are numbered in C order of the array's axes, and this number is their ordinal. A visit
takes neighbours in storage order instead (`StorageOrder`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import Visit, choice_option
from growcache.schema import Array
from growcache.seeding import derive_seed

Shape: TypeAlias = tuple[int, ...]
Indices: TypeAlias = range | tuple[int, ...]  # along one axis, ascending
Box: TypeAlias = tuple[Indices, ...]  # indices per axis of an array

GRID_OPTIONS = ("axis", "window", "stride", "edge", "phase", "select")


@dataclass(frozen=True, slots=True)
class AxisGrid:
    window: int | None = None  # values along the axis; None: single values, without the axis
    stride: int = 1  # from one start to the next
    pad: bool = False  # whether windows beyond the end are kept and filled with zeros
    random_phase: bool = False  # whether each pass has another random offset

    @property
    def length(self) -> int:
        return self.window or 1

    @property
    def lost(self) -> int:
        """Values of an axis beyond its samples' strides; negative if the strides reach further."""
        return 1 - self.stride if self.pad else self.length - self.stride

    @property
    def least_new(self) -> int:
        """Values at the start of a window that no other window starts with."""
        return 1 if self.pad else min(self.length, self.stride)

    def possible(self, size: int) -> int:
        return size if self.pad else max(0, size - self.length + 1)

    def starts(self, size: int, phase: int) -> range:
        return range(phase, self.possible(size), self.stride)

    def phase(self, size: int, *seed: int | str) -> int:
        """Return the grid's offset in this pass.

        It is uniform over the stride, so every possible start is equally likely. If there are
        fewer possible starts than that, it is uniform over these, so that no short object is
        skipped.
        """
        choices = min(self.stride, self.possible(size))
        if not self.random_phase or choices < 2:
            return 0
        return derive_seed("phase", *seed) % choices


@dataclass(frozen=True, slots=True)
class ArrayGrid:
    cuts: tuple[tuple[int, AxisGrid], ...]  # by axis; negative ones count from the last
    dimensions: int | None = None  # of the array, if each has a window
    # Indices by axis, in the order that samples have. Other axes keep all indices.
    select: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def without_phase(self) -> ArrayGrid:
        cuts = tuple((axis, replace(grid, random_phase=False)) for axis, grid in self.cuts)
        return replace(self, cuts=cuts)

    def axes_of(self, shape: Shape, what: str) -> tuple[AxisGrid | None, ...]:
        """Return the grid of each axis, with None for axes that are not cut."""
        if self.dimensions is not None and len(shape) != self.dimensions:
            raise FormatError(
                f"{what}: expected {self.dimensions} axes, as window has, found shape "
                f"{list(shape)}",
                code="GC303",
            )
        grids: list[AxisGrid | None] = [None] * len(shape)
        for axis, grid in self.cuts:
            at = _checked_axis(axis, shape, what)
            if grids[at] is not None:
                raise FormatError(
                    f"{what}: axis {axis} is named twice, of shape {list(shape)}", code="GC303"
                )
            grids[at] = grid
        return tuple(grids)

    def selections(
        self, shape: Shape, axes: Sequence[AxisGrid | None], what: str
    ) -> tuple[tuple[int, ...] | None, ...]:
        found: list[tuple[int, ...] | None] = [None] * len(shape)
        for axis, indices in self.select:
            at = _checked_axis(axis, shape, what)
            if axes[at] is not None:
                raise FormatError(
                    f"{what}: axis {at} is cut, so select cannot name it, too", code="GC303"
                )
            if max(indices) >= shape[at]:
                raise FormatError(
                    f"{what}: expected index {max(indices)} along axis {axis}, as select names "
                    f"it, found {shape[at]} values",
                    code="GC303",
                )
            found[at] = indices
        return tuple(found)

    def on(self, shape: Shape, what: str, visit: Visit | None = None, key: str = "") -> Samples:
        """Return the samples of an array, at phase 0 without a visit."""
        axes = self.axes_of(shape, what)
        selections = self.selections(shape, axes, what)
        first = next((at for at, grid in enumerate(axes) if grid is not None), 0)
        starts = []
        for at, (grid, size) in enumerate(zip(axes, shape, strict=True)):
            phase = 0
            if visit is not None and grid is not None:
                place = () if at == first else (at - first,)
                phase = grid.phase(size, visit.seed, visit.round, visit.chosen_by(key), *place)
            starts.append(range(1) if grid is None else grid.starts(size, phase))
        return Samples(shape, axes, selections, tuple(starts))


def _checked_axis(axis: int, shape: Shape, what: str) -> int:
    if -len(shape) <= axis < len(shape):
        return axis % len(shape)
    found = f"shape {list(shape)}" if shape else "a single value"
    raise FormatError(
        f"{what}: expected an array with an axis {axis}, found {found}", code="GC303"
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one array, by ordinal."""

    shape: Shape
    axes: tuple[AxisGrid | None, ...]  # grid of each axis; None: not cut
    selections: tuple[tuple[int, ...] | None, ...]
    starts: tuple[range, ...]  # along each axis

    def __len__(self) -> int:
        return math.prod(map(len, self.starts))

    @property
    def cut_axes(self) -> list[int]:
        return [at for at, grid in enumerate(self.axes) if grid is not None]

    @property
    def cut_sizes(self) -> list[int]:
        return [self.shape[at] for at in self.cut_axes]

    @property
    def values(self) -> int:
        """Number of values of one sample."""
        return math.prod(
            grid.length if grid is not None else len(self._taken(at))
            for at, grid in enumerate(self.axes)
        )

    @property
    def distinct_values(self) -> int:
        """Return the least number of new values that each sample adds to those read."""
        return math.prod(
            len(self._ascending(at)) if grid is None else grid.least_new
            for at, grid in enumerate(self.axes)
        )

    @property
    def is_padded(self) -> bool:
        return any(grid is not None and grid.pad for grid in self.axes)

    def too_short(self) -> str | None:
        """Return the reason why there are no samples, or None."""
        for at in self.cut_axes:
            grid = self.axes[at]
            if grid is not None and not self.starts[at]:
                return (
                    f"expected at least {grid.length:,} values along axis {at}, found "
                    f"{self.shape[at]:,}"
                )
        return None

    def of_array(self, other: Samples) -> Samples:
        """Return the same samples of another array with equal lengths along the cut axes."""
        starts = list(other.starts)
        for mine, its in zip(self.cut_axes, other.cut_axes, strict=True):
            starts[its] = self.starts[mine]
        return replace(other, starts=tuple(starts))

    def starts_of(self, ordinals: Sequence[int]) -> list[Shape]:
        """Return the start of each sample along each axis."""
        cut = self.cut_axes
        if len(cut) > 1:
            return [self.start(ordinal) for ordinal in ordinals]
        starts = self.starts[cut[0]]
        before, behind = (0,) * cut[0], (0,) * (len(self.shape) - 1 - cut[0])
        return [(*before, starts[ordinal], *behind) for ordinal in ordinals]

    def start(self, ordinal: int) -> Shape:
        found = [0] * len(self.starts)
        for at in reversed(self.cut_axes):
            ordinal, number = divmod(ordinal, len(self.starts[at]))
            found[at] = self.starts[at][number]
        return tuple(found)

    def origin(self, start: Shape) -> tuple[int, int]:
        """Return the origin [start, stop) along the cut axis.

        With several, it has places in C order.
        """
        cut = self.cut_axes
        ends = [self._end(at, start[at]) for at in range(len(start))]
        if len(cut) == 1:
            return start[cut[0]], ends[cut[0]]
        first = last = 0
        for size, begin, end in zip(self.shape, start, ends, strict=True):
            first, last = first * size + begin, last * size + end - 1
        return first, last + 1

    def hull(self, first: Shape, last: Shape) -> Box:
        """Return the box from the sample that starts at ``first`` to the one at ``last``."""
        return tuple(
            self._ascending(at) if grid is None else range(first[at], self._end(at, last[at]))
            for at, grid in enumerate(self.axes)
        )

    def cut_all(
        self, values: Array, hull: Box, starts: Sequence[Shape]
    ) -> list[tuple[Array, int, int]]:
        """Cut samples out of the values of a hull, with their origins."""
        cut, reordered = self.cut_axes, any(map(_is_reordered, self.selections))
        grid, at = self.axes[cut[0]], cut[0]
        if len(cut) > 1 or reordered or grid is None or grid.pad:
            return [(self.cut(values, hull, s), *self.origin(s)) for s in starts]
        # A shortcut for the usual case, because there may be a sample per byte.
        first, length = hull[at][0], grid.length
        before: tuple[Any, ...] = (slice(None),) * at
        if grid.window is None:
            return [(values[(*before, s[at] - first)], s[at], s[at] + 1) for s in starts]
        return [
            (
                values[(*before, slice(s[at] - first, s[at] - first + length))],
                s[at],
                s[at] + length,
            )
            for s in starts
        ]

    def cut(self, values: Array, hull: Box, start: Shape) -> Array:
        """Cut a sample out of the values of a hull, without the axes of single values."""
        index: list[Any] = []
        short: list[tuple[int, int]] = []
        for at, grid in enumerate(self.axes):
            first = start[at] - hull[at][0] if grid is not None else 0
            if grid is None:
                index.append(slice(None))
            elif grid.window is None:
                index.append(first)
            else:
                index.append(slice(first, first + grid.window))
                if start[at] + grid.window > self.shape[at]:
                    short.append((at, grid.window))
        found: Array = values[tuple(index)]
        if short:
            found = self._padded(found, short)
        return self._reordered(found)

    def _padded(self, found: Array, short: Sequence[tuple[int, int]]) -> Array:
        kept = [at for at, grid in enumerate(self.axes) if grid is None or grid.window]
        shape = list(found.shape)
        for at, window in short:
            shape[kept.index(at)] = window
        padded = np.zeros(shape, found.dtype)
        padded[tuple(slice(n) for n in found.shape)] = found
        return padded

    def _reordered(self, found: Array) -> Array:
        dropped = 0
        for at, (grid, chosen) in enumerate(zip(self.axes, self.selections, strict=True)):
            dropped += grid is not None and grid.window is None
            if chosen is not None and _is_reordered(chosen):
                places = np.searchsorted(sorted(set(chosen)), chosen)
                found = np.take(found, places, axis=at - dropped)
        return found

    def _end(self, at: int, start: int) -> int:
        grid = self.axes[at]
        return self.shape[at] if grid is None else min(start + grid.length, self.shape[at])

    def _taken(self, at: int) -> Sequence[int]:
        chosen = self.selections[at]
        return range(self.shape[at]) if chosen is None else chosen

    def _ascending(self, at: int) -> Indices:
        chosen = self.selections[at]
        if chosen is None:
            return range(self.shape[at])
        ascending = tuple(sorted(set(chosen)))
        whole = range(ascending[0], ascending[-1] + 1)
        return whole if len(whole) == len(ascending) else ascending


def _is_reordered(chosen: tuple[int, ...] | None) -> bool:
    return chosen is not None and list(chosen) != sorted(set(chosen))


@dataclass(frozen=True, slots=True)
class StorageOrder:
    """Numbers samples by the chunk in which they start, and then within the chunk.

    A sample's number in this order is its place. ``order`` is the order of the axes for chunks,
    and for the samples of a chunk, slowest first. Without chunks an axis is one chunk.
    """

    starts: tuple[range, ...]  # along each axis
    chunks: tuple[int | None, ...]  # values along each axis
    order: tuple[int, ...]  # of the axes

    @property
    def is_by_ordinal(self) -> bool:
        several = [at for at in self.order if len(self.starts[at]) > 1]
        if several != sorted(several):
            return False
        for depth, at in enumerate(several):
            if self.chunks[at] != 1:
                return all(self.chunks[later] is None for later in several[depth + 1 :])
        return True

    def ordinal(self, place: int) -> int:
        numbers = self._numbers(place)
        found = 0
        for at, starts in enumerate(self.starts):
            found = found * len(starts) + numbers[at]
        return found

    def chunk(self, place: int) -> range:
        """Return the places of the samples that start in the chunk of the sample at ``place``."""
        spans, inside = self._spans(place)
        return range(place - inside, place - inside + math.prod(map(len, spans)))

    def _numbers(self, place: int) -> list[int]:
        spans, inside = self._spans(place)
        numbers = [0] * len(spans)
        for at, span in zip(reversed(self.order), reversed(spans), strict=True):
            inside, number = divmod(inside, len(span))
            numbers[at] = span[number]
        return numbers

    def _spans(self, place: int) -> tuple[list[range], int]:
        """Return the starts in the chunk of a place along each axis, and its number among them."""
        spans: list[range] = []
        counts = [len(self.starts[at]) for at in self.order]
        above = 1
        for depth, at in enumerate(self.order):
            below = math.prod(counts[depth + 1 :])
            span = self._span(at, place // (above * below))
            place -= above * span.start * below
            above *= len(span)
            spans.append(span)
        return spans, place

    def _span(self, at: int, number: int) -> range:
        starts, chunk = self.starts[at], self.chunks[at]
        if chunk is None:
            return range(len(starts))
        border = starts[number] // chunk * chunk
        first = -(-(border - starts.start) // starts.step)
        stop = -(-(border + chunk - starts.start) // starts.step)
        return range(max(0, first), min(len(starts), stop))


def hulls_of(
    samples: Samples, ordinals: Sequence[int], order: Sequence[int], gap: int
) -> Iterator[tuple[Box, list[Shape]]]:
    """Yield boxes, each with the starts of the samples that are read with it.

    Neighbours along the fastest cut axis share a box if at most ``gap`` values separate them.
    ``order`` is the storage order of the axes, slowest first.
    """
    fastest = [at for at in order if samples.axes[at] is not None][-1]
    grid = samples.axes[fastest]
    assert grid is not None
    most = grid.length + gap
    others = [at for at in samples.cut_axes if at != fastest]
    group: list[Shape] = []
    for start in samples.starts_of(ordinals):
        if group:
            before = group[-1]
            near = 0 <= start[fastest] - before[fastest] <= most
            if not near or any(start[at] != before[at] for at in others):
                yield samples.hull(group[0], before), group
                group = []
        group.append(start)
    if group:
        yield samples.hull(group[0], group[-1]), group


def runs_of(indices: Indices) -> list[range]:
    """Return the runs of consecutive indices.

    >>> runs_of((0, 1, 5))
    [range(0, 2), range(5, 6)]
    """
    if isinstance(indices, range):
        return [indices]
    runs: list[range] = []
    for _, group in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        runs.append(range(members[0], members[-1] + 1))
    return runs


def grid_option(options: Mapping[str, Any], phase: str = "zero") -> ArrayGrid | None:
    """Return the grid of the options, or None if samples are whole objects."""
    if options.get("axis") is None and options.get("window") is None:
        for name in ("stride", "edge", "phase", "select"):
            if name in options:
                raise ConfigError(
                    f"source.options.{name}: needs window (or axis: 0, for single rows)",
                    code="GC103",
                )
        return None
    return array_grid_option(options, phase)


def array_grid_option(options: Mapping[str, Any], phase: str) -> ArrayGrid:
    window = options.get("window")
    dimensions = None
    if options.get("axis") is None and isinstance(window, list | tuple):
        dimensions = len(window)
        axes = list(range(dimensions))
    else:
        axes = _axes_option(options.get("axis", 0))
    windows = _per_axis("window", window, len(axes))
    strides = _per_axis("stride", options.get("stride"), len(axes))
    phases = _phases_option(options, phase, len(axes))
    pad = choice_option(options, "edge", ("drop", "pad"), "drop") == "pad"
    cuts = tuple(
        (axis, AxisGrid(length, stride or length or 1, pad, random))
        for axis, length, stride, random in zip(axes, windows, strides, phases, strict=True)
        if length is not None or not isinstance(window, list | tuple)
    )
    if not cuts:
        raise ConfigError("source.options.window: expected a length for one axis at least")
    return ArrayGrid(cuts, dimensions, select_option(options.get("select")))


def _axes_option(value: object) -> list[int]:
    axes = value if isinstance(value, list | tuple) else [0 if value is None else value]
    if axes and all(type(axis) is int for axis in axes) and len(set(axes)) == len(axes):
        return list(axes)
    raise ConfigError(
        f"source.options.axis: expected the number of an axis, or a list, found {value!r}"
    )


def _per_axis(name: str, value: object, count: int) -> list[int | None]:
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ConfigError(
            f"source.options.{name}: expected a value for each of {count} axes, found {value!r}"
        )
    for one in values:
        if one is not None and (type(one) is not int or one < 1):
            raise ConfigError(
                f"source.options.{name}: expected an integer of at least 1, found {one!r}"
            )
    return cast(list[int | None], values)


def _phases_option(options: Mapping[str, Any], default: str, count: int) -> list[bool]:
    value = options.get("phase", default)
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ConfigError(
            f"source.options.phase: expected a value for each of {count} axes, found {value!r}"
        )
    choices = ("zero", "random")
    return [
        choice_option({"phase": one}, "phase", choices, default) == "random" for one in values
    ]


def select_option(value: object) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping) and all(
        type(axis) is int and _is_indices(indices) for axis, indices in value.items()
    ):
        return tuple((axis, tuple(indices)) for axis, indices in value.items())
    raise ConfigError(
        "source.options.select: expected indices for an axis, as in {1: [0, 5, 9]}, found "
        f"{value!r}"
    )


def _is_indices(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(type(index) is int and index >= 0 for index in value)
    )
