"""HDF5: rows or windows along the first axis of datasets, read by byte range, chunk by chunk."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import (
    ChunkedFormat,
    Measure,
    ObjectFormat,
    ObjectReader,
    Visit,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.byte_ranges import read_ranges
from growcache.formats.chunks import (
    ArrayOrStrings,
    ChunkGrid,
    ChunkPlace,
    FieldArray,
    array_paths_option,
    flat_fields,
    measure_windows,
    read_windows,
    refuse_large_visit,
    window_ordinals,
)
from growcache.formats.hdf5_dataset import (
    ChunkLocation,
    DatasetLayout,
    check_filters,
    decode_chunk,
    describe_dataset,
    locate_chunks,
    names_at_root,
    read_strings,
)
from growcache.formats.hdf5_file import HDF5File, HDF5Files
from growcache.formats.memory import LruCache
from growcache.formats.rows import SampleGrid, grid_option, native_order
from growcache.schema import Array, Sample
from growcache.store.contract import Entry

_OPTIONS = ("datasets", "axis", "window", "stride", "edge", "phase")
_KNOWN_LAYOUTS = 4096  # objects; some kB each
_STRING_BYTES = 64  # that one is taken to have, before it is read
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class _DatasetField(FieldArray):
    def __init__(
        self, name: str, layout: DatasetLayout, reader: ObjectReader, file: HDF5File
    ) -> None:
        shape = layout.shape or (1,)
        super().__init__(
            name, ChunkGrid(shape, layout.chunks or shape, layout.dtype, layout.fill)
        )
        if layout.string_storage:
            self.row_bytes = math.prod(shape[1:]) * _STRING_BYTES
        if not layout.chunks:
            self.unit = 1
        self.layout = layout
        self._reader = reader
        self._file = file

    async def rows(self, runs: Sequence[range]) -> list[ArrayOrStrings]:
        if self.layout.inline_values is not None:
            flat = np.frombuffer(self.layout.inline_values, self.layout.dtype)
            values = flat.reshape(self.chunking.shape)
            found = [values[run.start : run.stop] for run in runs]
        elif self.layout.chunks is not None:
            found = await self._of_chunks(runs)
        else:
            found = await self._contiguous(runs)
        if self.layout.string_storage is None:
            return [_normal_bools(values) for values in found]
        reader = self._file.reader(self._reader)
        return [await read_strings(reader, self.layout, values) for values in found]

    async def _contiguous(self, runs: Sequence[range]) -> list[Array]:
        offset, dtype, shape = self.layout.offset, self.layout.dtype, self.chunking.shape
        if offset is None:
            return [np.full((len(run), *shape[1:]), self.layout.fill, dtype) for run in runs]
        stored = math.prod(shape[1:]) * dtype.itemsize
        if offset + stored * shape[0] > self._reader.entry.size:
            raise self._damaged("it promises more than the object has")
        ranges = [(offset + run.start * stored, offset + run.stop * stored) for run in runs]
        read = await read_ranges(self._file.reader(self._reader), ranges)
        return [
            np.frombuffer(data, dtype).reshape(len(run), *shape[1:])
            for data, run in zip(read, runs, strict=True)
        ]

    async def _of_chunks(self, runs: Sequence[range]) -> list[Array]:
        places = self.chunking.places(runs, self._reader.entry)
        written = await self._located(places) if self.layout.has_chunks else []
        self._check(at for _, at in written)
        ranges = [(at, at + size) for _, (at, size, _) in written]
        data = await read_ranges(self._file.reader(self._reader), ranges)

        def assemble() -> list[Array]:
            decoded: dict[ChunkPlace, Array | None] = dict.fromkeys(places)
            for (place, (_, _, mask)), stored in zip(written, data, strict=True):
                decoded[place] = self._decoded(stored, mask)
            return [self.chunking.assembled(run, decoded) for run in runs]

        return await self.chunking.decoding(runs, len(written), assemble)

    async def _located(
        self, places: Sequence[ChunkPlace]
    ) -> list[tuple[ChunkPlace, ChunkLocation]]:
        firsts = [
            tuple(at * n for at, n in zip(place, self.chunking.chunks, strict=True))
            for place in places
        ]
        look = functools.partial(
            locate_chunks, image=self._file.image, path=self.layout.path, places=firsts
        )
        found = await self._file.call(self._reader, look)
        return [(p, at) for p, at in zip(places, found, strict=True) if at is not None]

    def _check(self, locations: Any) -> None:
        total = 0
        for at, size, _ in locations:
            total += size
            if at + size > self._reader.entry.size:
                raise self._damaged("a chunk ends beyond the object")
        refuse_large_visit(self._reader.entry, total)

    def _decoded(self, stored: memoryview, mask: int) -> Array:
        try:
            return decode_chunk(stored, mask, self.layout, self.chunking)
        except FormatError as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, why: str) -> FormatError:
        return FormatError(f"{self._reader.entry.key}: dataset {self.layout.path}: {why}")


class _DatasetFields:
    def __init__(self, named: Mapping[str, str] | None) -> None:
        self._named = named
        self._files = HDF5Files()
        self._known: LruCache[Entry, tuple[tuple[str, DatasetLayout], ...]]
        self._known = LruCache(_KNOWN_LAYOUTS)

    async def get(self, reader: ObjectReader) -> list[_DatasetField]:
        entry = reader.entry
        file = self._files.get(entry)
        found = self._known.get(entry)
        if found is None:
            found = await file.call(reader, lambda opened: self._described(opened, entry))
            self._known.put(entry, found, 1)
        return [_DatasetField(name, layout, reader, file) for name, layout in found]

    def _described(self, file: Any, entry: Entry) -> tuple[tuple[str, DatasetLayout], ...]:
        named = self._named or self._only(names_at_root(file, entry.key), entry.key)
        found = tuple(
            (name, describe_dataset(file, path, entry.key)) for name, path in named.items()
        )
        for _, layout in found:
            check_filters(layout, entry.key)
        return found

    def _only(self, names: Sequence[str], key: str) -> dict[str, str]:
        if len(names) != 1:
            shown = ", ".join(f"{name!r:.40}" for name in names[:8]) or "none"
            raise FormatError(
                f"{key}: expected one dataset at its root, found {shown}; name those that are "
                "meant in source.options.datasets"
            )
        return {names[0]: names[0]}


class HDF5WholeFormat(ObjectFormat):
    def __init__(self, named: Mapping[str, str] | None) -> None:
        self._datasets = _DatasetFields(named)

    async def measure(self, reader: ObjectReader) -> Measure:
        await self._datasets.get(reader)
        return Measure(float(reader.entry.size), 0, 1)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        found = await self._datasets.get(reader)
        refuse_large_visit(reader.entry, sum(one.length * one.row_bytes for one in found))
        read = await asyncio.gather(*(one.rows([range(one.length)]) for one in found))
        sample: Sample = {}
        for one, (values,) in zip(found, read, strict=True):
            sample |= _whole_fields(one, values, reader.entry.key)
        longest = max((one.length for one in found if one.layout.shape), default=0)
        return [(sample, 0, longest or max(1, reader.entry.size))]


class HDF5RowsFormat(ChunkedFormat):
    ranged = header_first = True

    def __init__(self, named: Mapping[str, str] | None, grid: SampleGrid) -> None:
        self._datasets = _DatasetFields(named)
        self._grid = grid

    async def measure(self, reader: ObjectReader) -> Measure:
        series = await self._series(reader)
        return measure_windows(series, self._grid, reader.entry)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        return await read_windows(await self._series(reader), self._grid, visit, reader.entry)

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        return window_ordinals(await self._series(reader), self._grid, visit, reader.entry.key)

    async def _series(self, reader: ObjectReader) -> Sequence[FieldArray]:
        found = await self._datasets.get(reader)
        for one in found:
            self._check(one.layout, reader.entry.key)
        return found

    def _check(self, layout: DatasetLayout, key: str) -> None:
        if not layout.shape:
            raise FormatError(
                f"{key}: dataset {layout.path} is a single value, without an axis 0"
            )
        if layout.string_storage and (self._grid.window is not None or len(layout.shape) > 1):
            raise FormatError(
                f"{key}: dataset {layout.path} holds strings, of which a sample can have one "
                "only; use axis: 0"
            )


def _normal_bools(values: Array) -> Array:
    """Return bools as 0 and 1, whatever bytes the file has."""
    return values.view(np.uint8) != 0 if values.dtype == np.bool_ else values


def _whole_fields(one: _DatasetField, values: ArrayOrStrings, key: str) -> Sample:
    if isinstance(values, list):
        if one.layout.shape:
            raise FormatError(
                f"{key}: dataset {one.layout.path} is an array of strings, which is no value of "
                "a sample; use axis: 0"
            )
        return {one.name: values[0]}
    fields = flat_fields(one.name, values)
    if one.layout.shape:
        return dict(fields)
    return {name: native_order(np.asarray(inner)[0]) for name, inner in fields}


def open_hdf5(options: Mapping[str, Any]) -> HDF5WholeFormat | HDF5RowsFormat:
    refuse_unknown_options("hdf5", options, _OPTIONS)
    named = array_paths_option(options, "datasets")
    grid = grid_option(options)
    require_library("source.format: hdf5", "h5py", "hdf5")
    require_library("source.format: hdf5", "numcodecs", "hdf5")
    return HDF5WholeFormat(named) if grid is None else HDF5RowsFormat(named, grid)
