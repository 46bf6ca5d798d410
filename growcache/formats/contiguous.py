"""Samples of arrays whose values are stored contiguously, read by byte range."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import (
    MOST_VISIT_BYTES,
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    is_fetched_whole,
    ordinals_of_part,
    refuse_many_samples,
    take_some,
)
from growcache.formats.byte_ranges import MOST_GAP_BYTES, FetchedObject, gathered, read_ranges
from growcache.formats.grids import (
    ArrayGrid,
    Box,
    Indices,
    Samples,
    Shape,
    StorageOrder,
    hulls_of,
    runs_of,
)
from growcache.formats.memory import SingleFlightCache
from growcache.schema import Array
from growcache.store.contract import Entry

_IS_LITTLE_ENDIAN = sys.byteorder == "little"
_READ_ALONG_BYTES = 1 << 18  # smaller gaps between samples are read, too
_WORTH_BYTES = 1 << 16  # of a range that is worth its own request
_MOST_TOGETHER_BYTES = 1 << 25  # of the samples that are worth one visit
_MOST_RANGES = 1 << 16  # of a visit


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    offset: int  # of the first value, in bytes
    shape: Shape
    dtype: np.dtype[np.generic]  # of one value, with byte order
    fortran: bool = False  # whether the first axis varies fastest

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def order(self) -> tuple[int, ...]:
        """Return the axes, slowest first."""
        axes = range(len(self.shape))
        return tuple(reversed(axes)) if self.fortran else tuple(axes)


class ContiguousFormat(ObjectFormat):
    ranged = header_first = True

    def __init__(self, grid: ArrayGrid, kept_bytes: int) -> None:
        self._grid = grid
        # With the layout in memory, a second visit to an object is a single request.
        self._layouts: SingleFlightCache[Entry, dict[str, ArrayLayout]] = SingleFlightCache(
            kept_bytes
        )
        self.says_ordinals = len(grid.cuts) > 1

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, ArrayLayout], int]:
        """Return the layout of each array, and about how many bytes the layouts take."""
        raise NotImplementedError

    async def measure(self, reader: ObjectReader) -> Measure:
        layouts = await self._located(reader)
        return measure_arrays(layouts, self._grid, reader.entry)

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        layouts = await self._located(reader)
        return ordinals_of_visit(layouts, self._grid, visit, reader.entry.key)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        if self._layouts.peek(reader.entry) is None and is_fetched_whole(reader.entry, visit):
            reader = FetchedObject(reader, await reader.read())
        layouts = await self._located(reader)
        return self.meant(await read_samples(reader, layouts, self._grid, visit), layouts)

    def meant(
        self, found: SamplesWithOrigins, layouts: Mapping[str, ArrayLayout]
    ) -> SamplesWithOrigins:
        """Return samples with the values that their stored values mean."""
        return found

    async def _located(self, reader: ObjectReader) -> dict[str, ArrayLayout]:
        return await self._layouts.get(reader.entry, lambda: self.look_up(reader))


def ordinals_of_visit(
    layouts: Mapping[str, ArrayLayout], grid: ArrayGrid, visit: Visit, key: str
) -> Sequence[int]:
    """Return the ordinals of a visit's samples, ascending."""
    return sorted(wanted_ordinals(layouts, _samples_of(layouts, grid, visit, key), visit, key))


def _samples_of(
    layouts: Mapping[str, ArrayLayout], grid: ArrayGrid, visit: Visit | None, key: str
) -> dict[str, Samples]:
    several = len(layouts) > 1
    return {
        name: grid.on(layout.shape, f"{key}: {name}" if several else key, visit, key)
        for name, layout in layouts.items()
    }


async def read_samples(
    reader: ObjectReader, layouts: Mapping[str, ArrayLayout], grid: ArrayGrid, visit: Visit
) -> SamplesWithOrigins:
    key = reader.entry.key
    each = _samples_of(layouts, grid, visit, key)
    wanted = wanted_ordinals(layouts, each, visit, key)
    reads = {
        name: ArrayRead(layouts[name], samples, _hulls(layouts[name], samples, wanted))
        for name, samples in each.items()
    }
    _refuse_large_visit(reads.values(), key)
    read = await gathered([one.fetch(reader) for one in reads.values()])
    return zip_fields(dict(zip(reads, read, strict=True)))


def zip_fields(
    fields: Mapping[str, Sequence[tuple[Array, int, int]]],
) -> SamplesWithOrigins:
    return [
        ({name: one[0] for name, one in zip(fields, found, strict=True)}, *found[0][1:])
        for found in zip(*fields.values(), strict=True)
    ]


def wanted_ordinals(
    layouts: Mapping[str, ArrayLayout], each: Mapping[str, Samples], visit: Visit, key: str
) -> Sequence[int]:
    """Return the ordinals of a visit's samples, in storage order of the largest array."""
    refuse_differing_sizes(each, key)
    name = max(layouts, key=lambda name: layouts[name].nbytes)
    layout, samples = layouts[name], each[name]
    wanted = visit.given(len(samples))
    if wanted is None:
        wanted = ordinals_of_part(len(samples), visit)
        if visit.take is not None:
            wanted = take_some(wanted, visit, visit.chosen_by(key))
        refuse_many_samples(key, len(wanted))
        order = StorageOrder(samples.starts, (None,) * len(layout.shape), layout.order)
        if len(samples.cut_axes) > 1 and not order.is_by_ordinal:
            wanted = [order.ordinal(place) for place in wanted]
    refuse_many_samples(key, len(wanted))
    return wanted


def refuse_differing_sizes(each: Mapping[str, Samples], key: str) -> None:
    sizes = {name: samples.cut_sizes for name, samples in each.items()}
    if len({tuple(found) for found in sizes.values()}) > 1:
        shown = ", ".join(
            f"{name}: {found[0] if len(found) == 1 else found}" for name, found in sizes.items()
        )
        raise FormatError(
            f"{key}: expected arrays of one length, found {shown[:160]}", code="GC303"
        )


Hulls = list[tuple[Box, list[Shape]]]


def _hulls(layout: ArrayLayout, samples: Samples, wanted: Sequence[int]) -> Hulls:
    at = next(at for at in reversed(layout.order) if samples.axes[at] is not None)
    inner = layout.order[layout.order.index(at) + 1 :]
    nbytes = math.prod(layout.shape[axis] for axis in inner) * layout.dtype.itemsize
    gap = max(1, _READ_ALONG_BYTES // max(1, nbytes))
    return list(hulls_of(samples, wanted, layout.order, gap))


def _refuse_large_visit(reads: Collection[ArrayRead], key: str) -> None:
    """Refuse a large visit here, too, because arrays may be larger than in the first object."""
    nbytes = sum(one.nbytes for one in reads)
    if nbytes > MOST_VISIT_BYTES:
        sample = sum(one.samples.values * one.layout.dtype.itemsize for one in reads)
        raise FormatError(
            f"{key}: one visit may read at most {MOST_VISIT_BYTES:,} bytes, found {nbytes:,} "
            f"for samples of {sample:,} bytes; cut smaller windows",
            code="GC305",
        )


@dataclass(frozen=True, slots=True)
class ArrayRead:
    layout: ArrayLayout
    samples: Samples
    hulls: Hulls

    @property
    def nbytes(self) -> int:
        read = sum(math.prod(map(len, hull)) for hull, _ in self.hulls)
        if self.samples.is_padded:
            read = max(read, self.samples.values * sum(len(starts) for _, starts in self.hulls))
        return read * self.layout.dtype.itemsize

    async def fetch(self, reader: ObjectReader) -> list[tuple[Array, int, int]]:
        boxes = await read_boxes(reader, self.layout, [hull for hull, _ in self.hulls])
        return [
            (native_order(sample), start, stop)
            for values, (hull, starts) in zip(boxes, self.hulls, strict=True)
            for sample, start, stop in self.samples.cut_all(values, hull, starts)
        ]


async def read_boxes(
    reader: ObjectReader, layout: ArrayLayout, boxes: Sequence[Box]
) -> list[Array]:
    reads = [_BoxRead.of(layout, box) for box in boxes]
    if sum(len(one.ranges) for one in reads) > _MOST_RANGES:
        raise FormatError(
            f"{reader.entry.key}: one visit may read at most {_MOST_RANGES:,} byte ranges, "
            f"found {sum(len(one.ranges) for one in reads):,}; cut along an axis that varies "
            "more slowly",
            code="GC305",
        )
    if not layout.nbytes:
        return [np.empty(tuple(map(len, box)), layout.dtype) for box in boxes]
    data = iter(await read_ranges(reader, [pair for one in reads for pair in one.ranges]))
    return [one.assembled(list(itertools.islice(data, len(one.ranges)))) for one in reads]


@dataclass(frozen=True, slots=True)
class _BoxRead:
    layout: ArrayLayout
    shape: Shape  # of the array, slowest axis first
    box: Box  # with the same order of axes
    split: int  # axis along which ranges go; later axes are read whole
    ranges: list[tuple[int, int]]

    @classmethod
    def of(cls, layout: ArrayLayout, box: Box) -> _BoxRead:
        shape = tuple(layout.shape[at] for at in layout.order)
        box = tuple(box[at] for at in layout.order)
        split = _split_axis(shape, box, layout.dtype.itemsize)
        return cls(layout, shape, box, split, list(_ranges(layout, shape, box, split)))

    def assembled(self, data: Sequence[memoryview]) -> Array:
        inner, rest = self.box[self.split + 1 :], self.shape[self.split + 1 :]
        pieces = [
            picked(values, (range(len(values)), *inner))
            for piece in data
            for values in (np.frombuffer(piece, self.layout.dtype).reshape(-1, *rest),)
        ]
        values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        values = values.reshape(tuple(map(len, self.box)))
        return values.T if self.layout.fortran else values


def _split_axis(shape: Shape, box: Box, itemsize: int) -> int:
    """Return the last axis that is not read whole. Small gaps are read, too."""
    inner = itemsize
    for at in reversed(range(1, len(shape))):
        wanted = len(box[at]) * inner
        if shape[at] * inner - wanted > max(MOST_GAP_BYTES, wanted // 16):
            return at
        inner *= shape[at]
    return 0


def _ranges(
    layout: ArrayLayout, shape: Shape, box: Box, split: int
) -> Iterator[tuple[int, int]]:
    steps = [math.prod(shape[at + 1 :]) * layout.dtype.itemsize for at in range(split + 1)]
    runs = runs_of(box[split])
    for outer in itertools.product(*box[:split]):
        at = layout.offset + sum(i * step for i, step in zip(outer, steps, strict=False))
        for run in runs:
            yield at + run.start * steps[split], at + run.stop * steps[split]


def picked(values: Array, box: Box | Sequence[Indices]) -> Array:
    slices = [slice(at.start, at.stop) if isinstance(at, range) else slice(None) for at in box]
    values = values[tuple(slices)]
    for axis, indices in enumerate(box):
        if not isinstance(indices, range):
            values = values.take(indices, axis=axis)
    return values


def cut_samples(
    values: Array, samples: Samples, wanted: Sequence[int]
) -> list[tuple[Array, int, int]]:
    """Return samples of an array in memory, with their origins."""
    if not wanted:
        return []
    last = tuple(size - 1 for size in samples.shape)
    hull = samples.hull((0,) * len(samples.shape), last)
    values = picked(values, hull)
    starts = samples.starts_of(wanted)
    return [
        (native_order(sample), start, stop)
        for sample, start, stop in samples.cut_all(values, hull, starts)
    ]


def native_order(values: Array) -> Array:
    # A shortcut for nearly all arrays.
    if _IS_LITTLE_ENDIAN and values.dtype.isnative and values.flags.c_contiguous:
        return values
    return np.asarray(values, values.dtype.newbyteorder("<"), order="C")


def measure_arrays(
    layouts: Mapping[str, ArrayLayout], grid: ArrayGrid, entry: Entry
) -> Measure:
    each = _samples_of(layouts, grid, None, entry.key)
    refuse_differing_sizes(each, entry.key)
    rows = [_row_bytes(layouts[name], samples) for name, samples in each.items()]
    if not sum(rows):
        raise FormatError(
            f"{entry.key}: its rows have no values, so sizes of objects do not tell how many there "
            "are; drop axis and window to take whole arrays",
            code="GC303",
        )
    nbytes = sum(layout.nbytes for layout in layouts.values())
    name = max(layouts, key=lambda name: layouts[name].nbytes)
    return replace(
        measure_samples(each[name], sum(rows), nbytes, entry.size),
        together=samples_together(layouts[name], each[name]),
    )


def _row_bytes(layout: ArrayLayout, samples: Samples) -> int:
    """Return the bytes per index along the cut axes."""
    sizes = (size for at, size in enumerate(layout.shape) if samples.axes[at] is None)
    return math.prod(sizes) * layout.dtype.itemsize


def measure_samples(samples: Samples, row_bytes: float, nbytes: int, size: int) -> Measure:
    """Return the measure of an object of ``size`` bytes, of which ``nbytes`` are values."""
    count, empty = len(samples), samples.too_short()
    if len(samples.cut_axes) > 1:
        return Measure(max(1.0, nbytes / max(1, count)), size - nbytes, count, empty=empty)
    grid = samples.axes[samples.cut_axes[0]]
    assert grid is not None
    overhead = size - nbytes + math.floor(grid.lost * row_bytes)
    return Measure(max(1e-6, grid.stride * row_bytes), overhead, count, empty=empty)


def samples_together(layout: ArrayLayout, samples: Samples) -> int:
    """Return the number of neighbours that makes the ranges of a visit worth their requests."""
    sample = max(1, samples.values * layout.dtype.itemsize)
    most = max(1, _MOST_TOGETHER_BYTES // sample)
    together, inner = 1, layout.dtype.itemsize
    for at in reversed(layout.order):
        grid, starts = samples.axes[at], samples.starts[at]
        if grid is not None and at != layout.order[0]:
            if grid.length * inner >= _WORTH_BYTES:
                break
            wanted = -(-(_WORTH_BYTES // inner - grid.length) // grid.stride) + 1
            together *= max(1, min(len(starts), wanted))
        inner *= layout.shape[at]
    return max(1, min(together, most))
