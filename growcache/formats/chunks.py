"""Samples from arrays of equal length that are stored in chunks.

A chunk is fetched and decoded as a whole. Therefore parts start and end with chunks if
possible, and a visit that takes a few samples takes them from few chunks.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    DEFLATE_RATIO,
    Measure,
    Visit,
    most_decoded_bytes,
    refuse_many_samples,
)
from growcache.formats.contiguous import (
    Hulls,
    measure_samples,
    native_order,
    picked,
    refuse_differing_sizes,
)
from growcache.formats.grids import (
    ArrayGrid,
    Box,
    Indices,
    Samples,
    Shape,
    StorageOrder,
    hulls_of,
)
from growcache.formats.memory import correct_decoded, reserve_decoded
from growcache.formats.scales import Scale
from growcache.formats.sparse_rows import RaggedRows
from growcache.schema import DTYPE_KINDS, Array, Sample
from growcache.seeding import generator_at
from growcache.store.contract import Entry

ChunkOf = Callable[[int], range]
"""Returns the places of the samples that share a chunk with the sample at a place."""


def choose_ordinals(samples: int, visit: Visit, key: str, chunk_of: ChunkOf) -> Sequence[int]:
    """Return the ordinals of a visit's samples, if storage has them in the order of ordinals."""
    given = visit.given(samples)
    return choose_places(samples, visit, key, chunk_of) if given is None else given


def choose_places(samples: int, visit: Visit, key: str, chunk_of: ChunkOf) -> Sequence[int]:
    mine = ordinals_of_chunked_part(samples, visit, chunk_of)
    return mine if visit.take is None else _take_ordinals(mine, visit, key, chunk_of)


def ordinals_of_chunked_part(samples: int, visit: Visit, chunk_of: ChunkOf) -> range:
    """Return `ordinals_of_part`, with borders moved to chunks.

    A border within half a part of a chunk's border is moved there. So parts of about the size
    of a chunk become chunks, and much smaller parts remain. Borders keep their order, so every
    sample is in exactly one part.

    >>> tens = lambda ordinal: range(ordinal // 10 * 10, ordinal // 10 * 10 + 10)
    >>> [ordinals_of_chunked_part(32, Visit(part, 3, 0, 0), tens) for part in range(3)]
    [range(0, 10), range(10, 20), range(20, 32)]
    """
    return range(
        _part_border(samples, visit.part, visit.parts, chunk_of),
        _part_border(samples, visit.part + 1, visit.parts, chunk_of),
    )


def _part_border(samples: int, part: int, parts: int, chunk_of: ChunkOf) -> int:
    at = part * samples // parts
    if part in (0, parts) or at >= samples:
        return at
    unit = chunk_of(at)
    near = unit.start if at - unit.start <= unit.stop - at else unit.stop
    return near if 2 * parts * abs(near - at) <= samples else at


def _take_ordinals(mine: range, visit: Visit, key: str, chunk_of: ChunkOf) -> Sequence[int]:
    """Take random samples from few chunks.

    Every sample is equally likely, because the first chunk is that of a random sample.
    """
    missing = visit.take or 0
    if missing >= len(mine):
        return mine
    rng = generator_at(
        "take", visit.seed, visit.round, visit.chosen_by(key), visit.part, visit.parts
    )
    found: list[int] = []
    seen: set[int] = set()
    while missing > 0:
        unit = chunk_of(mine[int(rng.integers(len(mine)))])
        if unit.start in seen:
            continue
        seen.add(unit.start)
        first, stop = max(unit.start, mine.start), min(unit.stop, mine.stop)
        count = min(missing, stop - first)
        picked = rng.choice(stop - first, count, replace=False)
        found += [first + int(i) for i in picked]
        missing -= count
    return sorted(found)


MOST_CHUNKS = 1 << 16  # of a visit


ChunkPlace = tuple[int, ...]  # of a chunk in the grid of chunks
Spans = list[Sequence[int]]


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    shape: tuple[int, ...]
    chunks: tuple[int, ...]  # shape of a chunk; the last chunks extend beyond the array
    dtype: np.dtype[Any]  # as stored
    fill: Array  # value of unwritten chunks
    ratio: int = DEFLATE_RATIO  # by which compression may shrink a chunk

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.dtype.itemsize

    def places(self, boxes: Iterable[Box], entry: Entry) -> list[ChunkPlace]:
        spans = [self._spans(box) for box in boxes if all(box)]
        count = sum(math.prod(map(len, span)) for span in spans)
        most = min(
            MOST_CHUNKS, most_decoded_bytes(entry, self.ratio) // max(1, self.chunk_bytes)
        )
        if count > 2 * most and self._are_more(spans, most):
            raise FormatError(
                f"{entry.key}: one visit may read at most {most:,} chunks of "
                f"{self.chunk_bytes:,} bytes, found {count:,}; cut smaller windows",
                code="GC305",
            )
        return sorted({place for span in spans for place in itertools.product(*span)})

    @staticmethod
    def _are_more(spans: Iterable[Spans], most: int) -> bool:
        """Whether boxes touch more than ``most`` chunks, without listing them all."""
        found: set[ChunkPlace] = set()
        for span in spans:
            if math.prod(map(len, span)) > most:
                return True
            found.update(itertools.product(*span))
            if len(found) > most:
                return True
        return False

    def _spans(self, box: Box) -> Spans:
        """Return the numbers of the chunks that a box touches, along each axis."""
        return [
            range(at.start // chunk, -(-at.stop // chunk))
            if isinstance(at, range)
            else sorted({index // chunk for index in at})
            for at, chunk in zip(box, self.chunks, strict=True)
        ]

    async def decoding(
        self, boxes: Iterable[Box], chunks: int, work: Callable[[], list[Array]]
    ) -> list[Array]:
        values = _values_in(boxes) * self.dtype.itemsize
        nbytes = values + chunks * self.chunk_bytes
        await reserve_decoded(nbytes)
        found = await asyncio.to_thread(work)
        correct_decoded(values, nbytes)
        return found

    def assembled(self, box: Box, decoded: Mapping[ChunkPlace, Array | None]) -> Array:
        """Return the values of a box from decoded chunks; None is a chunk that was never written."""
        values = np.empty(tuple(map(len, box)), self.dtype.newbyteorder("<"))
        if not values.size:
            return values
        for place in itertools.product(*self._spans(box)):
            pairs = [
                _shared(at, number * chunk, chunk)
                for at, number, chunk in zip(box, place, self.chunks, strict=True)
            ]
            found, into = decoded[place], tuple(to for to, _ in pairs)
            values[into] = (
                self.fill if found is None else picked(found, [of for _, of in pairs])
            )
        return values


def _values_in(boxes: Iterable[Box]) -> int:
    return sum(math.prod(map(len, box)) for box in boxes)


def _shared(indices: Indices, first: int, chunk: int) -> tuple[slice, Indices]:
    """Return the places of a chunk's indices in the box and in the chunk."""
    if isinstance(indices, range):
        start, stop = max(indices.start, first), min(indices.stop, first + chunk)
        into = slice(start - indices.start, stop - indices.start)
        return into, range(start - first, stop - first)
    start, stop = bisect_left(indices, first), bisect_left(indices, first + chunk)
    return slice(start, stop), tuple(index - first for index in indices[start:stop])


# A list has strings, or other values of rows.
ArrayOrStrings: TypeAlias = Array | list[Any] | RaggedRows
MOST_ROWS = 1 << 58


class FieldArray:
    def __init__(self, name: str, chunking: ChunkGrid, scale: Scale | None = None) -> None:
        self.name = name
        self.chunking = chunking
        self.scale = scale
        value = max(chunking.dtype.itemsize, scale.dtype.itemsize if scale else 0)
        self.nbytes = math.prod(chunking.shape) * value
        # Values that can only be fetched together.
        self.chunks: tuple[int, ...] = chunking.chunks

    @property
    def shape(self) -> Shape:
        return self.chunking.shape

    async def stored(self, boxes: Sequence[Box]) -> list[ArrayOrStrings]:
        raise NotImplementedError

    async def boxes(self, boxes: Sequence[Box]) -> list[ArrayOrStrings]:
        """Return the values that the stored values of boxes mean."""
        found, scale = await self.stored(boxes), self.scale
        if scale is None:
            return found
        await reserve_decoded(_values_in(boxes) * scale.dtype.itemsize)
        pairs = zip(found, boxes, strict=True)
        return await asyncio.to_thread(
            lambda: [scale.apply(np.asarray(values), box) for values, box in pairs]
        )

    def samples_together(self, samples: Samples) -> int:
        """Return the number of samples that start in one chunk."""
        grids = zip(samples.axes, self.chunks, strict=True)
        return math.prod(
            max(1, chunk // grid.stride) for grid, chunk in grids if grid is not None
        )


@dataclass(frozen=True, slots=True)
class CutFields:
    """The samples of arrays that are cut together."""

    fields: Sequence[FieldArray]
    samples: Mapping[str, Samples]  # by name of the field
    entry: Entry
    ratio: int = DEFLATE_RATIO

    @classmethod
    def of(
        cls,
        fields: Sequence[FieldArray],
        grid: ArrayGrid,
        entry: Entry,
        visit: Visit | None = None,
    ) -> CutFields:
        """Return all samples of the arrays, at phase 0 without a visit."""
        samples = {}
        for one in fields:
            what = f"{entry.key}: {one.name}" if len(fields) > 1 else entry.key
            if max(one.shape, default=0) > MOST_ROWS:
                raise FormatError(
                    f"{what}: it claims an array of {list(one.shape)}", code="GC302"
                )
            refuse_large_chunk(one, entry)
            samples[one.name] = grid.on(one.shape, what, visit, entry.key)
        refuse_differing_sizes(samples, entry.key)
        return cls(fields, samples, entry)

    @property
    def largest(self) -> FieldArray:
        return max(self.fields, key=lambda one: one.nbytes)

    def places(self) -> StorageOrder:
        axes = self.samples[self.largest.name]
        return StorageOrder(axes.starts, self.largest.chunks, tuple(range(len(axes.shape))))

    def wanted(self, visit: Visit) -> Sequence[int]:
        """Return the ordinals of a visit's samples, in storage order."""
        samples, order = self.samples[self.largest.name], self.places()
        if (given := visit.given(len(samples))) is not None:
            return given
        wanted = choose_places(len(samples), visit, self.entry.key, order.chunk)
        refuse_many_samples(self.entry.key, len(wanted))
        return wanted if order.is_by_ordinal else [order.ordinal(place) for place in wanted]

    async def read(self, wanted: Sequence[int]) -> list[tuple[Sample, int, int]]:
        refuse_many_samples(self.entry.key, len(wanted))
        self._refuse_large_claims(len(wanted))
        hulls = {
            one.name: list(hulls_of(self.samples[one.name], wanted, range(len(one.shape)), 0))
            for one in self.fields
        }
        self._refuse_large(hulls, len(wanted))
        read = await asyncio.gather(
            *(one.boxes([hull for hull, _ in hulls[one.name]]) for one in self.fields)
        )
        columns = [
            column
            for one, found in zip(self.fields, read, strict=True)
            for column in self._columns(one.name, hulls[one.name], found)
        ]
        origins = self._origins(hulls[self.fields[0].name])
        return [
            ({name: values[i] for name, values in columns}, *origin)
            for i, origin in enumerate(origins)
        ]

    def _columns(
        self, name: str, hulls: Hulls, found: Sequence[ArrayOrStrings]
    ) -> list[tuple[str, list[Any]]]:
        """Return the samples of each field of an array."""
        samples = self.samples[name]
        columns: dict[str, list[Any]] = {}
        for values, (hull, starts) in zip(found, hulls, strict=True):
            for field, inner in flat_fields(name, values):
                column = columns.setdefault(field, [])
                for start in starts:
                    column.append(
                        inner[start[0] - hull[0][0]]
                        if isinstance(inner, list)
                        else native_order(samples.cut(inner, hull, start))
                    )
        return list(columns.items())

    def _origins(self, hulls: Hulls) -> list[tuple[int, int]]:
        samples = self.samples[self.fields[0].name]
        return [samples.origin(start) for _, starts in hulls for start in starts]

    def _refuse_large_claims(self, count: int) -> None:
        """Refuse too many samples before examining each, because an object may claim any shape."""
        nbytes = chunks = 0
        for one in self.fields:
            values = count * self.samples[one.name].distinct_values
            nbytes += int(values * one.nbytes / max(1, math.prod(one.shape)))
            if one.chunks == one.chunking.chunks:
                chunks = max(chunks, values // max(1, math.prod(one.chunks)))
        refuse_large_visit(self.entry, nbytes, self.ratio)
        if chunks > MOST_CHUNKS:
            raise FormatError(
                f"{self.entry.key}: one visit may read at most {MOST_CHUNKS:,} chunks, found "
                f"{chunks:,}; cut smaller windows, or set a smaller sampling.samples_per_object",
                code="GC305",
            )

    def _refuse_large(self, hulls: Mapping[str, Hulls], count: int) -> None:
        nbytes = 0
        for one in self.fields:
            samples = self.samples[one.name]
            value = one.nbytes / max(1, math.prod(one.shape))
            read = sum(math.prod(map(len, hull)) for hull, _ in hulls[one.name])
            padded = count * samples.values if samples.is_padded else 0
            nbytes += int(max(read, padded) * value)
        refuse_large_visit(self.entry, nbytes, self.ratio)


def measure_fields(cut: CutFields) -> Measure:
    """Divide the bytes evenly among the samples, which is an estimate for compressed arrays."""
    largest, size = cut.largest, cut.entry.size
    samples = cut.samples[largest.name]
    rows = samples.cut_sizes[0]
    measure = measure_samples(samples, size / max(1, rows), size, size)
    return replace(measure, together=largest.samples_together(samples))


def refuse_large_visit(entry: Entry, nbytes: int, ratio: int = DEFLATE_RATIO) -> None:
    if nbytes > (most := most_decoded_bytes(entry, ratio)):
        raise FormatError(
            f"{entry.key}: one visit may yield at most {most:,} bytes, found {nbytes:,}; set a "
            "smaller window, or a smaller sampling.samples_per_object",
            code="GC305",
        )


def refuse_large_chunk(array: FieldArray, entry: Entry) -> None:
    """Refuse an array whose chunks are too large for any visit to decode."""
    grid = array.chunking
    nbytes = math.prod(array.chunks) * grid.dtype.itemsize
    if nbytes > (most := most_decoded_bytes(entry, grid.ratio)):
        raise FormatError(
            f"{entry.key}: one visit may decode at most {most:,} bytes, found chunks of "
            f"{nbytes:,} in an object of {entry.size:,}",
            code="GC305",
        )


def flat_fields(name: str, values: ArrayOrStrings) -> list[tuple[str, Array | list[Any]]]:
    if isinstance(values, list):
        return [(name, values)]
    if isinstance(values, RaggedRows):
        return [(f"{name}.indices", values.indices), (f"{name}.data", values.data)]
    if values.dtype.names is None:
        return [(name, native_order(values))]
    return [
        pair
        for inner in values.dtype.names
        for pair in flat_fields(f"{name}.{inner}", values[inner])
    ]


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether values of this dtype, or all fields of a record dtype, can be cached."""
    if dtype.subdtype is not None:
        return is_numeric(dtype.subdtype[0])
    if dtype.names is not None:
        return all(is_numeric(dtype[name]) for name in dtype.names)
    return dtype.kind in DTYPE_KINDS and not dtype.hasobject and dtype.itemsize > 0


def array_paths_option(options: Mapping[str, Any], option: str) -> dict[str, str] | None:
    value = options.get(option)
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(path, str) for path in value):
        pairs = [(path.rstrip("/").rpartition("/")[2], path) for path in value]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = []
    plain = all(isinstance(name, str) and isinstance(path, str) for name, path in pairs)
    if not pairs or not plain or not all(name and path.strip("/") for name, path in pairs):
        raise ConfigError(
            f"source.options.{option}: expected a list of paths, or field: path, found {value!r}"
        )
    if len(named := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"source.options.{option}: two are named {twice!r}; give them different names, as "
            "in {a: path, b: other/path}"
        )
    return named
