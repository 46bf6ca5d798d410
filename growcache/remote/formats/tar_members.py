"""The members of a tar archive, one after the other: which file, of which sample, and where."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from growcache.errors import FormatError
from growcache.remote.formats.compressed import refuse_compressed
from growcache.remote.formats.tar_headers import (
    BLOCK,
    NOTES,
    Header,
    is_regular,
    padded,
    parse_header,
    pax_records,
    pax_size,
    split_name,
)
from growcache.remote.store import Entry

MOST_NOTES = 1 << 16  # bytes of long names and the like before one member
_MOST_ZEROS = 1 << 20  # bytes within an archive, or behind it
_MOST_MAP = 1 << 10  # blocks of a sparse file's map

Fetch = Callable[[int, int], Awaitable[bytes]]
"""Returns the bytes [start, stop), fewer where the object ends."""


class ChainError(FormatError):
    """Where a member should begin, none does."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive.

    Attributes:
        start: of its first header, long names included.
        data: where its content begins.
        size: of the content.
        stop: one past it, padding included.
        key: of its sample; None: it belongs to none.
        ext: its extension.
        wrong: why it cannot be read; empty where it can.
    """

    start: int
    data: int
    size: int
    stop: int
    key: str | None
    ext: str
    wrong: str


@dataclass(slots=True)
class _Notes:
    """What headers before that of a member say about it."""

    name: bytes | None = None
    size: int | None = None
    sparse: bool = False
    wrong: list[str] = field(default_factory=list)


async def member_at(fetch: Fetch, entry: Entry, at: int, *, certain: bool) -> Member | None:
    """Return the member whose headers begin at a place, or behind zeros there; None: none does.

    Args:
        fetch: the bytes of the archive.
        entry: of the object.
        at: where.
        certain: whether it is known that this is no content of another member.

    Raises:
        ChainError: something else is there.
    """
    start = await _past_zeros(fetch, entry, at, certain)
    if start is None:
        return None
    notes, at = _Notes(), start
    while (header := await _header(fetch, entry, at)).kind in NOTES:
        if at + BLOCK + padded(header.size) - start > MOST_NOTES:
            raise ChainError(
                f"{entry.key}: the member at byte {start:,} has a name, or attributes, of more "
                f"than {MOST_NOTES:,} bytes"
            )
        content = await fetch(at + BLOCK, at + BLOCK + header.size)
        _note(notes, header, content)
        at += BLOCK + padded(header.size)
    data = await _past_map(fetch, header, at)
    return _member(entry, start, data, header, notes)


async def _header(fetch: Fetch, entry: Entry, at: int) -> Header:
    block = await fetch(at, at + BLOCK)
    header = parse_header(block)
    if header is None:
        raise no_member(entry, at, block)
    return header


async def _past_zeros(fetch: Fetch, entry: Entry, at: int, certain: bool) -> int | None:
    """Return where zeros end, with which an archive does; None: with them the object does."""
    first = at
    while at < entry.size:
        block = await fetch(at, at + BLOCK)
        if block.strip(b"\0") or (at == first and len(block) < BLOCK):
            break
        at += BLOCK
        if at - first > _MOST_ZEROS:
            raise ChainError(
                f"{entry.key}: expected a member at byte {first:,} of {entry.size:,}, found "
                f"{_MOST_ZEROS:,} zeros"
            )
    if at >= entry.size:
        return None
    if at > first and not certain:
        raise ChainError(
            f"{entry.key}: an archive ends at byte {first:,} of {entry.size:,}: a member is a "
            "tar archive itself, or several were put together; set index: true in "
            "source.options"
        )
    return at


def _note(notes: _Notes, header: Header, content: bytes) -> None:
    if header.kind == b"L":
        notes.name = content.partition(b"\0")[0]
    if header.kind not in b"xX":
        return
    records = pax_records(content)
    if records is None:
        notes.wrong.append("its PAX header is none")
        return
    notes.sparse |= any(name.startswith(b"GNU.sparse.") for name in records)
    notes.name = records.get(b"GNU.sparse.name", records.get(b"path", notes.name))
    if b"size" in records:
        notes.size = pax_size(records[b"size"])
        if notes.size is None:
            notes.wrong.append("its PAX header has a size that is no number")


async def _past_map(fetch: Fetch, header: Header, at: int) -> int:
    """Return where the content begins: a sparse file's map may go on for blocks."""
    at += BLOCK
    more = header.more
    for _ in range(_MOST_MAP if more else 0):  # the chain breaks behind a longer one
        block = await fetch(at, at + BLOCK)
        at += BLOCK
        if len(block) < BLOCK or not block[504]:
            break
    return at


def _member(entry: Entry, start: int, data: int, header: Header, notes: _Notes) -> Member:
    regular = is_regular(header)
    size = header.size if notes.size is None or not regular else notes.size
    name = (header.name if notes.name is None else notes.name).decode(
        "utf-8", "backslashreplace"
    )
    split = split_name(name) if regular else None
    if notes.sparse or header.kind == b"S":
        notes.wrong.append("it is a sparse file")
    if data + size > entry.size:
        left = max(0, entry.size - data)
        notes.wrong.append(f"expected {size:,} bytes, found {left:,}: the archive is cut off")
    stop = min(entry.size, data + padded(size))
    key, ext = split or (None, "")
    return Member(start, data, size, stop, key, ext, "; ".join(notes.wrong))


def no_member(entry: Entry, at: int, found: bytes) -> ChainError:
    """Return what is said where no member begins."""
    if not at:
        refuse_compressed(entry, found)
    what = f"{found[:12]!r}" if len(found) == BLOCK else f"{len(found)} bytes: it is cut off"
    return ChainError(
        f"{entry.key}: expected the header of a tar archive's member at byte {at:,} of "
        f"{entry.size:,}, found {what}"
    )
