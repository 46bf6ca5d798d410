"""Zip archives by their directory, as bytes of a stranger: what lies where, and how it comes out."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from growcache.errors import FormatError
from growcache.remote.formats.objects import LARGEST_WHOLE
from growcache.remote.formats.turns import Turns

if TYPE_CHECKING:
    from typing_extensions import Buffer

USUAL_TAIL = 4096  # bytes, in which the directory of some dozens of members fits
LONGEST_TAIL = 22 + 0xFFFF + 20 + 56  # with the longest comment there can be
LOCAL = 30  # bytes in front of a member's name
MOST_MEMBERS = 4096
_MOST_NAME = 1024  # bytes

_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ENCRYPTED, _UTF8 = 0x1, 0x800
STORED, DEFLATED = 0, 8
_INFLATING = Turns(LARGEST_WHOLE)


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive.

    Attributes:
        name: of it.
        method: `STORED` or `DEFLATED`.
        crc: CRC-32 of its bytes.
        packed: bytes that it takes in the archive.
        size: bytes that it has.
        start: where it begins, with its own header.
        stop: before which it ends: where the next one, or the directory, begins.
    """

    name: str
    method: int
    crc: int
    packed: int
    size: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Directory:
    """Where the list of an archive's members lies."""

    start: int
    stop: int
    count: int


def find_directory(tail: Buffer, size: int, key: str) -> Directory | None:
    """Return where the directory lies; None: not to be seen, a longer tail may tell.

    Args:
        tail: the last bytes of the object.
        size: of the object.
        key: of it, for errors.

    Raises:
        FormatError: it is no archive in one piece.
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
    return Directory(start, stop, count)


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


def parse_directory(data: bytes, directory: Directory, key: str) -> list[Member]:
    """Return the members, in the order of the directory.

    Raises:
        FormatError: damaged, or members that lie in the same place or have the same name.
    """
    rows, at = [], 0
    for _ in range(directory.count):
        row, at = _row(data, at, key)
        rows.append(row)
    places = sorted({row.start for row in rows} | {directory.start})
    ends = dict(pairwise(places))
    members = [
        Member(r.name, r.method, r.crc, r.packed, r.size, r.start, ends.get(r.start, 0))
        for r in rows
    ]
    if len({m.start for m in members}) < len(members) or any(
        m.start + LOCAL + m.packed > m.stop for m in members
    ):
        raise FormatError(f"{key}: members of the archive lie in the same place; damaged")
    if len({m.name for m in members}) < len(members):
        raise FormatError(f"{key}: two members of the archive have the same name")
    return members


def _row(data: bytes, at: int, key: str) -> tuple[Member, int]:
    if at + _CENTRAL.size > len(data):
        raise FormatError(f"{key}: its zip directory is cut off")
    (mark, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes,
     comment_bytes, _, _, _, start) = _CENTRAL.unpack_from(data, at)  # fmt: skip
    at += _CENTRAL.size
    extra = at + name_bytes
    after = extra + extra_bytes + comment_bytes
    if mark != b"PK\x01\x02" or after > len(data) or name_bytes > _MOST_NAME:
        raise FormatError(f"{key}: its zip directory is damaged")
    packed, size, start = _wide(data[extra : extra + extra_bytes], packed, size, start, key)
    name = _text(data[at:extra], flags)
    if flags & _ENCRYPTED:
        raise FormatError(f"{key}: member {name} of the archive is encrypted")
    if method not in (STORED, DEFLATED) or (method == STORED and packed != size):
        raise FormatError(
            f"{key}: expected members as numpy.savez and savez_compressed write them, found "
            f"{name} of method {method}"
        )
    return Member(name, method, crc, packed, size, start, 0), after


def _wide(extra: bytes, packed: int, size: int, start: int, key: str) -> tuple[int, int, int]:
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


def _text(name: bytes, flags: int) -> str:
    try:
        return name.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        return name.decode("cp437")


def data_start(head: bytes, member: Member, key: str) -> int:
    """Return at which byte of the object a member's packed bytes begin.

    Args:
        head: of the member: its first `LOCAL` bytes or more.
        member: of which archive.
        key: of that.

    Raises:
        FormatError: the member is not where the directory says.
    """
    if len(head) >= LOCAL:
        mark, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
        start = member.start + LOCAL + int(name_bytes) + int(extra_bytes)
        if mark == b"PK\x03\x04" and start + member.packed <= member.stop:
            return start
    raise FormatError(f"{key}: member {member.name} is not where the zip directory says")


def unpacked(data: memoryview, member: Member, key: str) -> memoryview:
    """Return a member's bytes, checked.

    Args:
        data: [start, stop) of the member.
        member: of which archive.
        key: of that.

    Raises:
        FormatError: they are not what the directory says.
    """
    first = data_start(bytes(data[:LOCAL]), member, key) - member.start
    found = data[first : first + member.packed]
    if member.method == DEFLATED:
        with _INFLATING.of(min(member.size, LARGEST_WHOLE)):
            found = _inflated(found, member, key)
    if len(found) != member.size or zlib.crc32(found) != member.crc:
        raise FormatError(f"{key}: member {member.name} of the archive is damaged")
    return found


def _inflated(data: memoryview, member: Member, key: str) -> memoryview:
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
