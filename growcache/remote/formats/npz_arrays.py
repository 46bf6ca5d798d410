"""The arrays of an ``.npz`` archive: found by its directory, and taken out of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from growcache.errors import FormatError
from growcache.remote.formats.decoding import decodes
from growcache.remote.formats.npy import parse_header
from growcache.remote.formats.objects import LARGEST_WHOLE, Reader, read_whole
from growcache.remote.formats.ranges import read_ranges
from growcache.remote.formats.rows import native_order
from growcache.remote.formats.zips import (
    LONGEST_TAIL,
    STORED,
    USUAL_TAIL,
    Directory,
    Member,
    find_directory,
    parse_directory,
    unpacked,
)
from growcache.remote.store import Entry
from growcache.schema import Array

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SMALL = 1 << 16  # bytes; such an object is fetched whole rather than in several requests


async def read_arrays(reader: Reader, fields: tuple[str, ...] | None) -> dict[str, Array]:
    """Return the arrays of an archive: those named, or all.

    Raises:
        FormatError: it is no archive of arrays, has none of that name, or is too large.
    """
    entry = reader.entry
    if fields is None or entry.size <= _SMALL:
        whole = memoryview(await read_whole(reader)).cast("B")
        members = _chosen(_members(whole, entry), fields, entry)
        parts = [whole[m.start : m.stop] for m in members.values()]
    else:
        members = await members_of(reader, fields)
        _refuse_too_much(members, entry)
        ranges = [(m.start, m.stop) for m in members.values()]
        parts = [memoryview(data) for data in await read_ranges(reader, ranges)]
    _refuse_too_much(members, entry)

    def work() -> dict[str, Array]:
        pairs = zip(members.items(), parts, strict=True)
        return {name: _array(data, member, entry) for (name, member), data in pairs}

    if all(member.method == STORED for member in members.values()):
        return work()
    await decodes(sum(member.size for member in members.values() if member.method != STORED))
    return await asyncio.to_thread(work)  # zlib lets others run meanwhile


def _refuse_too_much(members: Mapping[str, Member], entry: Entry) -> None:
    if (nbytes := sum(max(m.size, m.packed) for m in members.values())) > LARGEST_WHOLE:
        raise FormatError(
            f"{entry.key}: arrays that are read whole may have {LARGEST_WHOLE:,} bytes, found "
            f"{nbytes:,}; choose some with source.options.fields"
        )


def _array(data: memoryview, member: Member, entry: Entry) -> Array:
    values = unpacked(data, member, entry.key)
    header = parse_header(values, entry_of(entry, member))
    flat = np.frombuffer(values, header.dtype, math.prod(header.shape), header.data)
    return native_order(flat.reshape(header.shape, order="F" if header.fortran else "C"))


def entry_of(entry: Entry, member: Member) -> Entry:
    """Return an entry that stands for a member, for errors and its size."""
    return replace(entry, key=f"{entry.key}: {member.name}", size=member.size)


def _members(whole: Buffer, entry: Entry) -> list[Member]:
    directory = find_directory(whole, entry.size, entry.key)
    if directory is None:
        raise _no_archive(memoryview(whole)[:8], entry)
    listed = bytes(memoryview(whole)[directory.start : directory.stop])
    return parse_directory(listed, directory, entry.key)


def _no_archive(head: memoryview, entry: Entry) -> FormatError:
    return FormatError(
        f"{entry.key}: expected an .npz archive, found something else, or one that is cut off; "
        f"it starts with {bytes(head)!r}"
    )


async def members_of(reader: Reader, fields: tuple[str, ...] | None) -> dict[str, Member]:
    """Return the members by their fields, mostly by one small read of the end.

    Raises:
        FormatError: no archive of arrays, or none of these names in it.
    """
    entry = reader.entry
    directory: Directory | None = None
    tail, start = b"", entry.size
    for length in (USUAL_TAIL, LONGEST_TAIL):
        if directory is None and start > 0:
            start = max(0, entry.size - length)
            tail = bytes(memoryview(await reader.read(start, entry.size)))
            directory = find_directory(tail, entry.size, entry.key)
    if directory is None:
        raise _no_archive(memoryview(await reader.read(0, 8)), entry)
    if directory.start < start:
        listed = bytes(memoryview(await reader.read(directory.start, directory.stop)))
    else:
        listed = tail[directory.start - start : directory.stop - start]
    return _chosen(parse_directory(listed, directory, entry.key), fields, entry)


def _chosen(
    members: Sequence[Member], fields: tuple[str, ...] | None, entry: Entry
) -> dict[str, Member]:
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
