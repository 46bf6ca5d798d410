"""NumPy's ``.npz`` archives: each array is a field; the object, its rows or windows are samples."""

from __future__ import annotations

import asyncio
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    MOST_VISIT_BYTES,
    Measure,
    ObjectReader,
    Visit,
    choice_option,
    is_fetched_whole,
    names_option,
    read_whole,
    refuse_unknown_options,
)
from growcache.formats.byte_ranges import FetchedObject, read_ranges
from growcache.formats.memory import ByteSemaphore, SingleFlightCache, reserve_decoded
from growcache.formats.npy import npy_header_end, parse_npy_header, row_layout
from growcache.formats.rows import (
    RowLayout,
    SampleGrid,
    cut_samples,
    grid_option,
    native_order,
    read_rows,
    wanted_starts,
)
from growcache.schema import Array, Sample
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer


USUAL_TAIL = 4096  # bytes, in which the directory of some dozens of members fits
LONGEST_TAIL = 22 + 0xFFFF + 20 + 56  # with the longest comment there can be
LOCAL_HEADER_BYTES = 30  # bytes in front of a member's name
MOST_MEMBERS = 4096
_MOST_NAME = 1024  # bytes

_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ENCRYPTED, _UTF8 = 0x1, 0x800
STORED_METHOD, DEFLATED_METHOD = 0, 8
_INFLATE_SEMAPHORE = ByteSemaphore(MOST_VISIT_BYTES)


@dataclass(frozen=True, slots=True)
class ZipMember:
    name: str
    method: int  # `STORED_METHOD` or `DEFLATED_METHOD`
    crc: int
    packed: int  # bytes in the archive
    size: int  # bytes, unpacked
    start: int  # of its local header
    stop: int  # where the next member or the directory begins


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """Where the list of an archive's members lies."""

    start: int
    stop: int
    count: int


def find_directory(tail: Buffer, size: int, key: str) -> ZipDirectory | None:
    """Return where the directory lies; None: not to be seen, a longer tail may tell.

    Args:
        tail: the last bytes of the object.
        size: of the object.
        key: of it, for errors.
    """
    data = bytes(memoryview(tail))
    at = data.rfind(b"PK\x05\x06")
    while at >= 0:
        if at + _END.size <= len(data):
            _, disk, first, _, count, nbytes, start, comment = _END.unpack_from(data, at)
            if at + _END.size + comment == len(data):
                break
        at = data.rfind(b"PK\x05\x06", 0, at)
    if at < 0:
        return None
    base = size - len(data)
    stop = base + at
    if 0xFFFF in (count, disk) or 0xFFFFFFFF in (nbytes, start):
        found = _end64(data, at, base, key)
        if found is None:
            return None
        stop, count, nbytes, start, disk, first = found
    if disk or first or start + nbytes != stop:
        raise FormatError(
            f"{key}: expected a zip archive in one piece, found another directory"
        )
    if count > MOST_MEMBERS:
        raise FormatError(
            f"{key}: expected at most {MOST_MEMBERS:,} arrays in an archive, found {count:,}"
        )
    return ZipDirectory(start, stop, count)


def _end64(data: bytes, at: int, base: int, key: str) -> tuple[int, ...] | None:
    """Return what the larger end record says; None: it lies before the tail."""
    if at < _LOCATOR.size:
        return None
    mark, _, place, _ = _LOCATOR.unpack_from(data, at - _LOCATOR.size)
    if mark != b"PK\x06\x07" or place + _END64.size > base + at - _LOCATOR.size:
        raise FormatError(f"{key}: its zip directory is damaged")
    if place < base:
        return None
    mark, _, _, _, disk, first, _, count, nbytes, start = _END64.unpack_from(data, place - base)
    if mark != b"PK\x06\x06":
        raise FormatError(f"{key}: its zip directory is damaged")
    return place, count, nbytes, start, disk, first


def parse_directory(data: bytes, directory: ZipDirectory, key: str) -> list[ZipMember]:
    rows, at = [], 0
    for _ in range(directory.count):
        row, at = _directory_entry(data, at, key)
        rows.append(row)
    places = sorted({row.start for row in rows} | {directory.start})
    ends = dict(pairwise(places))
    members = [
        ZipMember(r.name, r.method, r.crc, r.packed, r.size, r.start, ends.get(r.start, 0))
        for r in rows
    ]
    if len({m.start for m in members}) < len(members) or any(
        m.start + LOCAL_HEADER_BYTES + m.packed > m.stop for m in members
    ):
        raise FormatError(f"{key}: members of the archive lie in the same place; damaged")
    if len({m.name for m in members}) < len(members):
        raise FormatError(f"{key}: two members of the archive have the same name")
    return members


def _directory_entry(data: bytes, at: int, key: str) -> tuple[ZipMember, int]:
    if at + _CENTRAL.size > len(data):
        raise FormatError(f"{key}: its zip directory is cut off")
    (mark, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes,
     comment_bytes, _, _, _, start) = _CENTRAL.unpack_from(data, at)  # fmt: skip
    at += _CENTRAL.size
    extra = at + name_bytes
    after = extra + extra_bytes + comment_bytes
    if mark != b"PK\x01\x02" or after > len(data) or name_bytes > _MOST_NAME:
        raise FormatError(f"{key}: its zip directory is damaged")
    packed, size, start = _zip64_sizes(
        data[extra : extra + extra_bytes], packed, size, start, key
    )
    name = _member_name(data[at:extra], flags)
    if flags & _ENCRYPTED:
        raise FormatError(f"{key}: member {name} of the archive is encrypted")
    if method not in (STORED_METHOD, DEFLATED_METHOD) or (
        method == STORED_METHOD and packed != size
    ):
        raise FormatError(
            f"{key}: expected members as numpy.savez and savez_compressed write them, found "
            f"{name} of method {method}"
        )
    return ZipMember(name, method, crc, packed, size, start, 0), after


def _zip64_sizes(
    extra: bytes, packed: int, size: int, start: int, key: str
) -> tuple[int, int, int]:
    """Return the sizes, which stand elsewhere if they need more than 32 bits."""
    wanted = [n == 0xFFFFFFFF for n in (size, packed, start)]
    if not any(wanted):
        return packed, size, start
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1 and nbytes >= 8 * sum(wanted) and at + 4 + nbytes <= len(extra):
            numbers = iter(struct.unpack_from(f"<{sum(wanted)}Q", extra, at + 4))
            size, packed, start = (
                next(numbers) if wide else n
                for wide, n in zip(wanted, (size, packed, start), strict=True)
            )
            return packed, size, start
        at += 4 + nbytes
    raise FormatError(f"{key}: its zip directory is damaged")


def _member_name(name: bytes, flags: int) -> str:
    try:
        return name.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        return name.decode("cp437")


def member_data_start(head: bytes, member: ZipMember, key: str) -> int:
    """Return the position in the object at which a member's packed bytes begin."""
    if len(head) >= LOCAL_HEADER_BYTES:
        mark, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
        start = member.start + LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
        if mark == b"PK\x03\x04" and start + member.packed <= member.stop:
            return start
    raise FormatError(f"{key}: member {member.name} is not where the zip directory says")


def unpack_member(data: memoryview, member: ZipMember, key: str) -> memoryview:
    """Return a member's bytes, checked; ``data`` is [start, stop) of the member."""
    first = member_data_start(bytes(data[:LOCAL_HEADER_BYTES]), member, key) - member.start
    found = data[first : first + member.packed]
    if member.method == DEFLATED_METHOD:
        with _INFLATE_SEMAPHORE.of(min(member.size, MOST_VISIT_BYTES)):
            found = _inflate_member(found, member, key)
    if len(found) != member.size or zlib.crc32(found) != member.crc:
        raise FormatError(f"{key}: member {member.name} of the archive is damaged")
    return found


def _inflate_member(data: memoryview, member: ZipMember, key: str) -> memoryview:
    inflating = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = inflating.decompress(data, member.size + 1)
    except zlib.error as error:
        raise FormatError(f"{key}: member {member.name} is damaged: {error}") from None
    if len(found) != member.size:
        raise FormatError(
            f"{key}: member {member.name} has other than the {member.size:,} bytes that the "
            "zip directory says"
        )
    return memoryview(found)


_WHOLE_BYTES = 1 << 16  # bytes; such an object is fetched whole rather than in several requests


async def read_arrays(reader: ObjectReader, fields: tuple[str, ...] | None) -> dict[str, Array]:
    """Return the arrays of an archive: those named, or all."""
    entry = reader.entry
    if fields is None or entry.size <= _WHOLE_BYTES:
        whole = memoryview(await read_whole(reader)).cast("B")
        members = _named_members(_members_in_memory(whole, entry), fields, entry)
        parts = [whole[m.start : m.stop] for m in members.values()]
    else:
        members = await read_members(reader, fields)
        _refuse_too_much(members, entry)
        ranges = [(m.start, m.stop) for m in members.values()]
        parts = [memoryview(data) for data in await read_ranges(reader, ranges)]
    _refuse_too_much(members, entry)

    def work() -> dict[str, Array]:
        pairs = zip(members.items(), parts, strict=True)
        return {name: _member_array(data, member, entry) for (name, member), data in pairs}

    if all(member.method == STORED_METHOD for member in members.values()):
        return work()
    await reserve_decoded(
        sum(member.size for member in members.values() if member.method != STORED_METHOD)
    )
    return await asyncio.to_thread(work)  # zlib lets others run meanwhile


def _refuse_too_much(members: Mapping[str, ZipMember], entry: Entry) -> None:
    if (nbytes := sum(max(m.size, m.packed) for m in members.values())) > MOST_VISIT_BYTES:
        raise FormatError(
            f"{entry.key}: arrays that are read whole may have {MOST_VISIT_BYTES:,} bytes, found "
            f"{nbytes:,}; choose some with source.options.fields"
        )


def _member_array(data: memoryview, member: ZipMember, entry: Entry) -> Array:
    values = unpack_member(data, member, entry.key)
    header = parse_npy_header(values, member_entry(entry, member))
    flat = np.frombuffer(values, header.dtype, math.prod(header.shape), header.data)
    return native_order(flat.reshape(header.shape, order="F" if header.fortran else "C"))


def member_entry(entry: Entry, member: ZipMember) -> Entry:
    """Return an entry that stands for a member, for errors and its size."""
    return replace(entry, key=f"{entry.key}: {member.name}", size=member.size)


def _members_in_memory(whole: Buffer, entry: Entry) -> list[ZipMember]:
    directory = find_directory(whole, entry.size, entry.key)
    if directory is None:
        raise _no_archive_error(memoryview(whole)[:8], entry)
    listed = bytes(memoryview(whole)[directory.start : directory.stop])
    return parse_directory(listed, directory, entry.key)


def _no_archive_error(head: memoryview, entry: Entry) -> FormatError:
    return FormatError(
        f"{entry.key}: expected an .npz archive, found something else, or one that is cut off; "
        f"it starts with {bytes(head)!r}"
    )


async def read_members(
    reader: ObjectReader, fields: tuple[str, ...] | None
) -> dict[str, ZipMember]:
    """Return the members by their fields, mostly by one small read of the end."""
    entry = reader.entry
    directory: ZipDirectory | None = None
    tail, start = b"", entry.size
    for length in (USUAL_TAIL, LONGEST_TAIL):
        if directory is None and start > 0:
            start = max(0, entry.size - length)
            tail = bytes(memoryview(await reader.read(start, entry.size)))
            directory = find_directory(tail, entry.size, entry.key)
    if directory is None:
        raise _no_archive_error(memoryview(await reader.read(0, 8)), entry)
    if directory.start < start:
        listed = bytes(memoryview(await reader.read(directory.start, directory.stop)))
    else:
        listed = tail[directory.start - start : directory.stop - start]
    return _named_members(parse_directory(listed, directory, entry.key), fields, entry)


def _named_members(
    members: Sequence[ZipMember], fields: tuple[str, ...] | None, entry: Entry
) -> dict[str, ZipMember]:
    arrays = {m.name.removesuffix(".npy"): m for m in members if m.name.endswith(".npy")}
    if not arrays:
        raise FormatError(f"{entry.key}: expected an archive of arrays, found none in it")
    if fields is None:
        return arrays
    missing = [name for name in fields if name not in arrays]
    if missing:
        raise FormatError(
            f"{entry.key}: expected an array {missing[0]!r}, found {', '.join(arrays)[:160]}"
        )
    return {name: arrays[name] for name in fields}


_OPTIONS = ("axis", "window", "stride", "edge", "phase", "fields", "read")
_MEMBER_HEAD_BYTES = (
    512  # bytes of a member that hold its zip header and, nearly always, that of .npy
)
_KEPT_BYTES = 1 << 25  # bytes of what is kept of objects
_KEPT_MEMBER_BYTES = 500  # bytes that a member takes of these


class NpzWholeFormat:
    """An object is one sample, with the arrays of the archive as fields."""

    ranged = False
    listed = True
    code_digest = None

    def __init__(self, fields: tuple[str, ...] | None) -> None:
        self._fields = fields

    async def measure(self, reader: ObjectReader) -> Measure:
        return Measure(float(reader.entry.size), 0, 1)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        arrays = await read_arrays(reader, self._fields)
        return [(dict(arrays), 0, reader.entry.size)]


class NpzWholeRowsFormat:
    """An object is as many samples as its arrays have rows; it is read whole."""

    ranged = False
    listed = True
    code_digest = None

    def __init__(self, fields: tuple[str, ...] | None, grid: SampleGrid) -> None:
        self._fields = fields
        self._grid = grid

    async def measure(self, reader: ObjectReader) -> Measure:
        arrays = await read_arrays(reader, self._fields)
        count = len(self._grid.starts(_common_length(arrays, reader.entry), 0))
        return Measure(reader.entry.size / max(1, count), 0, count)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        arrays = await read_arrays(reader, self._fields)
        count = _common_length(arrays, reader.entry)
        row = sum(array[:1].nbytes for array in arrays.values())
        starts = wanted_starts(
            reader, RowLayout(0, count, (row,), np.dtype("u1")), self._grid, visit
        )
        return _zip_fields(
            {name: cut_samples(array, self._grid, starts) for name, array in arrays.items()}
        )


class NpzRowsFormat:
    """Rows of arrays that are not compressed, read by byte range."""

    ranged = headed = True
    listed = True
    code_digest = None

    def __init__(self, fields: tuple[str, ...] | None, grid: SampleGrid) -> None:
        self._fields = fields
        self._grid = grid
        self._known: SingleFlightCache[Entry, dict[str, RowLayout]] = SingleFlightCache(
            _KEPT_BYTES
        )

    async def measure(self, reader: ObjectReader) -> Measure:
        rows = _summed_layout(await self._located(reader))
        if not rows.row_bytes:
            raise FormatError(
                f"{reader.entry.key}: its rows have no values, so sizes of objects do not tell "
                "how many there are; drop axis and window to take whole arrays"
            )
        return self._grid.measure(rows, reader.entry.size)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        if self._known.known(reader.entry) is None and is_fetched_whole(reader.entry, visit):
            reader = FetchedObject(reader, await reader.read())
        located = await self._located(reader)
        starts = wanted_starts(reader, _summed_layout(located), self._grid, visit)
        each = (read_rows(reader, rows, self._grid, starts) for rows in located.values())
        found = await asyncio.gather(*each)
        return _zip_fields(dict(zip(located, found, strict=True)))

    async def _located(self, reader: ObjectReader) -> dict[str, RowLayout]:
        return await self._known.get(reader.entry, lambda: self._looked_up(reader))

    async def _looked_up(self, reader: ObjectReader) -> tuple[dict[str, RowLayout], int]:
        members = await read_members(reader, self._fields)
        for name, member in members.items():
            if member.method != STORED_METHOD:
                raise FormatError(
                    f"{reader.entry.key}: {name} is compressed, so its rows cannot be read by "
                    "range; set read: whole in source.options, or write it with numpy.savez"
                )
        rows = await asyncio.gather(*(_member_layout(reader, m) for m in members.values()))
        located = dict(zip(members, rows, strict=True))
        _same_length({name: found.count for name, found in located.items()}, reader.entry)
        return located, _KEPT_MEMBER_BYTES * len(located)


def _zip_fields(
    fields: Mapping[str, Sequence[tuple[Sample, int, int]]],
) -> list[tuple[Sample, int, int]]:
    """Return samples of several fields from the samples ``x`` of each."""
    return [
        ({name: one[0]["x"] for name, one in zip(fields, found, strict=True)}, *found[0][1:])
        for found in zip(*fields.values(), strict=True)
    ]


def _summed_layout(located: Mapping[str, RowLayout]) -> RowLayout:
    row = sum(rows.row_bytes for rows in located.values())
    return RowLayout(0, next(iter(located.values())).count, (row,), np.dtype("u1"))


def _common_length(arrays: Mapping[str, Array], entry: Entry) -> int:
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


async def _member_layout(reader: ObjectReader, member: ZipMember) -> RowLayout:
    entry, inner = reader.entry, member_entry(reader.entry, member)
    head = bytes(memoryview(await reader.read(member.start, member.start + _MEMBER_HEAD_BYTES)))
    start = member_data_start(head, member, entry.key)
    head = head[start - member.start :]
    if len(head) < 12 or (end := npy_header_end(head, inner)) > len(head):
        end = min(member.size, end if len(head) >= 12 else _MEMBER_HEAD_BYTES)
        head = bytes(memoryview(await reader.read(start, start + end)))
        if npy_header_end(head, inner) > len(head):
            head = bytes(
                memoryview(await reader.read(start, start + npy_header_end(head, inner)))
            )
    found = row_layout(parse_npy_header(head, inner), inner)
    return replace(found, offset=start + found.offset)


def open_npz(options: Mapping[str, Any]) -> NpzWholeFormat | NpzWholeRowsFormat | NpzRowsFormat:
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
    refuse_unknown_options("npz", options, _OPTIONS)
    fields = names_option("fields", options.get("fields"), "names of arrays")
    by_range = choice_option(options, "read", ("range", "whole"), "range") == "range"
    grid = grid_option(options)
    if grid is None:
        if "read" in options:
            raise ConfigError("source.options.read: needs axis: 0 or window")
        return NpzWholeFormat(fields)
    return NpzRowsFormat(fields, grid) if by_range else NpzWholeRowsFormat(fields, grid)
