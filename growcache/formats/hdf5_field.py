"""One dataset of an HDF5 file as a field of samples: the bytes that have its values, and the values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import ObjectReader
from growcache.formats.byte_ranges import read_ranges
from growcache.formats.chunks import (
    ArrayOrStrings,
    ChunkGrid,
    ChunkPlace,
    FieldArray,
    flat_fields,
    refuse_large_visit,
)
from growcache.formats.contiguous import (
    ArrayLayout,
    native_order,
    picked,
    read_boxes,
    samples_together,
)
from growcache.formats.grids import Box, Samples
from growcache.formats.hdf5_dataset import (
    ChunkLocation,
    DatasetLayout,
    decode_chunk,
    locate_chunks,
    read_strings,
)
from growcache.formats.hdf5_file import HDF5File
from growcache.schema import Array


class StoredLayout(Protocol):
    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


_STRING_BYTES = 64  # assumed size of a string before it is read


class DatasetField(FieldArray):
    def __init__(
        self, name: str, layout: DatasetLayout, reader: ObjectReader, file: HDF5File
    ) -> None:
        shape = layout.shape or (1,)
        super().__init__(
            name,
            ChunkGrid(shape, layout.chunks or shape, layout.dtype, layout.fill),
            layout.scale,
        )
        if layout.string_storage:
            self.nbytes = math.prod(shape) * _STRING_BYTES
        if not layout.chunks:
            self.chunks = (1,) * len(shape)
        self.layout = layout
        self._reader = reader
        self._file = file

    async def stored(self, boxes: Sequence[Box]) -> list[ArrayOrStrings]:
        if self.layout.inline_values is not None:
            flat = np.frombuffer(self.layout.inline_values, self.layout.dtype)
            values = flat.reshape(self.shape)
            found = [picked(values, box) for box in boxes]
        elif self.layout.chunks is not None:
            found = await self._of_chunks(boxes)
        else:
            found = await self._contiguous(boxes)
        if self.layout.string_storage is None:
            return [_normal_bools(values) for values in found]
        reader = self._file.reader(self._reader)
        return [await read_strings(reader, self.layout, values) for values in found]

    def samples_together(self, samples: Samples) -> int:
        if self.layout.chunks:
            return super().samples_together(samples)
        return samples_together(ArrayLayout(0, self.shape, self.layout.dtype), samples)

    async def _contiguous(self, boxes: Sequence[Box]) -> list[Array]:
        offset, dtype = self.layout.offset, self.layout.dtype
        if offset is None:
            return [np.full(tuple(map(len, box)), self.layout.fill, dtype) for box in boxes]
        stored = ArrayLayout(offset, self.shape, dtype)
        if offset + stored.nbytes > self._reader.entry.size:
            raise self._damaged("it promises more than the object has")
        return await read_boxes(self._file.reader(self._reader), stored, boxes)

    async def _of_chunks(self, boxes: Sequence[Box]) -> list[Array]:
        places = self.chunking.places(boxes, self._reader.entry)
        written = await self._located(places) if self.layout.has_chunks else []
        self._check(at for _, at in written)
        ranges = [(at, at + size) for _, (at, size, _) in written]
        data = await read_ranges(self._file.reader(self._reader), ranges)

        def assemble() -> list[Array]:
            decoded: dict[ChunkPlace, Array | None] = dict.fromkeys(places)
            for (place, (_, _, mask)), stored in zip(written, data, strict=True):
                decoded[place] = self._decoded(stored, mask)
            return [self.chunking.assembled(box, decoded) for box in boxes]

        return await self.chunking.decoding(boxes, len(written), assemble)

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


def _normal_bools(values: Array) -> Array:
    """Return bools as 0 and 1, whatever bytes the file contains."""
    return values.view(np.uint8) != 0 if values.dtype == np.bool_ else values


def whole_fields(
    name: str, layout: StoredLayout, values: ArrayOrStrings, key: str
) -> dict[str, Any]:
    """Return the fields for all values of a dataset."""
    if isinstance(values, list):
        if layout.shape:
            raise FormatError(
                f"{key}: dataset {layout.path} is an array of strings, which cannot be a value "
                "of a sample; use axis: 0",
                code="GC303",
            )
        return {name: values[0]}
    fields = flat_fields(name, values)
    if layout.shape:
        return dict(fields)
    return {field: native_order(np.asarray(inner)[0]) for field, inner in fields}
