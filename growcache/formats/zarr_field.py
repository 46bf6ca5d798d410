"""One Zarr array as a field of samples. Its chunks are objects, and are fetched whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from growcache.errors import FormatError, ObjectChangedError, ObjectMissingError
from growcache.formats.base import RUN_LENGTH_RATIO, ObjectReader, read_whole
from growcache.formats.chunks import ArrayOrStrings, ChunkGrid, ChunkPlace, FieldArray
from growcache.formats.grids import Box
from growcache.formats.scales import Scale
from growcache.formats.zarr_metadata import ZarrMetadata
from growcache.schema import Array


class ZarrField(FieldArray):
    def __init__(
        self,
        name: str,
        root: str,
        metadata: ZarrMetadata,
        reader: ObjectReader,
        scale: Scale | None = None,
    ) -> None:
        shape, chunks = metadata.shape, metadata.chunks
        super().__init__(
            name,
            ChunkGrid(shape, chunks, metadata.dtype, metadata.fill, RUN_LENGTH_RATIO),
            scale,
        )
        self._root = root
        self._metadata = metadata
        self._reader = reader

    async def stored(self, boxes: Sequence[Box]) -> list[ArrayOrStrings]:
        chunking = self.chunking
        places = chunking.places(boxes, self._reader.entry)
        data = await asyncio.gather(*(self._fetched(place) for place in places))

        def assemble() -> list[Array]:
            stored = zip(places, data, strict=True)
            decoded = {place: self._decoded(place, found) for place, found in stored}
            return [chunking.assembled(box, decoded) for box in boxes]

        return list(await chunking.decoding(boxes, len(places), assemble))

    async def _fetched(self, place: ChunkPlace) -> memoryview | None:
        key, reader = self._root + self._metadata.name(place), self._reader
        is_own = key == reader.entry.key
        if not is_own or reader.entry.is_unwritten:
            try:
                reader = await reader.find(key)
            except ObjectMissingError:
                return None
            if is_own:
                raise ObjectChangedError(
                    f"{key} was written after the listing; run with --refresh to draw its "
                    "values"
                )
        return memoryview(await read_whole(reader)).cast("B")

    def _decoded(self, place: ChunkPlace, data: memoryview | None) -> Array | None:
        if data is None:
            return None
        try:
            return self._metadata.decode(data)
        except FormatError as error:
            raise FormatError(
                f"{self._root}{self._metadata.name(place)}: {error}", code=error.code
            ) from error
