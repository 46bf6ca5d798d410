"""Samples from arrays of equal length that are stored in chunks.

A chunk is fetched and decoded as a whole, so parts begin and end with chunks where they can,
and a visit that takes a few samples takes them from few chunks.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    DEFLATE_RATIO,
    RUN_LENGTH_RATIO,
    Measure,
    Visit,
    most_decoded_bytes,
    refuse_many_samples,
)
from growcache.formats.memory import correct_decoded, reserve_decoded
from growcache.formats.rows import SampleGrid, cut_window, native_order, runs_of_starts
from growcache.schema import DTYPE_KINDS, Array, Sample
from growcache.seeding import generator_at
from growcache.store.contract import Entry

ChunkOf = Callable[[int], range]
"""The ordinals of the samples that share a unit with the sample of this ordinal."""


def choose_ordinals(samples: int, visit: Visit, key: str, chunk_of: ChunkOf) -> Sequence[int]:
    if (given := visit.given(samples)) is not None:
        return given
    mine = ordinals_of_chunked_part(samples, visit, chunk_of)
    return mine if visit.take is None else _take_ordinals(mine, visit, key, chunk_of)


def ordinals_of_chunked_part(samples: int, visit: Visit, chunk_of: ChunkOf) -> range:
    """Return `ordinals_of_part`, with borders moved to chunks.

    A border within half a part of a chunk's border is moved there: parts about as large as a
    chunk become chunks, far smaller parts stay. Borders keep their order, so every sample is in
    exactly one part.

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
    """Every sample is equally likely, because the first chunk is that of a random sample."""
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


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    shape: tuple[int, ...]
    chunks: tuple[int, ...]  # shape of a chunk; the last ones reach beyond the array
    dtype: np.dtype[Any]  # as stored
    fill: Array  # value of what was never written
    ratio: int = DEFLATE_RATIO  # by which compression may shrink a chunk

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.dtype.itemsize

    def places(self, runs: Iterable[range], entry: Entry) -> list[ChunkPlace]:
        spans = [self._span(run) for run in runs if run]
        count = sum(map(len, spans)) * math.prod(map(len, self._across))
        most = min(
            MOST_CHUNKS, most_decoded_bytes(entry, self.ratio) // max(1, self.chunk_bytes)
        )
        if count > 2 * most:  # neighbours may share their chunks
            raise FormatError(
                f"{entry.key}: one visit may read {most:,} chunks of {self.chunk_bytes:,} bytes, "
                f"found {count:,}; cut smaller windows"
            )
        return self._places({at for span in spans for at in span})

    @property
    def _across(self) -> list[range]:
        sizes = zip(self.shape[1:], self.chunks[1:], strict=True)
        return [range(-(-size // chunk)) for size, chunk in sizes]

    def _span(self, run: range) -> range:
        return range(run.start // self.chunks[0], -(-run.stop // self.chunks[0]))

    def _places(self, firsts: Iterable[int]) -> list[ChunkPlace]:
        across = self._across
        return [place for at in sorted(firsts) for place in itertools.product([at], *across)]

    async def decoding(
        self, runs: Iterable[range], chunks: int, work: Callable[[], list[Array]]
    ) -> list[Array]:
        rows = sum(map(len, runs)) * math.prod(self.shape[1:]) * self.dtype.itemsize
        nbytes = rows + chunks * self.chunk_bytes
        await reserve_decoded(nbytes)
        found = await asyncio.to_thread(work)
        correct_decoded(rows, nbytes)
        return found

    def assembled(self, run: range, decoded: Mapping[ChunkPlace, Array | None]) -> Array:
        """Return the rows of a run; None stands for a chunk that was never written."""
        rows = np.empty((len(run), *self.shape[1:]), self.dtype.newbyteorder("<"))
        if not rows.size:
            return rows
        for place in self._places(self._span(run)):
            into, out_of = self._slices(place, run)
            found = decoded[place]
            rows[into] = self.fill if found is None else found[out_of]
        return rows

    def _slices(
        self, place: ChunkPlace, run: range
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        bounds = [(run.start, run.stop), *((0, size) for size in self.shape[1:])]
        into, out_of = [], []
        for at, chunk, (first, last) in zip(place, self.chunks, bounds, strict=True):
            start, stop = max(first, at * chunk), min(last, (at + 1) * chunk)
            into.append(slice(start - first, stop - first))
            out_of.append(slice(start - at * chunk, stop - at * chunk))
        return tuple(into), tuple(out_of)


ArrayOrStrings: TypeAlias = Array | list[Any]  # a list holds strings
MOST_ROWS = 1 << 58


class FieldArray:
    def __init__(self, name: str, chunking: ChunkGrid) -> None:
        self.name = name
        self.chunking = chunking
        self.length = chunking.shape[0]
        self.row_bytes = math.prod(chunking.shape[1:]) * chunking.dtype.itemsize
        self.unit = chunking.chunks[0]  # rows that can only be fetched together

    async def rows(self, runs: Sequence[range]) -> list[ArrayOrStrings]:
        raise NotImplementedError


async def read_windows(
    series: Sequence[FieldArray], grid: SampleGrid, visit: Visit, entry: Entry
) -> list[tuple[Sample, int, int]]:
    starts, wanted = _starts_and_ordinals(series, grid, visit, entry.key)
    return await _read_starts(series, grid, entry, starts, wanted)


def window_ordinals(
    series: Sequence[FieldArray], grid: SampleGrid, visit: Visit, key: str
) -> Sequence[int]:
    return _starts_and_ordinals(series, grid, visit, key)[1]


def _starts_and_ordinals(
    series: Sequence[FieldArray], grid: SampleGrid, visit: Visit, key: str
) -> tuple[range, Sequence[int]]:
    count = common_length(series, key)
    starts = grid.starts(count, grid.phase(count, visit, key))
    return starts, choose_ordinals(
        len(starts), visit, key, _chunk_of_start(starts, _chunk_rows(series))
    )


async def read_owned_windows(
    series: Sequence[FieldArray], grid: SampleGrid, visit: Visit, entry: Entry, starts: range
) -> list[tuple[Sample, int, int]]:
    wanted = choose_ordinals(len(starts), visit, entry.key, lambda _: range(len(starts)))
    return await _read_starts(series, grid, entry, starts, wanted, RUN_LENGTH_RATIO)


async def _read_starts(
    series: Sequence[FieldArray],
    grid: SampleGrid,
    entry: Entry,
    starts: range,
    ordinals: Sequence[int],
    ratio: int = DEFLATE_RATIO,
) -> list[tuple[Sample, int, int]]:
    refuse_many_samples(entry.key, len(ordinals))
    count = series[0].length
    groups = runs_of_starts([starts[i] for i in ordinals], grid.length, 0)
    runs = [range(group[0], min(group[-1] + grid.length, count)) for group in groups]
    rows = sum(map(len, runs))
    padded = len(ordinals) * grid.length if grid.pad else 0
    refuse_large_visit(entry, max(rows, padded) * sum(one.row_bytes for one in series), ratio)
    read = await asyncio.gather(*(one.rows(runs) for one in series))
    columns = [
        {name: values for one, found in zip(series, read, strict=True)
         for name, values in flat_fields(one.name, found[number])}
        for number in range(len(runs))
    ]  # fmt: skip
    return [
        (_cut_window(fields, start - run.start, grid), start, min(start + grid.length, count))
        for fields, run, group in zip(columns, runs, groups, strict=True)
        for start in group
    ]


def measure_windows(series: Sequence[FieldArray], grid: SampleGrid, entry: Entry) -> Measure:
    """Divide the bytes evenly among the rows, an estimate where they are compressed."""
    rows = common_length(series, entry.key)
    row_bytes = entry.size / max(1, rows)
    return Measure(
        max(1e-6, grid.stride * row_bytes),
        math.floor(grid.lost * row_bytes),
        len(grid.starts(rows, 0)),
        max(1, _chunk_rows(series) // grid.stride),
    )


def common_length(series: Sequence[FieldArray], key: str) -> int:
    lengths = {one.name: one.length for one in series}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise FormatError(f"{key}: expected arrays of one length, found {found}")
    if (rows := series[0].length) > MOST_ROWS:
        raise FormatError(f"{key}: it claims {rows} rows")
    return rows


def refuse_large_visit(entry: Entry, nbytes: int, ratio: int = DEFLATE_RATIO) -> None:
    if nbytes > (most := most_decoded_bytes(entry, ratio)):
        raise FormatError(
            f"{entry.key}: one visit may yield {most:,} bytes, found {nbytes:,}; set a "
            "smaller window, or a smaller sampling.samples_per_object"
        )


def flat_fields(name: str, values: ArrayOrStrings) -> list[tuple[str, ArrayOrStrings]]:
    if isinstance(values, list):
        return [(name, values)]
    if values.dtype.names is None:
        return [(name, native_order(values))]
    return [
        pair
        for inner in values.dtype.names
        for pair in flat_fields(f"{name}.{inner}", values[inner])
    ]


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether values of this dtype, or all fields of this record, can be cached."""
    if dtype.subdtype is not None:
        return is_numeric(dtype.subdtype[0])
    if dtype.names is not None:
        return all(is_numeric(dtype[name]) for name in dtype.names)
    return dtype.kind in DTYPE_KINDS and not dtype.hasobject and dtype.itemsize > 0


def _chunk_rows(series: Sequence[FieldArray]) -> int:
    return max(series, key=lambda one: one.row_bytes).unit


def _chunk_of_start(starts: range, rows: int) -> ChunkOf:
    def chunk_of(ordinal: int) -> range:
        border = starts[ordinal] // rows * rows
        first = -(-(border - starts.start) // starts.step)
        stop = -(-(border + rows - starts.start) // starts.step)
        return range(max(0, first), min(len(starts), stop))

    return chunk_of


def _cut_window(fields: Mapping[str, ArrayOrStrings], at: int, grid: SampleGrid) -> Sample:
    return {
        name: values[at] if isinstance(values, list) else cut_window(values, at, grid)
        for name, values in fields.items()
    }


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
            f"source.options.{option}: two are named {twice!r}; give them names of their own, "
            "as in {a: path, b: other/path}"
        )
    return named
