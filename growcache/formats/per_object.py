"""Sources with some compressed objects, which are read whole. The others are read by range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from growcache.formats.base import (
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
)
from growcache.formats.byte_ranges import FetchedObject
from growcache.formats.compressed import (
    INFERRED,
    MAGIC_BYTES,
    UnpackLimit,
    compression_by_name,
    read_unpacked,
    refuse_compressed,
)
from growcache.store.contract import Entry


class CompressedFormat(Protocol):
    def unpack_limit(self, entry: Entry, /) -> UnpackLimit: ...

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins: ...


class PerObjectFormat(ObjectFormat):
    """A format with a second one, ``whole``, for objects that are read whole, compressed or not."""

    ranged = True

    def __init__(self, plain: ObjectFormat, whole: CompressedFormat) -> None:
        self._plain = plain
        self._whole = whole
        self.header_first = plain.header_first
        self.says_ordinals = plain.says_ordinals
        self.code_digest = plain.code_digest

    def reads_whole(self, entry: Entry) -> bool:
        return compression_by_name(entry.key) is not None

    async def measure(self, reader: ObjectReader) -> Measure:
        """Return the measure without compression, because one measure applies to all objects."""
        if self.reads_whole(reader.entry):
            limit = self._whole.unpack_limit(reader.entry)
            reader = FetchedObject(reader, await read_unpacked(reader, INFERRED, limit))
        return await self._plain.measure(reader)

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        return await self._plain.ordinals(reader, visit)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        if not self.reads_whole(reader.entry):
            return await self._plain.read(reader, visit)
        if visit.parts == 1:
            return await self._whole.read(reader, visit)
        # Earlier caches cut such objects, and all parts were holes.
        refuse_compressed(reader.entry, bytes(await reader.read(0, MAGIC_BYTES)))
        return await self._plain.read(reader, visit)
