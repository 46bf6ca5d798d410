"""What stands before a member of a tar archive: headers of every dialect, and long names. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK = 512
NOTES = b"xgXLK"  # types of headers whose content is about the member that follows
_DATALESS = b"123456"  # links, devices, folders: their size is of nothing that is stored here
_REGULAR = b"0\x007S"
_SUM = slice(148, 156)
_OCTAL = re.compile(rb"[ \0]*([0-7]+)[ \0]*")
_SUM_FIELD = re.compile(rb" *[0-7]+[ \0]+")
_DIGITS = re.compile(rb"[0-9]{1,20}")
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__")


@dataclass(frozen=True, slots=True)
class Header:
    """A header's 512 bytes.

    Attributes:
        kind: its type, one byte.
        name: of the member, as this header alone has it.
        size: of what follows, bytes.
        more: whether further blocks of a sparse file's map follow.
    """

    kind: bytes
    name: bytes
    size: int
    more: bool


def padded(size: int) -> int:
    """Return how many bytes content of a size takes.

    >>> padded(0), padded(1), padded(512)
    (0, 512, 512)
    """
    return -(-size // BLOCK) * BLOCK


def parse_header(block: bytes) -> Header | None:
    """Return what a block says; None: it is no header, for its checksum is not that of one."""
    if len(block) < BLOCK or not _checked(block):
        return None
    size = _number(block[124:136])
    if size is None:
        return None
    kind = block[156:157]
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name  # what GNU's own dialect has there are times
    if kind == b"\0" and name.endswith(b"/"):
        kind = b"5"  # so the oldest archives have folders
    return Header(kind, name, 0 if kind in _DATALESS else size, kind == b"S" and block[482] > 0)


def is_header(view: memoryview, at: int) -> bool:
    """Whether a header is at a place; quick where none is."""
    if at + BLOCK > len(view) or view[at + 155] not in b" \0":
        return False
    return parse_header(bytes(view[at : at + BLOCK])) is not None


def _checked(block: bytes) -> bool:
    field = block[_SUM]
    if not _SUM_FIELD.fullmatch(field):
        return False
    told = int(field.strip(b" \0"), 8)
    rest = block[:148] + b" " * 8 + block[156:]
    total = sum(rest)
    # Some old programs added up signed bytes.
    return told == total or told == total - 256 * sum(byte > 127 for byte in rest)


def _number(field: bytes) -> int | None:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if not field.strip(b" \0"):
        return 0
    found = _OCTAL.fullmatch(field)
    return int(found[1], 8) if found else None


def is_regular(header: Header) -> bool:
    """Whether a member is a file."""
    return header.kind in _REGULAR


def pax_records(data: Buffer) -> dict[bytes, bytes] | None:
    """Return the values of a PAX header by their names; None: it is not one."""
    text = bytes(data)
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(text) and text[at]:
        space = text.find(b" ", at, at + 21)
        if space < 0 or not _DIGITS.fullmatch(text, at, space):
            return None
        stop = at + int(text[at:space])
        name, equals, value = text[space + 1 : stop - 1].partition(b"=")
        if stop > len(text) or stop <= space + 1 or not equals or text[stop - 1] != 10:
            return None
        found[name] = value
        at = stop
    return found


def pax_size(text: bytes) -> int | None:
    """Return the size that a PAX header says; None: it is no number."""
    return int(text) if _DIGITS.fullmatch(text) else None


def split_name(name: str) -> tuple[str, str] | None:
    """Return a sample's key and the extension; None: such a file belongs to no sample.

    >>> split_name("train/a.b/0001.seg.PNG"), split_name("a/.hidden"), split_name("README")
    (('train/a.b/0001', 'seg.png'), None, None)
    """
    found = _KEY.fullmatch(name)
    if found is None or not found[2] or _META.match(name.partition("/")[0]):
        return None
    return found[1], found[2].lower()
