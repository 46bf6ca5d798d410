"""NumPy's ``.npz`` archives: arrays are fields, and the object, its rows or windows are samples."""

from __future__ import annotations

import asyncio
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    MOST_VISIT_BYTES,
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    choice_option,
    names_option,
    read_whole,
    refuse_unknown_options,
)
from growcache.formats.byte_ranges import FetchedObject, FetchedRanges, read_ranges
from growcache.formats.contiguous import (
    ArrayLayout,
    ContiguousFormat,
    cut_samples,
    native_order,
    refuse_differing_sizes,
    wanted_ordinals,
    zip_fields,
)
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, Samples, grid_option
from growcache.formats.memory import refuse_large_sample, reserve_decoded
from growcache.formats.npy import (
    array_layout,
    named_errors,
    npy_header_end,
    parse_npy_header,
)
from growcache.formats.npy_dtypes import fields_of, has_meaning
from growcache.formats.signatures import SIGNATURE_BYTES, advice_on
from growcache.schema import Array, Sample
from growcache.store.contract import Entry

_TAIL_BYTES = 4096  # enough for the directory of some dozens of members
_MOST_TAIL_BYTES = 1 << 20  # of a directory, and of everything after it
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # before a member's name
_MOST_MEMBERS = 4096
_ENCRYPTED = 0x1


@dataclass(frozen=True, slots=True)
class ZipMember:
    name: str
    method: int  # `zipfile.ZIP_STORED` or `DEFLATED_METHOD`
    crc: int
    packed: int  # bytes in the archive
    size: int  # bytes, unpacked
    start: int  # first byte of its local header
    stop: int  # first byte of the next member or the directory


async def read_members(
    reader: ObjectReader, fields: tuple[str, ...] | None
) -> dict[str, ZipMember]:
    infos, start = await _read_directory(reader)
    members = {
        name.removesuffix(".npy"): member
        for name, member in _checked_members(infos, start, reader.entry.key).items()
        if name.endswith(".npy")
    }
    return _chosen_members(members, fields, reader.entry)


async def _read_directory(reader: ObjectReader) -> tuple[list[zipfile.ZipInfo], int]:
    entry, length = reader.entry, _TAIL_BYTES
    while length <= _MOST_TAIL_BYTES:
        start = max(0, entry.size - length)
        tail = memoryview(await reader.read(start, entry.size)).cast("B")
        file = FetchedRanges(entry.size, {(start, entry.size): tail})
        try:
            with zipfile.ZipFile(file) as archive:
                return archive.infolist(), archive.start_dir
        except _ZIP_ERRORS as error:
            if file.missing is None:
                raise await _no_archive_error(reader, error) from None
            length = entry.size - file.missing[0]
    raise FormatError(f"{entry.key}: its zip directory claims {length:,} bytes", code="GC302")


# Errors that zipfile raises for damaged archives, in addition to its own.
_ZIP_ERRORS = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError, struct.error
)  # fmt: skip


async def _no_archive_error(reader: ObjectReader, error: Exception) -> FormatError:
    head = bytes(memoryview(await reader.read(0, SIGNATURE_BYTES)))
    return FormatError(
        f"{reader.entry.key}: expected an .npz archive, found something else, or one that is "
        f"damaged or cut off ({error}); it starts with {head[:8]!r}{advice_on(head)}",
        code="GC302",
    )


def _checked_members(
    infos: Sequence[zipfile.ZipInfo], directory: int, key: str
) -> dict[str, ZipMember]:
    """Return the members, with checks that zipfile omits."""
    if len(infos) > _MOST_MEMBERS:
        raise FormatError(
            f"{key}: expected at most {_MOST_MEMBERS:,} arrays in an archive, found {len(infos):,}",
            code="GC305",
        )
    starts = sorted({info.header_offset for info in infos} | {directory})
    ends = dict(pairwise(starts))
    members = {}
    for info in infos:
        name, start, stop = info.filename, info.header_offset, ends.get(info.header_offset, 0)
        if info.flag_bits & _ENCRYPTED:
            raise FormatError(f"{key}: member {name} of the archive is encrypted", code="GC304")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or (
            info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size
        ):
            raise FormatError(
                f"{key}: expected members as numpy.savez and savez_compressed write them, found "
                f"{name} of method {info.compress_type}",
                code="GC304",
            )
        if start < 0 or start + _LOCAL_HEADER.size + info.compress_size > stop:
            raise FormatError(f"{key}: members of the archive overlap; damaged", code="GC302")
        members[name] = ZipMember(
            name, info.compress_type, info.CRC, info.compress_size, info.file_size, start, stop
        )
    if len(starts) <= len(infos):
        raise FormatError(f"{key}: members of the archive overlap; damaged", code="GC302")
    if len(members) < len(infos):
        raise FormatError(f"{key}: two members of the archive have the same name", code="GC303")
    return members


def _chosen_members(
    arrays: dict[str, ZipMember], fields: tuple[str, ...] | None, entry: Entry
) -> dict[str, ZipMember]:
    if not arrays:
        raise FormatError(f"{entry.key}: expected an archive of arrays, found none in it")
    missing = [name for name in fields or () if name not in arrays]
    if missing:
        raise FormatError(
            f"{entry.key}: expected an array {missing[0]!r}, found {', '.join(arrays)[:160]}",
            code="GC303",
        )
    return arrays if fields is None else {name: arrays[name] for name in fields}


_HEAD_BYTES = 4096  # of a member, packed and unpacked
_TRAILING_BYTES = 1 << 20  # that may follow an array


def member_data_start(head: bytes, member: ZipMember, key: str) -> int:
    if len(head) >= _LOCAL_HEADER.size:
        mark, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(head)
        start = member.start + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)
        if mark == b"PK\x03\x04" and start + member.packed <= member.stop:
            return start
    raise FormatError(
        f"{key}: member {member.name} is not where the zip directory says", code="GC302"
    )


def unpack_member(data: memoryview, member: ZipMember, key: str) -> memoryview:
    """Check a member and return its bytes.

    ``data`` has the bytes [start, stop) of the member.
    """
    first = member_data_start(bytes(data[: _LOCAL_HEADER.size]), member, key) - member.start
    found = data[first : first + member.packed]
    if member.method == zipfile.ZIP_DEFLATED:
        _refuse_other_size(found, member, key)
        inflating = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            found = memoryview(inflating.decompress(found, member.size + 1))
        except zlib.error as error:
            raise FormatError(
                f"{key}: member {member.name} is damaged: {error}", code="GC302"
            ) from None
        if len(found) != member.size:
            raise FormatError(
                f"{key}: member {member.name} does not have the {member.size:,} bytes that the "
                "zip directory says",
                code="GC302",
            )
    if zlib.crc32(found) != member.crc:
        raise FormatError(
            f"{key}: member {member.name} of the archive is damaged", code="GC302"
        )
    return found


def _refuse_other_size(packed: memoryview, member: ZipMember, key: str) -> None:
    """Refuse a member that would unpack to far more than its array."""
    try:
        head = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed[:_HEAD_BYTES], _HEAD_BYTES)
        header = parse_npy_header(head, Entry(f"{key}: {member.name}", member.size, None, None))
    except (zlib.error, FormatError):
        return  # unpacking will report it, or the header is long
    if header.data + header.nbytes + _TRAILING_BYTES < member.size:
        raise FormatError(
            f"{key}: member {member.name} has an array of {header.nbytes:,} bytes, and the zip "
            f"directory says {member.size:,}",
            code="GC302",
        )


_WHOLE_BYTES = 1 << 16  # such an object is fetched whole rather than in several requests


async def read_arrays(
    reader: ObjectReader, fields: tuple[str, ...] | None, *, is_sample: bool = False
) -> dict[str, Array]:
    entry = reader.entry
    if fields is None or entry.size <= _WHOLE_BYTES:
        whole = memoryview(await read_whole(reader)).cast("B")
        members = await read_members(FetchedObject(reader, whole), fields)
        parts = [whole[m.start : m.stop] for m in members.values()]
    else:
        members = await read_members(reader, fields)
        _refuse_too_much(members, entry)
        ranges = [(m.start, m.stop) for m in members.values()]
        parts = await read_ranges(reader, ranges)
    _refuse_too_much(members, entry)
    if is_sample:
        refuse_large_sample(sum(member.size for member in members.values()), entry.key)

    def work() -> dict[str, Array]:
        pairs = zip(members.items(), parts, strict=True)
        return {name: _member_array(data, member, entry) for (name, member), data in pairs}

    if all(member.method == zipfile.ZIP_STORED for member in members.values()):
        return work()
    await reserve_decoded(
        sum(member.size for member in members.values() if member.method != zipfile.ZIP_STORED)
    )
    return await asyncio.to_thread(work)  # zlib releases the lock for other threads


def _refuse_too_much(members: Mapping[str, ZipMember], entry: Entry) -> None:
    if (nbytes := sum(max(m.size, m.packed) for m in members.values())) > MOST_VISIT_BYTES:
        raise FormatError(
            f"{entry.key}: arrays that are read whole may have at most {MOST_VISIT_BYTES:,} "
            f"bytes, found {nbytes:,}; choose some with source.options.fields",
            code="GC305",
        )


def _member_array(data: memoryview, member: ZipMember, entry: Entry) -> Array:
    values = unpack_member(data, member, entry.key)
    header = parse_npy_header(values, member_entry(entry, member))
    flat = np.frombuffer(values, header.dtype, math.prod(header.shape), header.data)
    return native_order(flat.reshape(header.shape, order="F" if header.fortran else "C"))


def member_entry(entry: Entry, member: ZipMember) -> Entry:
    return replace(entry, key=f"{entry.key}: {member.name}", size=member.size)


_OPTIONS = (*GRID_OPTIONS, "fields", "read")
_MEMBER_HEAD_BYTES = 512  # the zip header of a member and, nearly always, its .npy header
_KEPT_BYTES = 1 << 25  # of facts that are kept about objects
_KEPT_MEMBER_BYTES = 500  # of these, per member


def meant_arrays(found: SamplesWithOrigins, key: str) -> SamplesWithOrigins:
    """Return samples with a field per field of a record, as ``array.name``, and times as integers."""
    if not found or not any(has_meaning(values.dtype) for values in found[0][0].values()):
        return found
    with named_errors(key):
        return [(_meant_sample(sample), start, stop) for sample, start, stop in found]


def _meant_sample(sample: Sample) -> Sample:
    meant: Sample = {}
    for name, values in sample.items():
        meant |= fields_of(name, values, f"{name}.")
    return meant


class NpzWholeFormat(ObjectFormat):
    def __init__(self, fields: tuple[str, ...] | None) -> None:
        self._fields = fields

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        arrays = await read_arrays(reader, self._fields, is_sample=True)
        return meant_arrays([(dict(arrays), 0, reader.entry.size)], reader.entry.key)


class NpzWholeWindowsFormat(ObjectFormat):
    def __init__(self, fields: tuple[str, ...] | None, grid: ArrayGrid) -> None:
        self._fields = fields
        self._grid = grid

    async def measure(self, reader: ObjectReader) -> Measure:
        arrays = await read_arrays(reader, self._fields)
        each = self._samples(arrays, reader.entry.key)
        refuse_differing_sizes(each, reader.entry.key)
        first = next(iter(each.values()))
        count = len(first)
        return Measure(reader.entry.size / max(1, count), 0, count, empty=first.too_short())

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        arrays, key = await read_arrays(reader, self._fields), reader.entry.key
        each = self._samples(arrays, key, visit)
        layouts = {
            name: ArrayLayout(0, array.shape, array.dtype) for name, array in arrays.items()
        }
        wanted = wanted_ordinals(layouts, each, visit, key)
        found = {name: cut_samples(array, each[name], wanted) for name, array in arrays.items()}
        return meant_arrays(zip_fields(found), key)

    def _samples(
        self, arrays: Mapping[str, Array], key: str, visit: Visit | None = None
    ) -> dict[str, Samples]:
        return {
            name: self._grid.on(array.shape, f"{key}: {name}", visit, key)
            for name, array in arrays.items()
        }


class NpzWindowsFormat(ContiguousFormat):
    """Rows or windows of arrays, which must not be compressed."""

    def __init__(self, fields: tuple[str, ...] | None, grid: ArrayGrid) -> None:
        super().__init__(grid, _KEPT_BYTES)
        self._fields = fields

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        return meant_arrays(await super().read(reader, visit), reader.entry.key)

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, ArrayLayout], int]:
        members = await read_members(reader, self._fields)
        for name, member in members.items():
            if member.method != zipfile.ZIP_STORED:
                raise FormatError(
                    f"{reader.entry.key}: {name} is compressed, so its rows cannot be read by "
                    "range; set read: whole in source.options, or write it with numpy.savez",
                    code="GC304",
                )
        found = await asyncio.gather(*(_member_layout(reader, m) for m in members.values()))
        return dict(zip(members, found, strict=True)), _KEPT_MEMBER_BYTES * len(members)


async def _member_layout(reader: ObjectReader, member: ZipMember) -> ArrayLayout:
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
    found = array_layout(parse_npy_header(head, inner), inner)
    return replace(found, offset=start + found.offset)


def open_npz(
    options: Mapping[str, Any],
) -> NpzWholeFormat | NpzWholeWindowsFormat | NpzWindowsFormat:
    refuse_unknown_options("npz", options, _OPTIONS)
    fields = names_option("fields", options.get("fields"), "names of arrays")
    by_range = choice_option(options, "read", ("range", "whole"), "range") == "range"
    grid = grid_option(options)
    if grid is None:
        if "read" in options:
            raise ConfigError("source.options.read: needs axis: 0 or window", code="GC103")
        return NpzWholeFormat(fields)
    return NpzWindowsFormat(fields, grid) if by_range else NpzWholeWindowsFormat(fields, grid)
