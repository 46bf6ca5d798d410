"""Arrays that are stored in chunks of one shape, and ranges of bytes that are worth a request."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.remote.formats.decoding import decoded, decodes
from growcache.remote.formats.objects import DEFLATED, Reader, most_decoded
from growcache.remote.store import Entry
from growcache.schema import Array

MOST_CHUNKS = 1 << 16  # of a visit
MOST_TOGETHER = 1 << 23  # bytes of a request that several chunks share
Place = tuple[int, ...]  # of a chunk in the grid of chunks


@dataclass(frozen=True, slots=True)
class Chunking:
    """How an array is cut.

    Attributes:
        shape: of the array.
        chunks: of a chunk; those at the ends reach beyond the array.
        dtype: as stored.
        fill: value of what was never written.
        ratio: by which compression may shrink a chunk.
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Array
    ratio: int = DEFLATED

    @property
    def chunk_bytes(self) -> int:
        """Of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def places(self, runs: Iterable[range], entry: Entry) -> list[Place]:
        """Return the chunks that hold these rows, in order.

        Raises:
            FormatError: too many, or too large ones.
        """
        spans = [self._span(run) for run in runs if run]
        count = sum(map(len, spans)) * math.prod(map(len, self._across))
        most = min(MOST_CHUNKS, most_decoded(entry, self.ratio) // max(1, self.chunk_bytes))
        if count > 2 * most:  # neighbours may share their chunks
            raise FormatError(
                f"{entry.key}: one visit may read {most:,} chunks of {self.chunk_bytes:,} bytes, "
                f"found {count:,}; cut smaller windows"
            )
        return self._places({at for span in spans for at in span})

    @property
    def _across(self) -> list[range]:
        """The chunks along all axes but the first."""
        sizes = zip(self.shape[1:], self.chunks[1:], strict=True)
        return [range(-(-size // chunk)) for size, chunk in sizes]

    def _span(self, run: range) -> range:
        return range(run.start // self.chunks[0], -(-run.stop // self.chunks[0]))

    def _places(self, firsts: Iterable[int]) -> list[Place]:
        across = self._across
        return [place for at in sorted(firsts) for place in itertools.product([at], *across)]

    async def decoding(
        self, runs: Iterable[range], chunks: int, work: Callable[[], list[Array]]
    ) -> list[Array]:
        """Return what ``work`` makes of so many chunks, in a thread, once there is room for them."""
        rows = sum(map(len, runs)) * math.prod(self.shape[1:]) * self.dtype.itemsize
        nbytes = rows + chunks * self.chunk_bytes
        await decodes(nbytes)
        found = await asyncio.to_thread(work)
        decoded(rows, nbytes)
        return found

    def assembled(self, run: range, decoded: Mapping[Place, Array | None]) -> Array:
        """Return the rows of a run; a chunk that is None was never written."""
        rows = np.empty((len(run), *self.shape[1:]), self.dtype.newbyteorder("<"))
        if not rows.size:
            return rows
        for place in self._places(self._span(run)):
            into, out_of = self._slices(place, run)
            found = decoded[place]
            rows[into] = self.fill if found is None else found[out_of]
        return rows

    def _slices(self, place: Place, run: range) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        bounds = [(run.start, run.stop), *((0, size) for size in self.shape[1:])]
        into, out_of = [], []
        for at, chunk, (first, last) in zip(place, self.chunks, bounds, strict=True):
            start, stop = max(first, at * chunk), min(last, (at + 1) * chunk)
            into.append(slice(start - first, stop - first))
            out_of.append(slice(start - at * chunk, stop - at * chunk))
        return tuple(into), tuple(out_of)


async def fetch(reader: Reader, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Return the bytes of all ranges [start, stop); neighbours share a request.

    What lies between them is read along where it is a sixteenth of them at most.
    """
    groups: list[_Together] = []
    for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        start, stop = ranges[i]
        if not (groups and groups[-1].joined(start, stop)):
            groups.append(_Together(start, stop))
        groups[-1].members.append(i)
    read = await asyncio.gather(*(reader.read(one.start, one.stop) for one in groups))
    found: list[memoryview] = [memoryview(b"")] * len(ranges)
    for one, data in zip(groups, read, strict=True):
        view = memoryview(data).cast("B")
        for i in one.members:
            start, stop = ranges[i]
            found[i] = view[start - one.start : stop - one.start]
    return found


@dataclass(slots=True)
class _Together:
    """Ranges that are one request."""

    start: int
    stop: int
    members: list[int] = field(default_factory=list)

    def joined(self, start: int, stop: int) -> bool:
        """Add a range that begins no earlier than those before, if that is worth it."""
        worth = 16 * (start - self.stop) <= self.stop - self.start
        if worth and stop - self.start <= MOST_TOGETHER:
            self.stop = max(self.stop, stop)
            return True
        return False
