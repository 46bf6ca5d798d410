"""NumPy's ``.npz`` archives: a field per array; the object as one sample, its rows, or windows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.kept import Asked
from growcache.remote.formats.named import different_names
from growcache.remote.formats.npy import header_end, parse_header, rows_of
from growcache.remote.formats.npz_arrays import entry_of, members_of, read_arrays
from growcache.remote.formats.objects import Measure, Reader, Visit, one_of, refuse_unknown
from growcache.remote.formats.rows import (
    Grid,
    Rows,
    cut_samples,
    grid_of,
    read_starts,
    wanted_starts,
)
from growcache.remote.formats.small import Fetched, is_fetched_whole
from growcache.remote.formats.zips import STORED, Member, data_start
from growcache.remote.store import Entry
from growcache.schema import Array, Sample

_OPTIONS = ("axis", "window", "stride", "edge", "phase", "fields", "read")
_HEAD = 512  # bytes of a member that hold its zip header and, nearly always, that of .npy
_KEPT = 1 << 25  # bytes of what is kept of objects
_KEPT_MEMBER = 500  # bytes that a member takes of these


class Archive:
    """An object is one sample, with the arrays of the archive as fields."""

    ranged = False
    listed = True
    code_digest = None

    def __init__(self, fields: tuple[str, ...] | None) -> None:
        self._fields = fields

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        return Measure(float(reader.entry.size), 0, 1)

    async def read(self, reader: Reader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """See `ObjectFormat.read`."""
        arrays = await read_arrays(reader, self._fields)
        return [(dict(arrays), 0, reader.entry.size)]


class ArchiveOfRows:
    """An object is as many samples as its arrays have rows; it is read whole."""

    ranged = False
    listed = True
    code_digest = None

    def __init__(self, fields: tuple[str, ...] | None, grid: Grid) -> None:
        self._fields = fields
        self._grid = grid

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        arrays = await read_arrays(reader, self._fields)
        count = len(self._grid.starts(_length(arrays, reader.entry), 0))
        return Measure(reader.entry.size / max(1, count), 0, count)

    async def read(self, reader: Reader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """See `ObjectFormat.read`."""
        arrays = await read_arrays(reader, self._fields)
        count = _length(arrays, reader.entry)
        row = sum(array[:1].nbytes for array in arrays.values())
        starts = wanted_starts(
            reader, Rows(0, count, (row,), np.dtype("u1")), self._grid, visit
        )
        return _together(
            {name: cut_samples(array, self._grid, starts) for name, array in arrays.items()}
        )


class RangedRows:
    """The same, of arrays that are not compressed: rows are read by byte range."""

    ranged = headed = True
    listed = True
    code_digest = None

    def __init__(self, fields: tuple[str, ...] | None, grid: Grid) -> None:
        self._fields = fields
        self._grid = grid
        self._known: Asked[Entry, dict[str, Rows]] = Asked(_KEPT)

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        rows = _sum(await self._located(reader))
        if not rows.row_bytes:
            raise FormatError(
                f"{reader.entry.key}: its rows have no values, so sizes of objects do not tell "
                "how many there are; drop axis and window to take whole arrays"
            )
        return self._grid.measure(rows, reader.entry.size)

    async def read(self, reader: Reader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """See `ObjectFormat.read`."""
        if self._known.known(reader.entry) is None and is_fetched_whole(reader.entry, visit):
            reader = Fetched(reader, await reader.read())
        located = await self._located(reader)
        starts = wanted_starts(reader, _sum(located), self._grid, visit)
        each = (read_starts(reader, rows, self._grid, starts) for rows in located.values())
        found = await asyncio.gather(*each)
        return _together(dict(zip(located, found, strict=True)))

    async def _located(self, reader: Reader) -> dict[str, Rows]:
        return await self._known.get(reader.entry, lambda: self._looked_up(reader))

    async def _looked_up(self, reader: Reader) -> tuple[dict[str, Rows], int]:
        members = await members_of(reader, self._fields)
        for name, member in members.items():
            if member.method != STORED:
                raise FormatError(
                    f"{reader.entry.key}: {name} is compressed, so its rows cannot be read by "
                    "range; set read: whole in source.options, or write it with numpy.savez"
                )
        rows = await asyncio.gather(*(_rows(reader, m) for m in members.values()))
        located = dict(zip(members, rows, strict=True))
        _same_length({name: found.count for name, found in located.items()}, reader.entry)
        return located, _KEPT_MEMBER * len(located)


def _together(
    fields: Mapping[str, Sequence[tuple[Sample, int, int]]],
) -> list[tuple[Sample, int, int]]:
    """Return samples of several fields from the samples ``x`` of each."""
    return [
        ({name: one[0]["x"] for name, one in zip(fields, found, strict=True)}, *found[0][1:])
        for found in zip(*fields.values(), strict=True)
    ]


def _sum(located: Mapping[str, Rows]) -> Rows:
    """Return rows as long as those of all fields together."""
    row = sum(rows.row_bytes for rows in located.values())
    return Rows(0, next(iter(located.values())).count, (row,), np.dtype("u1"))


def _length(arrays: Mapping[str, Array], entry: Entry) -> int:
    lengths = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
    return _same_length(lengths, entry)


def _same_length(lengths: Mapping[str, int], entry: Entry) -> int:
    if len(set(lengths.values())) == 1 and -1 not in lengths.values():
        return next(iter(lengths.values()))
    shown = [f"{name} {n if n >= 0 else 'a single value'}" for name, n in lengths.items()]
    raise FormatError(
        f"{entry.key}: expected arrays of as many rows each, found {', '.join(shown)[:160]}; "
        "choose those that belong together with source.options.fields"
    )


async def _rows(reader: Reader, member: Member) -> Rows:
    """Return where the rows of a member lie."""
    entry, inner = reader.entry, entry_of(reader.entry, member)
    head = bytes(memoryview(await reader.read(member.start, member.start + _HEAD)))
    start = data_start(head, member, entry.key)
    head = head[start - member.start :]
    if len(head) < 12 or (end := header_end(head, inner)) > len(head):
        end = min(member.size, end if len(head) >= 12 else _HEAD)
        head = bytes(memoryview(await reader.read(start, start + end)))
        if header_end(head, inner) > len(head):
            head = bytes(memoryview(await reader.read(start, start + header_end(head, inner))))
    found = rows_of(parse_header(head, inner), inner)
    return replace(found, offset=start + found.offset)


def open_npz(options: Mapping[str, Any]) -> Archive | ArchiveOfRows | RangedRows:
    """Return the format.

    Options:
        fields: names of the arrays to take; all by default.
        axis: 0: row i of each array together is a sample. Without axis and window the object
            is one sample.
        window, stride, edge, phase: as with format npy.
        read: ``range``: rows are read by byte range; ``whole``: each object is read whole, as
            compressed ones must be, and all its rows are samples.

    Raises:
        ConfigError: an unknown option, or a value that cannot be meant.
    """
    refuse_unknown("npz", options, _OPTIONS)
    fields = different_names("fields", options.get("fields"), "names of arrays")
    by_range = one_of(options, "read", ("range", "whole"), "range") == "range"
    grid = grid_of(options)
    if grid is None:
        if "read" in options:
            raise ConfigError("source.options.read: needs axis: 0 or window")
        return Archive(fields)
    return RangedRows(fields, grid) if by_range else ArchiveOfRows(fields, grid)
