"""The chunks of Zarr arrays that were never written, and which a listing does not show.

Without them, no window that starts in one would be drawn, and fill values would be rarer in a
cache than in the array.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.errors import FormatError, StoreError, TransientStoreError
from growcache.formats.base import MOST_UNWRITTEN_BYTES, ObjectReader
from growcache.formats.chunks import ChunkPlace
from growcache.formats.grids import ArrayGrid, AxisGrid
from growcache.formats.zarr_metadata import ZarrMetadata, possible_places
from growcache.store.contract import Entry, unwritten_entry

MetadataOf: TypeAlias = Callable[[ObjectReader, str], Awaitable[ZarrMetadata]]
ReaderOf: TypeAlias = Callable[[Entry], ObjectReader]
Ints: TypeAlias = npt.NDArray[np.int64]

MOST_OWNERS = 1 << 26  # chunks of an array in which windows start; each takes a byte, once
MOST_UNWRITTEN = 1 << 17  # chunks of a source, or more with the next limit
UNWRITTEN_PER_WRITTEN = 16  # per written chunk
MOST_CHUNK_NUMBER = (1 << 32) - 1
_AT_ONCE = 1 << 20  # owning chunks that are examined together


@dataclass(frozen=True, slots=True)
class OwningChunks:
    """The chunks along one axis in which a window may start.

    >>> [OwningChunks.of(100, 10, AxisGrid(window=20, stride=40)).number(i) for i in range(3)]
    [0, 4, 8]
    """

    count: int
    chunk: int  # values of a chunk
    step: int  # distance between the first starts of two consecutive owning chunks

    @classmethod
    def of(cls, size: int, chunk: int, grid: AxisGrid | None) -> OwningChunks:
        """Return the owning chunks.

        Along an axis that is not cut, the first chunk owns the windows.
        """
        if grid is None:
            return cls(min(1, size), max(1, size), max(1, size))
        step = chunk if grid.random_phase else max(chunk, grid.stride)
        return cls(-(-grid.possible(size) // step), chunk, step)

    def number(self, place: int) -> int:
        return place * self.step // self.chunk

    def places(self, numbers: Ints) -> Ints:
        """Return the place of each chunk among the owning ones, or -1."""
        within = np.where(numbers <= self.number(self.count - 1), numbers, 0)
        places = -(-within * self.chunk // self.step)
        is_owning = (places < self.count) & (places * self.step // self.chunk == numbers)
        return np.where(is_owning, places, -1)


@dataclass(slots=True)
class _ListedArray:
    root: str
    shape: tuple[int, ...]
    name: Callable[[Sequence[int]], str]
    owners: tuple[OwningChunks, ...]  # along each axis
    cut: tuple[int, ...]  # axes
    store: int
    chunk_bytes: int
    # Numbers of the listed chunks along the cut axes, chunk after chunk.
    listed: array[int] = field(default_factory=lambda: array("I"))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(one.count for one in self.owners)

    def add(self, place: ChunkPlace) -> None:
        is_first = all(at in self.cut or not number for at, number in enumerate(place))
        if is_first and max(place) <= MOST_CHUNK_NUMBER:
            self.listed.extend(place[at] for at in self.cut)


class ChunkCensus:
    """Records the listed chunks of a source, and yields the other chunks afterwards."""

    def __init__(self, grid: ArrayGrid, metadata_of: MetadataOf) -> None:
        self._grid = grid
        self._metadata_of = metadata_of
        # Arrays by folder; None: no array.
        self._arrays: dict[str, _ListedArray | None] = {}
        self.left_out: dict[str, int] = {}

    async def note(self, page: Sequence[Entry], reader_of: ReaderOf) -> None:
        """Record listed objects. The metadata of their arrays is fetched concurrently."""
        waiting = [(entry, possible_places(entry.key)) for entry in page]
        while waiting:
            unknown = {
                places[0][0]: entry
                for entry, places in waiting
                if places and places[0][0] not in self._arrays
            }
            found = await asyncio.gather(
                *(self._array(root, reader_of(entry)) for root, entry in unknown.items())
            )
            self._arrays.update(zip(unknown, found, strict=True))
            waiting = [
                (entry, places[1:])
                for entry, places in waiting
                if places and not self._is_noted(entry, *places[0])
            ]

    async def _array(self, root: str, reader: ObjectReader) -> _ListedArray | None:
        try:
            metadata = await self._metadata_of(reader, root)
            axes = self._grid.axes_of(metadata.shape, root)
        except TransientStoreError:
            raise
        except (FormatError, StoreError):  # the visits to its chunks report it
            return None
        sizes = zip(metadata.shape, metadata.chunks, axes, strict=True)
        owners = tuple(itertools.starmap(OwningChunks.of, sizes))
        cut = tuple(at for at, grid in enumerate(axes) if grid is not None)
        nbytes = math.prod(metadata.chunks) * metadata.dtype.itemsize
        store = reader.entry.store
        return _ListedArray(root, metadata.shape, metadata.name, owners, cut, store, nbytes)

    def _is_noted(self, entry: Entry, root: str, place: ChunkPlace) -> bool:
        one = self._arrays[root]
        if one is None or len(place) != len(one.shape):
            return False
        if root + one.name(place) != entry.key:
            return False
        one.add(place)
        return True

    def unwritten(self) -> Iterator[Entry]:
        """Yield the missing chunks, array after array, each in C order.

        A damaged array can claim any number of chunks of any size, so there are limits.
        Afterwards `left_out` has the arrays beyond them, with their number of chunks.
        """
        arrays = [one for one in self._arrays.values() if one is not None]
        written = sum(len(one.listed) // len(one.cut) for one in arrays)
        room = max(MOST_UNWRITTEN, UNWRITTEN_PER_WRITTEN * written)
        for one in arrays:
            total = math.prod(one.counts)
            if total > MOST_OWNERS:
                self.left_out[one.root] = total
                continue
            is_missing = _missing(one, total)
            missing = int(is_missing.sum())
            if missing > (room if one.chunk_bytes <= MOST_UNWRITTEN_BYTES else 0):
                self.left_out[one.root] = missing
                continue
            room -= missing
            yield from _entries(one, is_missing)


def _entries(one: _ListedArray, is_missing: npt.NDArray[np.bool_]) -> Iterator[Entry]:
    for first in range(0, len(is_missing), _AT_ONCE):
        for flat in np.flatnonzero(is_missing[first : first + _AT_ONCE]):
            numbers = np.unravel_index(first + int(flat), one.counts)
            owners = zip(one.owners, numbers, strict=True)
            place = [owner.number(int(at)) for owner, at in owners]
            yield unwritten_entry(one.root + one.name(place), one.store)


def _missing(one: _ListedArray, total: int) -> npt.NDArray[np.bool_]:
    """Return which owning chunks were not listed, in C order."""
    is_missing = np.ones(total, np.bool_)
    listed = np.frombuffer(one.listed, np.uint32).reshape(-1, len(one.cut)).astype(np.int64)
    flat, is_owning = np.zeros(len(listed), np.int64), np.ones(len(listed), np.bool_)
    for column, at in zip(listed.T, one.cut, strict=True):
        places = one.owners[at].places(column)
        is_owning &= places >= 0
        flat = flat * one.owners[at].count + places
    is_missing[flat[is_owning]] = False
    return is_missing
