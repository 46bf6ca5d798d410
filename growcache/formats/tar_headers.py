"""Parse tar headers of every dialect, and read the member that they describe."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from growcache.errors import FormatError
from growcache.formats.compressed import refuse_compressed
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer


TAR_BLOCK = 512
EXTENSION_KINDS = b"xgXLK"  # types of headers whose content is about the member that follows
_DATALESS = b"123456"  # links, devices, folders: their size is of nothing that is stored here
_REGULAR = b"0\x007S"
_SUM = slice(148, 156)
_OCTAL = re.compile(rb"[ \0]*([0-7]+)[ \0]*")
_SUM_FIELD = re.compile(rb" *[0-7]+[ \0]+")
_DIGITS = re.compile(rb"[0-9]{1,20}")
_SAMPLE_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_META_NAME = re.compile(r"__[^/]*__")


@dataclass(frozen=True, slots=True)
class TarHeader:
    kind: bytes  # one byte
    name: bytes
    size: int  # of the content, bytes
    map_continues: bool  # whether further blocks of a sparse file's map follow


def padded(size: int) -> int:
    """Return how many bytes content of a size takes.

    >>> padded(0), padded(1), padded(512)
    (0, 512, 512)
    """
    return -(-size // TAR_BLOCK) * TAR_BLOCK


def parse_tar_header(block: bytes) -> TarHeader | None:
    """Return the header in a block; None where its checksum is not that of a header."""
    if len(block) < TAR_BLOCK or not _has_right_checksum(block):
        return None
    size = _header_number(block[124:136])
    if size is None:
        return None
    kind = block[156:157]
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name  # what GNU's own dialect has there are times
    if kind == b"\0" and name.endswith(b"/"):
        kind = b"5"  # so the oldest archives have folders
    return TarHeader(
        kind, name, 0 if kind in _DATALESS else size, kind == b"S" and block[482] > 0
    )


def is_header(view: memoryview, at: int) -> bool:
    """Whether a block is a header; quick where it is none."""
    if at + TAR_BLOCK > len(view) or view[at + 155] not in b" \0":
        return False
    return parse_tar_header(bytes(view[at : at + TAR_BLOCK])) is not None


def _has_right_checksum(block: bytes) -> bool:
    field = block[_SUM]
    if not _SUM_FIELD.fullmatch(field):
        return False
    told = int(field.strip(b" \0"), 8)
    rest = block[:148] + b" " * 8 + block[156:]
    total = sum(rest)
    # Some old programs added up signed bytes.
    return told == total or told == total - 256 * sum(byte > 127 for byte in rest)


def _header_number(field: bytes) -> int | None:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if not field.strip(b" \0"):
        return 0
    found = _OCTAL.fullmatch(field)
    return int(found[1], 8) if found else None


def is_regular(header: TarHeader) -> bool:
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
    """Return the size in a PAX header; None where it is no number."""
    return int(text) if _DIGITS.fullmatch(text) else None


def sample_key_and_extension(name: str) -> tuple[str, str] | None:
    """Return a sample's key and the extension; None: such a file belongs to no sample.

    >>> sample_key_and_extension("train/a.b/0001.seg.PNG"), sample_key_and_extension("a/.hidden"), sample_key_and_extension("README")
    (('train/a.b/0001', 'seg.png'), None, None)
    """
    found = _SAMPLE_NAME.fullmatch(name)
    if found is None or not found[2] or _META_NAME.match(name.partition("/")[0]):
        return None
    return found[1], found[2].lower()


MOST_EXTENSION_BYTES = 1 << 16  # bytes of long names and the like before one member
_MOST_ZEROS = 1 << 20  # bytes within an archive, or behind it
_MOST_MAP_BLOCKS = 1 << 10  # blocks of a sparse file's map

ReadBytes = Callable[[int, int], Awaitable[bytes]]
"""Returns the bytes [start, stop), fewer where the object ends."""


class NoMemberError(FormatError):
    """No member begins where one should."""


@dataclass(frozen=True, slots=True)
class TarMember:
    start: int  # of its first header, long names included
    data: int  # where its content begins
    size: int  # of the content
    stop: int  # one past the content, padding included
    key: str | None  # of its sample; None: of no sample
    ext: str  # its extension
    error: str  # why it cannot be read, or empty


@dataclass(slots=True)
class _Extensions:
    """What the headers before that of a member say about it."""

    name: bytes | None = None
    size: int | None = None
    sparse: bool = False
    error: list[str] = field(default_factory=list)


async def member_at(
    fetch: ReadBytes, entry: Entry, at: int, *, certain: bool
) -> TarMember | None:
    """Return the member whose headers begin at ``at``, or after zeros there; None: no member.

    ``certain`` says that this is not the content of another member.

    Raises:
        NoMemberError: something else is there.
    """
    start = await _past_zeros(fetch, entry, at, certain)
    if start is None:
        return None
    notes, at = _Extensions(), start
    while (header := await _read_header(fetch, entry, at)).kind in EXTENSION_KINDS:
        if at + TAR_BLOCK + padded(header.size) - start > MOST_EXTENSION_BYTES:
            raise NoMemberError(
                f"{entry.key}: the member at byte {start:,} has a name, or attributes, of more "
                f"than {MOST_EXTENSION_BYTES:,} bytes"
            )
        content = await fetch(at + TAR_BLOCK, at + TAR_BLOCK + header.size)
        _apply_extension(notes, header, content)
        at += TAR_BLOCK + padded(header.size)
    data = await _past_map(fetch, header, at)
    return _described_member(entry, start, data, header, notes)


async def _read_header(fetch: ReadBytes, entry: Entry, at: int) -> TarHeader:
    block = await fetch(at, at + TAR_BLOCK)
    header = parse_tar_header(block)
    if header is None:
        raise no_member_error(entry, at, block)
    return header


async def _past_zeros(fetch: ReadBytes, entry: Entry, at: int, certain: bool) -> int | None:
    """Return where the zeros at ``at`` end; None where the object ends with them."""
    first = at
    while at < entry.size:
        block = await fetch(at, at + TAR_BLOCK)
        if block.strip(b"\0") or (at == first and len(block) < TAR_BLOCK):
            break
        at += TAR_BLOCK
        if at - first > _MOST_ZEROS:
            raise NoMemberError(
                f"{entry.key}: expected a member at byte {first:,} of {entry.size:,}, found "
                f"{_MOST_ZEROS:,} zeros"
            )
    if at >= entry.size:
        return None
    if at > first and not certain:
        raise NoMemberError(
            f"{entry.key}: an archive ends at byte {first:,} of {entry.size:,}: a member is a "
            "tar archive itself, or several were put together; set index: true in "
            "source.options"
        )
    return at


def _apply_extension(notes: _Extensions, header: TarHeader, content: bytes) -> None:
    if header.kind == b"L":
        notes.name = content.partition(b"\0")[0]
    if header.kind not in b"xX":
        return
    records = pax_records(content)
    if records is None:
        notes.error.append("its PAX header is none")
        return
    notes.sparse |= any(name.startswith(b"GNU.sparse.") for name in records)
    notes.name = records.get(b"GNU.sparse.name", records.get(b"path", notes.name))
    if b"size" in records:
        notes.size = pax_size(records[b"size"])
        if notes.size is None:
            notes.error.append("its PAX header has a size that is no number")


async def _past_map(fetch: ReadBytes, header: TarHeader, at: int) -> int:
    """Return where the content begins: a sparse file's map may take several blocks."""
    at += TAR_BLOCK
    more = header.map_continues
    for _ in range(_MOST_MAP_BLOCKS if more else 0):  # the chain breaks behind a longer one
        block = await fetch(at, at + TAR_BLOCK)
        at += TAR_BLOCK
        if len(block) < TAR_BLOCK or not block[504]:
            break
    return at


def _described_member(
    entry: Entry, start: int, data: int, header: TarHeader, notes: _Extensions
) -> TarMember:
    regular = is_regular(header)
    size = header.size if notes.size is None or not regular else notes.size
    name = (header.name if notes.name is None else notes.name).decode(
        "utf-8", "backslashreplace"
    )
    split = sample_key_and_extension(name) if regular else None
    if notes.sparse or header.kind == b"S":
        notes.error.append("it is a sparse file")
    if data + size > entry.size:
        left = max(0, entry.size - data)
        notes.error.append(f"expected {size:,} bytes, found {left:,}: the archive is cut off")
    stop = min(entry.size, data + padded(size))
    key, ext = split or (None, "")
    return TarMember(start, data, size, stop, key, ext, "; ".join(notes.error))


def no_member_error(entry: Entry, at: int, found: bytes) -> NoMemberError:
    if not at:
        refuse_compressed(entry, found)
    what = (
        f"{found[:12]!r}" if len(found) == TAR_BLOCK else f"{len(found)} bytes: it is cut off"
    )
    return NoMemberError(
        f"{entry.key}: expected the header of a tar archive's member at byte {at:,} of "
        f"{entry.size:,}, found {what}"
    )
