"""TIFF: images, stacks and pyramid levels, of which strips and tiles are fetched as needed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    DEFLATE_RATIO,
    RUN_LENGTH_RATIO,
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    integer_option,
    is_fetched_whole,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.byte_ranges import FetchedObject, gathered, read_ranges
from growcache.formats.chunks import (
    MOST_CHUNKS,
    ArrayOrStrings,
    ChunkGrid,
    ChunkPlace,
    CutFields,
    FieldArray,
    measure_fields,
    refuse_large_visit,
)
from growcache.formats.contiguous import (
    ArrayLayout,
    native_order,
    read_boxes,
    samples_together,
)
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, Box, Samples, grid_option
from growcache.formats.items import UserThreads
from growcache.formats.memory import SingleFlightCache, refuse_large_sample
from growcache.formats.tiff_codecs import refuse_large_jpeg
from growcache.formats.tiff_pages import TiffLayout, TiffSegments, describe_tiff
from growcache.schema import Array
from growcache.store.contract import Entry

_OPTIONS = (*GRID_OPTIONS, "series", "level", "page")
_KEPT_BYTES = 1 << 24


class _TiffField(FieldArray):
    def __init__(self, layout: TiffLayout, reader: ObjectReader) -> None:
        found = layout.segments
        grid = ChunkGrid(layout.shape, layout.shape, layout.dtype, np.zeros((), layout.dtype))
        if found is not None:
            ratio = DEFLATE_RATIO if found.decompress is None else RUN_LENGTH_RATIO
            grid = ChunkGrid(layout.shape, found.chunks, layout.dtype, found.fill, ratio)
        super().__init__("x", grid)
        if found is None:
            self.chunks = (1,) * len(layout.shape)
        self._layout, self._reader = layout, reader

    async def boxes(self, boxes: Sequence[Box]) -> list[ArrayOrStrings]:
        if self._layout.segments is not None:
            return list(await self._of_segments(boxes, self._layout.segments))
        if self._layout.page_axes == 0:
            return list(await self._of_page(0, boxes))
        return [await self._of_pages(box) for box in boxes]

    def samples_together(self, samples: Samples) -> int:
        if self._layout.segments is not None:
            return super().samples_together(samples)
        return samples_together(ArrayLayout(0, self.shape, self._layout.dtype), samples)

    async def _of_page(self, page: int, boxes: Sequence[Box]) -> list[Array]:
        shape, offset = (
            self.shape[self._layout.page_axes :],
            int(self._layout.offsets.flat[page]),
        )
        if offset < 0:
            return [np.zeros(tuple(map(len, box)), self._layout.dtype) for box in boxes]
        layout = ArrayLayout(offset, shape, self._layout.dtype)
        return await read_boxes(self._reader, layout, boxes)

    async def _of_pages(self, box: Box) -> Array:
        outer, inner = box[: self._layout.page_axes], box[self._layout.page_axes :]
        if math.prod(map(len, outer)) > MOST_CHUNKS:
            raise FormatError(
                f"{self._reader.entry.key}: one visit may read at most {MOST_CHUNKS:,} pages, "
                f"found {math.prod(map(len, outer)):,}; cut smaller windows",
                code="GC305",
            )
        pages = [self._page(place) for place in itertools.product(*outer)]
        found = await gathered([self._of_page(page, [inner]) for page in pages])
        return np.stack([one for (one,) in found]).reshape(tuple(map(len, box)))

    def _page(self, place: Sequence[int]) -> int:
        return _ordinal(place, self.shape[: self._layout.page_axes])

    async def _of_segments(self, boxes: Sequence[Box], segments: TiffSegments) -> list[Array]:
        places = self.chunking.places(boxes, self._reader.entry)
        written = [at for at in (self._located(place, segments) for place in places) if at]
        refuse_large_visit(
            self._reader.entry, sum(stop - start for _, _, start, stop in written)
        )
        data = await read_ranges(self._reader, [(start, stop) for *_, start, stop in written])

        def assemble() -> list[Array]:
            decoded: dict[ChunkPlace, Array | None] = {
                place: None
                if self._is_page(place)
                else np.zeros(segments.chunks, self._layout.dtype)
                for place in places
            }
            for (place, number, *_), stored in zip(written, data, strict=True):
                decoded[place] = self._decoded(stored, number, segments)
            return [self.chunking.assembled(box, decoded) for box in boxes]

        return await self.chunking.decoding(boxes, len(written), assemble)

    def _is_page(self, place: ChunkPlace) -> bool:
        row = self._layout.offsets[self._page(place[: self._layout.page_axes])]
        return not row.size or row[0] >= 0

    def _located(
        self, place: ChunkPlace, segments: TiffSegments
    ) -> tuple[ChunkPlace, int, int, int] | None:
        """Return the place, the number in the page, and the byte range of a strip or tile."""
        axes = self._layout.page_axes
        page = self._page(place[:axes])
        counts = [-(-n // m) for n, m in zip(self.shape, segments.chunks, strict=True)]
        number = _ordinal(place[axes:], counts[axes:])
        if number >= segments.sizes.shape[1]:
            return None
        start, size = int(self._layout.offsets[page, number]), int(segments.sizes[page, number])
        return (place, number, start, start + size) if start > 0 and size > 0 else None

    def _decoded(self, stored: memoryview, number: int, segments: TiffSegments) -> Array:
        try:
            if segments.decompress is not None:
                stored = memoryview(segments.decompress(stored, self.chunking.chunk_bytes))
            if segments.is_jpeg:
                refuse_large_jpeg(stored, math.prod(segments.shape[:3]))
            values, *_ = segments.decode(bytes(stored), number, jpegtables=segments.tables)
            assert values is not None
            if values.shape != segments.shape:
                short, values = values, np.zeros(segments.shape, values.dtype)
                values[tuple(map(slice, short.shape))] = short
            return values.reshape(segments.chunks)
        except Exception as error:  # damage can make tifffile and codecs raise anything
            raise FormatError(
                f"{self._reader.entry.key}: a strip or tile cannot be decoded: "
                f"{' '.join(str(error).split())[:200]}",
                code="GC302",
            ) from error


def _ordinal(place: Sequence[int], counts: Sequence[int]) -> int:
    found = 0
    for at, count in zip(place, counts, strict=True):
        found = found * count + at
    return found


class _TiffArrays:
    def __init__(self, series: int, level: int, page: int | None) -> None:
        self._chosen = (series, level, page)
        self._threads = UserThreads()
        self._known: SingleFlightCache[Entry, TiffLayout] = SingleFlightCache(_KEPT_BYTES)

    async def get(self, reader: ObjectReader) -> _TiffField:
        return _TiffField(
            await self._known.get(reader.entry, lambda: self._look_up(reader)), reader
        )

    def is_known(self, entry: Entry) -> bool:
        return self._known.peek(entry) is not None

    async def _look_up(self, reader: ObjectReader) -> tuple[TiffLayout, int]:
        found = await self._threads.run(lambda call: describe_tiff(call, reader, *self._chosen))
        return found, found.nheld


class TiffWholeFormat(ObjectFormat):
    def __init__(self, arrays: _TiffArrays) -> None:
        self._arrays = arrays

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        found = await self._arrays.get(reader)
        refuse_large_visit(reader.entry, found.nbytes, found.chunking.ratio)
        refuse_large_sample(found.nbytes, reader.entry.key)
        ((values),) = await found.boxes([tuple(map(range, found.shape))])
        return [({"x": native_order(np.asarray(values))}, 0, found.shape[0])]


class TiffWindowsFormat(ObjectFormat):
    ranged = header_first = says_ordinals = True

    def __init__(self, arrays: _TiffArrays, grid: ArrayGrid) -> None:
        self._arrays, self._grid = arrays, grid

    async def measure(self, reader: ObjectReader) -> Measure:
        return measure_fields(await self._cut(reader))

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        if not self._arrays.is_known(reader.entry) and is_fetched_whole(reader.entry, visit):
            reader = FetchedObject(reader, await reader.read())
        cut = await self._cut(reader, visit)
        return await cut.read(cut.wanted(visit))

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        return sorted((await self._cut(reader, visit)).wanted(visit))

    async def _cut(self, reader: ObjectReader, visit: Visit | None = None) -> CutFields:
        found = await self._arrays.get(reader)
        cut = CutFields.of([found], self._grid, reader.entry, visit)
        return replace(cut, ratio=found.chunking.ratio)


def open_tiff(options: Mapping[str, Any]) -> TiffWholeFormat | TiffWindowsFormat:
    refuse_unknown_options("tiff", options, _OPTIONS)
    require_library("source.format: tiff", "tifffile", "tiff")
    page = integer_option(options, "page", 0)
    series, level = integer_option(options, "series", 0), integer_option(options, "level", 0)
    if page is not None and not (series is None and level is None):
        raise ConfigError(
            "source.options.page: a page is not part of a series; drop series and level",
            code="GC103",
        )
    grid = grid_option(options)
    arrays = _TiffArrays(series or 0, level or 0, page)
    return TiffWholeFormat(arrays) if grid is None else TiffWindowsFormat(arrays, grid)
