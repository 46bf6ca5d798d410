"""Samples from the rows of one array: single rows or windows of rows, read by byte range."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    MOST_VISIT_BYTES,
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    choice_option,
    integer_option,
    is_fetched_whole,
    ordinals_of_part,
    refuse_many_samples,
    take_some,
)
from growcache.formats.byte_ranges import FetchedObject
from growcache.formats.memory import SingleFlightCache
from growcache.schema import Array, Sample
from growcache.seeding import derive_seed
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer


_IS_LITTLE_ENDIAN = sys.byteorder == "little"
_READ_ALONG_BYTES = 1 << 18  # bytes; a gap smaller than this is read along


@dataclass(frozen=True, slots=True)
class RowLayout:
    offset: int  # of the first row, bytes
    count: int  # rows
    shape: tuple[int, ...]  # of one row
    dtype: np.dtype[np.generic]  # of one value, byte order included

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SampleGrid:
    window: int | None = None  # rows of one sample; None: single rows, without an axis for them
    stride: int = 1  # rows from one start to the next
    pad: bool = False  # whether windows beyond the last row are kept, filled with zeros
    random_phase: bool = False  # whether every pass starts at another random row
    channels: tuple[int, ...] | None = None  # the subset of the row's first axis; None: all

    @property
    def length(self) -> int:
        return self.window or 1

    @property
    def lost(self) -> int:
        """Rows of an object beyond its samples' strides; negative if the strides reach further."""
        return 1 - self.stride if self.pad else self.length - self.stride

    def without_phase(self) -> SampleGrid:
        return replace(self, random_phase=False)

    def possible(self, rows: int) -> int:
        return rows if self.pad else max(0, rows - self.length + 1)

    def starts(self, rows: int, phase: int) -> range:
        return range(phase, self.possible(rows), self.stride)

    def phase(self, rows: int, visit: Visit, key: str) -> int:
        """Return where the grid starts in this pass.

        Uniform over the stride, so every possible start is equally likely; or over the possible
        starts if those are fewer, so a short object is not passed over.
        """
        choices = min(self.stride, self.possible(rows))
        if not self.random_phase or choices < 2:
            return 0
        return derive_seed("phase", visit.seed, visit.round, visit.chosen_by(key)) % choices

    def measure(self, rows: RowLayout, size: int) -> Measure:
        """Return the sizes of an object of ``size`` bytes, at phase 0."""
        stride = self.stride * rows.row_bytes
        samples = len(self.starts(rows.count, 0))
        used = rows.offset + rows.count * rows.row_bytes
        overhead = size - used + rows.offset + self.lost * rows.row_bytes
        return Measure(float(stride), overhead, samples)


class RowsFormat(ObjectFormat):
    ranged = header_first = True

    def __init__(self, grid: SampleGrid, kept_bytes: int) -> None:
        self._grid = grid
        # With its layout kept, a second visit to an object is a single request.
        self._layouts: SingleFlightCache[Entry, dict[str, RowLayout]] = SingleFlightCache(
            kept_bytes
        )

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, RowLayout], int]:
        """Return the layout of each array, and about how many bytes the layouts take."""
        raise NotImplementedError

    async def measure(self, reader: ObjectReader) -> Measure:
        rows = _summed_layout(await self._located(reader))
        if not rows.row_bytes:
            raise FormatError(
                f"{reader.entry.key}: its rows have no values, so sizes of objects do not tell "
                "how many there are; drop axis and window to take whole arrays"
            )
        return self._grid.measure(rows, reader.entry.size)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        if self._layouts.peek(reader.entry) is None and is_fetched_whole(reader.entry, visit):
            reader = FetchedObject(reader, await reader.read())
        located = await self._located(reader)
        starts = wanted_starts(reader, _summed_layout(located), self._grid, visit)
        each = (read_rows(reader, rows, self._grid, starts) for rows in located.values())
        return zip_fields(dict(zip(located, await asyncio.gather(*each), strict=True)))

    async def _located(self, reader: ObjectReader) -> dict[str, RowLayout]:
        return await self._layouts.get(reader.entry, lambda: self.look_up(reader))


def zip_fields(fields: Mapping[str, SamplesWithOrigins]) -> SamplesWithOrigins:
    """Each field's samples have one field ``x``."""
    if list(fields) == ["x"]:
        return fields["x"]
    return [
        ({name: one[0]["x"] for name, one in zip(fields, found, strict=True)}, *found[0][1:])
        for found in zip(*fields.values(), strict=True)
    ]


def _summed_layout(located: Mapping[str, RowLayout]) -> RowLayout:
    row = sum(rows.row_bytes for rows in located.values())
    return RowLayout(0, next(iter(located.values())).count, (row,), np.dtype("u1"))


async def read_samples(
    reader: ObjectReader, rows: RowLayout, grid: SampleGrid, visit: Visit
) -> list[tuple[Sample, int, int]]:
    return await read_rows(reader, rows, grid, wanted_starts(reader, rows, grid, visit))


def wanted_starts(
    reader: ObjectReader, rows: RowLayout, grid: SampleGrid, visit: Visit
) -> Sequence[int]:
    starts = grid.starts(rows.count, grid.phase(rows.count, visit, reader.entry.key))
    given = visit.given(len(starts))
    if given is None:
        mine = ordinals_of_part(len(starts), visit)
        wanted: Sequence[int] = starts[mine.start : mine.stop]
        if visit.take is not None:
            wanted = take_some(wanted, visit, visit.chosen_by(reader.entry.key))
    else:  # a range may claim to be long
        wanted = (
            starts[given.start : given.stop]
            if isinstance(given, range)
            else [starts[i] for i in given]
        )
    _refuse_too_much(reader, rows, grid, wanted)
    return wanted


async def read_rows(
    reader: ObjectReader, rows: RowLayout, grid: SampleGrid, wanted: Sequence[int]
) -> list[tuple[Sample, int, int]]:
    """Return the samples that begin at ``wanted``, as field ``x``."""
    runs = runs_of_starts(
        wanted, grid.length, max(1, _READ_ALONG_BYTES // max(1, rows.row_bytes))
    )
    read = await asyncio.gather(*(_read_run(reader, rows, grid, run) for run in runs))
    return [sample for samples in read for sample in samples]


def _refuse_too_much(
    reader: ObjectReader, rows: RowLayout, grid: SampleGrid, wanted: Sequence[int]
) -> None:
    """Refuse here, too, because rows may be longer than in the first object."""
    stride = min(grid.stride, grid.length)  # overlapping windows are read once
    length = min(rows.count, stride * max(0, len(wanted) - 1) + grid.length)
    padded = grid.length if grid.pad and wanted else 0
    if (nbytes := max(length, padded) * rows.row_bytes) > MOST_VISIT_BYTES:
        raise FormatError(
            f"{reader.entry.key}: one visit may read {MOST_VISIT_BYTES:,} bytes, found rows of "
            f"{rows.row_bytes:,} bytes, {nbytes:,} in all; cut smaller windows"
        )
    refuse_many_samples(reader.entry.key, len(wanted))


def runs_of_starts(starts: Sequence[int], length: int, gap: int) -> list[list[int]]:
    """Group starts whose windows are at most ``gap`` rows apart."""
    runs: list[list[int]] = []
    for start in starts:
        if runs and start - (runs[-1][-1] + length) <= gap:
            runs[-1].append(start)
        else:
            runs.append([start])
    return runs


async def _read_run(
    reader: ObjectReader, rows: RowLayout, grid: SampleGrid, starts: list[int]
) -> list[tuple[Sample, int, int]]:
    first, last = starts[0], min(starts[-1] + grid.length, rows.count)
    at = rows.offset + first * rows.row_bytes
    data: Buffer = b""
    if rows.row_bytes:
        data = await reader.read(at, rows.offset + last * rows.row_bytes)
    values = np.frombuffer(memoryview(data), rows.dtype).reshape(last - first, *rows.shape)
    values = native_order(values if grid.channels is None else values[:, list(grid.channels)])
    return cut_samples(values, grid, starts, first, rows.count)


def cut_samples(
    values: Array,
    grid: SampleGrid,
    starts: Sequence[int],
    first: int = 0,
    count: int | None = None,
) -> list[tuple[Sample, int, int]]:
    """``values`` are rows of an array of ``count`` rows, from row ``first`` on."""
    end = len(values) if count is None else count
    return [
        ({"x": cut_window(values, start - first, grid)}, start, min(start + grid.length, end))
        for start in starts
    ]


def cut_window(values: Array, at: int, grid: SampleGrid) -> Array:
    if grid.window is None:
        row: Array = values[at]
        return row
    window = values[at : at + grid.window]
    if len(window) == grid.window:
        return window
    padded = np.zeros((grid.window, *values.shape[1:]), values.dtype)
    padded[: len(window)] = window
    return padded


def native_order(values: Array) -> Array:
    # Nearly all arrays are.
    if _IS_LITTLE_ENDIAN and values.dtype.isnative and values.flags.c_contiguous:
        return values
    return np.asarray(values, values.dtype.newbyteorder("<"), order="C")


def grid_option(options: Mapping[str, Any]) -> SampleGrid | None:
    axis = options.get("axis")
    if axis not in (None, 0) or isinstance(axis, bool):
        raise ConfigError(f"source.options.axis: only 0 can be read by range, found {axis!r}")
    grid = window_option(options, "zero")
    if axis is not None or grid.window is not None:
        return grid
    for name in ("stride", "edge", "phase"):
        if name in options:
            raise ConfigError(
                f"source.options.{name}: needs window (or axis: 0, for single rows)"
            )
    return None


def window_option(options: Mapping[str, Any], phase: str) -> SampleGrid:
    window = integer_option(options, "window", 1)
    return SampleGrid(
        window,
        integer_option(options, "stride", 1) or window or 1,
        pad=choice_option(options, "edge", ("drop", "pad"), "drop") == "pad",
        random_phase=choice_option(options, "phase", ("zero", "random"), phase) == "random",
    )
