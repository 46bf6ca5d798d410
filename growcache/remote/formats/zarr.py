"""Zarr: rows or windows along the first axis of an array, whose chunks are the listed objects.

An array is many objects, and a listing shows the sizes of all. So the objects that are drawn are
its chunks: one owns the windows that start in it, and a visit yields them. What is beside the
chunks in a listing owns nothing.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from growcache.errors import ConfigError, FormatError, ObjectMissingError
from growcache.remote.formats.chunks import Chunking, Place
from growcache.remote.formats.kept import Asked
from growcache.remote.formats.objects import (
    RUN_LENGTHS,
    Measure,
    Reader,
    Visit,
    need_library,
    read_whole,
    refuse_unknown,
)
from growcache.remote.formats.rows import Grid, grid_of
from growcache.remote.formats.windows import (
    Values,
    arrays_of,
    common_length,
    read_starts,
)
from growcache.remote.formats.zarr_metadata import (
    FILES,
    LARGEST,
    ArrayMetadata,
    parse_metadata,
)
from growcache.schema import Array, Sample

_OPTIONS = ("axis", "window", "stride", "edge", "phase", "beside")
_KNOWN = 4096  # arrays whose metadata is kept
# The end of a chunk's key: c/3/0 or c.3.0 of version 3, 3.0 or 3/0 of version 2.
_DOTTED = re.compile(r"(?:^|/)(?:c\.)?([0-9]{1,18}(?:\.[0-9]{1,18})*)$")
_NUMBERS = re.compile(r"(?:^|/)(c/)?([0-9]{1,18}(?:/[0-9]{1,18})*)$")


class _Array:
    """An array, as a `Series`.

    Attributes:
        root: the key of its folder, with a slash at its end.
        metadata: of it.
    """

    def __init__(self, root: str, metadata: ArrayMetadata) -> None:
        self.root = root
        self.metadata = metadata
        self.chunking = Chunking(
            metadata.shape, metadata.chunks, metadata.dtype, metadata.fill, RUN_LENGTHS
        )

    @property
    def length(self) -> int:
        return self.metadata.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.metadata.shape[1:]) * self.metadata.dtype.itemsize

    def key(self, place: Sequence[int]) -> str:
        return self.root + self.metadata.name(place)


class _Chunks:
    """The rows of an array, for one visit, which holds one of its chunks already."""

    def __init__(self, name: str, array: _Array, reader: Reader) -> None:
        self.name = name
        self._array = array
        self._reader = reader

    @property
    def length(self) -> int:
        return self._array.length

    @property
    def row_bytes(self) -> int:
        return self._array.row_bytes

    @property
    def unit(self) -> int:
        return self._array.metadata.chunks[0]

    async def rows(self, runs: Sequence[range]) -> list[Values]:
        chunking = self._array.chunking
        places = chunking.places(runs, self._reader.entry)
        data = await asyncio.gather(*(self._stored(place) for place in places))

        def assemble() -> list[Array]:
            stored = zip(places, data, strict=True)
            decoded = {place: self._decoded(place, found) for place, found in stored}
            return [chunking.assembled(run, decoded) for run in runs]

        return list(await chunking.decoding(runs, len(places), assemble))

    async def _stored(self, place: Place) -> memoryview | None:
        key = self._array.key(place)
        try:
            reader = self._reader
            if key != reader.entry.key:
                reader = await reader.find(key)
        except ObjectMissingError:  # it was never written
            return None
        return memoryview(await read_whole(reader)).cast("B")

    def _decoded(self, place: Place, data: memoryview | None) -> Array | None:
        if data is None:
            return None
        try:
            return self._array.metadata.decode(data)
        except FormatError as error:
            raise FormatError(f"{self._array.key(place)}: {error}") from error


class ChunkRows:
    """An object is a chunk of an array; the windows that start in it are its samples."""

    ranged = False
    listed = True
    code_digest = None

    def __init__(self, grid: Grid, beside: Mapping[str, str]) -> None:
        self._grid = grid
        self._beside = beside
        self._known: Asked[str, ArrayMetadata | FormatError] = Asked(_KNOWN)

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        found = await self._owned(reader, Visit(0, 1, 0, 0), self._grid.without_phase())
        samples = len(found[1]) if found else 0
        return Measure(max(1.0, reader.entry.size / max(1, samples)), 0, samples)

    async def read(self, reader: Reader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """See `ObjectFormat.read`; an origin is rows of the array."""
        found = await self._owned(reader, visit, self._grid)
        if found is None:
            return []
        array, starts = found
        series = [_Chunks(array.root.rstrip("/").rpartition("/")[2] or "x", array, reader)]
        for name, path in self._beside.items():
            root = array.root.rstrip("/").rpartition("/")[0]
            other = _Array(
                _joined(root, path), await self._metadata(reader, _joined(root, path))
            )
            series.append(_Chunks(name, other, reader))
        common_length(series, reader.entry.key)
        return await read_starts(series, self._grid, visit, reader.entry, starts)

    async def array_of(self, reader: Reader) -> tuple[str, ArrayMetadata] | None:
        """Return the array of a chunk: the key of its folder, and what is said of it.

        None of what is no chunk.

        Raises:
            FormatError: its array is none that can be read.
        """
        located = await self._located(reader)
        return None if located is None else (located[0].root, located[0].metadata)

    async def _owned(
        self, reader: Reader, visit: Visit, grid: Grid
    ) -> tuple[_Array, range] | None:
        """Return the array of a chunk, and the starts of the windows that it owns."""
        located = await self._located(reader)
        if located is None:
            return None
        array, place = located
        if any(place[1:]):  # those of the first column own the rows
            return array, range(0)
        rows = array.chunking.chunks[0]
        starts = grid.starts(array.length, grid.phase(array.length, visit, array.root))
        first = -(-(place[0] * rows - starts.start) // starts.step)
        stop = -(-((place[0] + 1) * rows - starts.start) // starts.step)
        return array, starts[max(0, first) : max(0, stop)]

    async def _located(self, reader: Reader) -> tuple[_Array, Place] | None:
        """Return the array of a chunk and its place there; None of what is no chunk."""
        key = reader.entry.key
        problem: FormatError | None = None
        for root, place in _places(key):
            try:
                metadata = await self._metadata(reader, root)
            except FormatError as error:
                problem = problem or error
                continue
            array = _Array(root, metadata)
            if len(place) == len(metadata.shape) and array.key(place) == key:
                return array, place
        if problem is not None:
            raise problem
        return None

    async def _metadata(self, reader: Reader, root: str) -> ArrayMetadata:
        known = await self._known.get(root, lambda: _asked(reader, root))
        if isinstance(known, FormatError):
            raise known
        return known


async def _asked(reader: Reader, root: str) -> tuple[ArrayMetadata | FormatError, int]:
    """Return the metadata of an array, or why there is none; it counts as one."""
    try:
        return await _fetched(reader, root), 1
    except FormatError as error:
        return error, 1


async def _fetched(reader: Reader, root: str) -> ArrayMetadata:
    for file in FILES:
        try:
            found = await reader.find(root + file)
        except ObjectMissingError:
            continue
        if found.entry.size > LARGEST:
            raise FormatError(f"{root}{file}: metadata of {found.entry.size:,} bytes")
        try:
            return parse_metadata(await found.read(), file)
        except FormatError as error:
            raise FormatError(f"{root}{file}: {error}") from None
    raise FormatError(f"{reader.entry.key}: no {' or '.join(FILES)} at {root or '/'}")


def _places(key: str) -> list[tuple[str, Place]]:
    """Return the arrays that a key may be a chunk of, and its place there.

    >>> _places("a.zarr/x/c/3/0")[0], _places("a.zarr/x/3.0")
    (('a.zarr/x/', (3, 0)), [('a.zarr/x/', (3, 0))])
    """
    if (found := _DOTTED.search(key)) and "." in found[0]:
        return [(_folder(key, found.start()), tuple(map(int, found[1].split("."))))]
    if not (found := _NUMBERS.search(key)):
        return []
    numbers = found[2].split("/")
    if found[1]:
        return [(_folder(key, found.start()), tuple(map(int, numbers)))]
    ends = range(1, len(numbers) + 1)  # folders may be numbers, too
    return [
        (key[: len(key) - len("/".join(numbers[-end:]))], tuple(map(int, numbers[-end:])))
        for end in reversed(ends)
    ]


def may_be_chunk(key: str) -> str:
    """Return the folder of the array that a key looks like a chunk of; empty if of none.

    >>> may_be_chunk("a.zarr/x/c/3/0"), may_be_chunk("a.zarr/x/zarr.json")
    ('a.zarr/x/', '')
    """
    return next((root for root, _ in _places(key)), "")


def _folder(key: str, end: int) -> str:
    return key[: end + 1] if key[end : end + 1] == "/" else key[:end]


def _joined(root: str, path: str) -> str:
    """Return the folder of an array beside another; it never leaves the folder of both."""
    inside = "/".join(part for part in path.split("/") if part not in ("", ".", ".."))
    return f"{root}/{inside}/" if root else f"{inside}/"


def open_zarr(options: Mapping[str, Any]) -> ChunkRows:
    """Return the format.

    Options:
        axis: 0: each row is a sample. This or window must be given.
        window: rows of one sample, along axis 0.
        stride: rows from one window to the next; the window by default.
        edge: ``drop`` or ``pad`` (with zeros) windows that reach past the end.
        phase: ``zero``: windows start at row 0; ``random``: elsewhere in each pass.
        beside: other arrays of equal length in the same group, as a list of names or as
            ``{field: name}``; their rows are fields of the same samples.

    Raises:
        ConfigError: an unknown option, a value that cannot be meant, or no numcodecs.
    """
    refuse_unknown("zarr", options, _OPTIONS)
    grid = grid_of(options)
    if grid is None:
        raise ConfigError(
            "source.options: format zarr needs window, or axis: 0 for single rows"
        )
    beside = arrays_of(options, "beside") or {}
    need_library("zarr", "numcodecs")
    return ChunkRows(grid, beside)
