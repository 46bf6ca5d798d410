"""Byte ranges of an object: those that a visit reads, and the number of requests for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from growcache.errors import FormatError
from growcache.formats.base import MOST_VISIT_BYTES, ObjectReader
from growcache.store.seekable_file import SeekableFile

if TYPE_CHECKING:
    from typing_extensions import Buffer


T = TypeVar("T")


class FetchedObject:
    def __init__(self, remote: ObjectReader, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        self.entry = replace(remote.entry, size=self._data.nbytes)
        self.source, self.find = remote.source, remote.find

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer:
        return self._data[start:stop]


# Half a visit, because the decoded values are in memory, too.
MOST_RECORD_BYTES = MOST_VISIT_BYTES // 2


class NotFetchedError(OSError):
    """A read of bytes that were not fetched."""


class FetchedRanges(SeekableFile):
    def __init__(self, size: int, pieces: Mapping[tuple[int, int], memoryview]) -> None:
        super().__init__(size)
        self.missing: tuple[int, int] | None = None  # the last range that was not fetched
        self._pieces = pieces

    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer).cast("B")
        start, stop = self.position, min(self.position + len(into), self.size)
        if stop <= start:
            return 0
        for (first, last), data in self._pieces.items():
            if first <= start and stop <= last:
                into[: stop - start] = data[start - first : stop - first]
                self.position = stop
                return stop - start
        self.missing = (start, stop)
        raise NotFetchedError(f"bytes {start} to {stop} were not fetched")


class ReadAhead:
    """Learns from the sizes of items how far to read beyond a block. No result depends on it.

    On average half an item is missing after a block, and at most one. Reading more than the
    longest item is useless. If few items are that long, reading on in some cases is cheaper.
    """

    def __init__(self, first: int, head: int, most: int) -> None:
        self.nbytes = first
        self._head = head
        self._most = most
        self._longest = 0

    def learn(self, sizes: Sequence[int]) -> None:
        if sizes:
            self._longest = max(max(sizes), self._longest * 7 // 8)
            likely = 2 * sum(sizes) // len(sizes)
            self.nbytes = min(self._most, likely, self._longest) + self._head

    def step(self, least: int, most: int) -> int:
        return min(most, max(least, 2 * self.nbytes)) if self._longest else most


async def gathered(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results. A single one needs no task."""
    return [await work[0]] if len(work) == 1 else await asyncio.gather(*work)


MOST_GAP_BYTES = 1 << 15  # reading a smaller gap takes less time than another request
MOST_SHARED_BYTES = 1 << 23  # of a request that several ranges share


async def read_ranges(
    reader: ObjectReader, ranges: Sequence[tuple[int, int]]
) -> list[memoryview]:
    """Return the bytes of each [start, stop).

    Ranges close to each other are views of one request.

    The gap between two ranges is read if it is small, or at most a sixteenth of their bytes.
    """
    groups: list[_SharedRequest] = []
    for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        start, stop = ranges[i]
        if not (groups and groups[-1].joined(start, stop)):
            groups.append(_SharedRequest(start, stop))
        groups[-1].members.append(i)
    read = await gathered([reader.read(one.start, one.stop) for one in groups])
    found: list[memoryview] = [memoryview(b"")] * len(ranges)
    for one, data in zip(groups, read, strict=True):
        view = memoryview(data).cast("B")
        if len(view) < one.stop - one.start:
            raise FormatError(
                f"{reader.entry.key}: expected {one.stop:,} bytes; it is cut off", code="GC302"
            )
        for i in one.members:
            start, stop = ranges[i]
            found[i] = view[start - one.start : stop - one.start]
    return found


@dataclass(slots=True)
class _SharedRequest:
    start: int
    stop: int
    members: list[int] = field(default_factory=list)

    def joined(self, start: int, stop: int) -> bool:
        """Add a range that starts no earlier than the last one, if sharing the request pays off."""
        near = start - self.stop <= max(MOST_GAP_BYTES, (self.stop - self.start) // 16)
        if near and stop - self.start <= MOST_SHARED_BYTES:
            self.stop = max(self.stop, stop)
            return True
        return False


class GrowingSlice:
    def __init__(self, reader: ObjectReader, start: int) -> None:
        self.start = start
        self._reader = reader
        self._data = bytearray()
        self.view = memoryview(b"")

    @property
    def stop(self) -> int:
        return self.start + len(self._data)

    async def extend_to(self, stop: int) -> None:
        entry = self._reader.entry
        stop = min(stop, entry.size)
        if stop <= self.stop:
            return
        if stop - self.start > MOST_RECORD_BYTES:
            raise FormatError(
                f"{entry.key}: one visit may read at most {MOST_RECORD_BYTES:,} bytes of "
                f"records, found {stop - self.start:,}; lower sampling.samples_per_object",
                code="GC305",
            )
        more = memoryview(await self._reader.read(self.stop, stop))
        self._data = self._data + more if self._data else bytearray(more)
        self.view = memoryview(self._data)

    async def extend_back_to(self, start: int) -> None:
        if start < self.start:
            before = memoryview(await self._reader.read(start, self.start))
            self._data = bytearray(before) + self._data
            self.start, self.view = start, memoryview(self._data)
