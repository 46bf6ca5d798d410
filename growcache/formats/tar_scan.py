"""Find the samples of a tar archive in a byte range, or from an index of all headers.

A sample is a sequence of members with the same key. It belongs to the byte range in which the
member *before* it starts. The first sample belongs to the first range. So no range needs a key
from the range before it.

The first member of a range is found by the checksum of its header. A member with a long name or
attributes starts with their headers, which may be in the range before. An archive inside a
member can imitate a header. `SampleOffsets` therefore reads all headers instead.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from growcache.errors import FormatError
from growcache.formats.base import ObjectReader
from growcache.formats.byte_ranges import GrowingSlice
from growcache.formats.compressed import refuse_compressed
from growcache.formats.memory import SingleFlightCache
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer


TAR_BLOCK = 512
EXTENSION_KINDS = b"xgXLK"  # headers whose content describes the next member
_DATALESS = b"123456"  # links, devices, folders: no content follows, whatever their size says
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
    size: int  # of the content
    map_continues: bool  # whether more blocks of a sparse file's map follow


def padded(size: int) -> int:
    """Return a size rounded up to whole blocks.

    >>> padded(0), padded(1), padded(512)
    (0, 512, 512)
    """
    return -(-size // TAR_BLOCK) * TAR_BLOCK


def parse_tar_header(block: bytes) -> TarHeader | None:
    if len(block) < TAR_BLOCK or not _has_right_checksum(block):
        return None
    size = _header_number(block[124:136])
    if size is None:
        return None
    kind = block[156:157]
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name  # GNU's dialect has times there
    if kind == b"\0" and name.endswith(b"/"):
        kind = b"5"  # the oldest archives mark folders like this
    return TarHeader(
        kind, name, 0 if kind in _DATALESS else size, kind == b"S" and block[482] > 0
    )


def is_header(view: memoryview, at: int) -> bool:
    if at + TAR_BLOCK > len(view) or view[at + 155] not in b" \0":
        return False
    return parse_tar_header(bytes(view[at : at + TAR_BLOCK])) is not None


def _has_right_checksum(block: bytes) -> bool:
    field = block[_SUM]
    if not _SUM_FIELD.fullmatch(field):
        return False
    claimed = int(field.strip(b" \0"), 8)
    summed = block[:148] + b" " * 8 + block[156:]
    total = sum(summed)
    # Some old programs summed signed bytes.
    return claimed == total or claimed == total - 256 * sum(byte > 127 for byte in summed)


def _header_number(field: bytes) -> int | None:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if not field.strip(b" \0"):
        return 0
    found = _OCTAL.fullmatch(field)
    return int(found[1], 8) if found else None


def pax_records(data: Buffer) -> dict[bytes, bytes] | None:
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


def sample_key_and_extension(name: str) -> tuple[str, str] | None:
    """Return the key and the extension in a name, or None for a file that belongs to no sample.

    >>> sample_key_and_extension("train/a.b/0001.seg.PNG")
    ('train/a.b/0001', 'seg.png')
    >>> sample_key_and_extension("a/.hidden"), sample_key_and_extension("README")
    (None, None)
    """
    found = _SAMPLE_NAME.fullmatch(name)
    if found is None or not found[2] or _META_NAME.match(name.partition("/")[0]):
        return None
    return found[1], found[2].lower()


MOST_EXTENSION_BYTES = 1 << 16  # of long names and attributes before one member
_MOST_ZEROS = 1 << 20  # in an archive, or after it
_MOST_MAP_BLOCKS = 1 << 10  # blocks of a sparse file's map

ReadBytes = Callable[[int, int], Awaitable[bytes]]
"""Returns the bytes [start, stop), or fewer at the end of the object."""


class NoMemberError(FormatError):
    """No member starts at the expected place."""


@dataclass(frozen=True, slots=True)
class TarMember:
    start: int  # first header, including long names
    data: int  # first byte of its content
    size: int  # of the content
    stop: int  # one past the content and its padding
    key: str | None  # of its sample; None: of no sample
    ext: str  # its extension
    error: str  # why it cannot be read, or empty


@dataclass(slots=True)
class _Extensions:
    name: bytes | None = None
    size: int | None = None
    sparse: bool = False
    error: list[str] = field(default_factory=list)


async def member_at(
    fetch: ReadBytes, entry: Entry, at: int, *, certain: bool
) -> TarMember | None:
    """Return the member at a place, or None at the end of the archive.

    ``certain`` means that the place is not inside another member's content.
    """
    start = await _past_zeros(fetch, entry, at, certain)
    if start is None:
        return None
    notes, at = _Extensions(), start
    while (header := await _read_header(fetch, entry, at)).kind in EXTENSION_KINDS:
        if at + TAR_BLOCK + padded(header.size) - start > MOST_EXTENSION_BYTES:
            raise NoMemberError(
                f"{entry.key}: the member at byte {start:,} has a name, or attributes, of more "
                f"than {MOST_EXTENSION_BYTES:,} bytes",
                code="GC305",
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
    first = at
    while at < entry.size:
        block = await fetch(at, at + TAR_BLOCK)
        if block.strip(b"\0") or (at == first and len(block) < TAR_BLOCK):
            break
        at += TAR_BLOCK
        if at - first > _MOST_ZEROS:
            raise NoMemberError(
                f"{entry.key}: expected a member at byte {first:,} of {entry.size:,}, found "
                f"{_MOST_ZEROS:,} zeros",
                code="GC303",
            )
    if at >= entry.size:
        return None
    if at > first and not certain:
        raise NoMemberError(
            f"{entry.key}: an archive ends at byte {first:,} of {entry.size:,}: a member is a "
            "tar archive itself, or several archives were concatenated; set index: true in "
            "source.options",
            code="GC303",
        )
    return at


def _apply_extension(notes: _Extensions, header: TarHeader, content: bytes) -> None:
    if header.kind == b"L":
        notes.name = content.partition(b"\0")[0]
    if header.kind not in b"xX":
        return
    records = pax_records(content)
    if records is None:
        notes.error.append("its PAX header is not valid")
        return
    notes.sparse |= any(name.startswith(b"GNU.sparse.") for name in records)
    notes.name = records.get(b"GNU.sparse.name", records.get(b"path", notes.name))
    if b"size" in records:
        if _DIGITS.fullmatch(records[b"size"]):
            notes.size = int(records[b"size"])
        else:
            notes.error.append("its PAX header has a size that is not a number")


async def _past_map(fetch: ReadBytes, header: TarHeader, at: int) -> int:
    """Return the place after a sparse file's map, which may have several blocks."""
    at += TAR_BLOCK
    # A longer map breaks the chain.
    for _ in range(_MOST_MAP_BLOCKS if header.map_continues else 0):
        block = await fetch(at, at + TAR_BLOCK)
        at += TAR_BLOCK
        if len(block) < TAR_BLOCK or not block[504]:
            break
    return at


def _described_member(
    entry: Entry, start: int, data: int, header: TarHeader, notes: _Extensions
) -> TarMember:
    regular = header.kind in _REGULAR
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


LOOK_BEHIND_BYTES = 1 << 12  # before a block, for nearly all headers that continue in it


class SliceReader:
    """Reads a growing window. It fetches the requested bytes and ``more`` after them."""

    def __init__(self, window: GrowingSlice, more: int) -> None:
        self._window = window
        self._more = more

    async def __call__(self, start: int, stop: int) -> bytes:
        if stop > self._window.stop:
            await self._window.extend_to(stop + self._more)
        begin = self._window.start
        return bytes(self._window.view[start - begin : stop - begin])


def block_start_before(start: int, nbytes: int) -> int:
    return max(0, start // TAR_BLOCK * TAR_BLOCK - nbytes)


async def first_member(window: GrowingSlice, entry: Entry, start: int, stop: int) -> int | None:
    """Return the place of the first headers of the first member in [start, stop), or None.

    ``window`` extends from ``block_start_before(start, LOOK_BEHIND_BYTES)`` to ``stop``, and
    may grow.
    """
    for at in range(padded(start), stop, TAR_BLOCK):
        if is_header(window.view, at - window.start):
            begin = await _first_header(
                window, at, block_start_before(start, MOST_EXTENSION_BYTES)
            )
            if begin >= start:
                return begin
            member = await member_at(
                SliceReader(window, TAR_BLOCK), entry, begin, certain=False
            )
            following = entry.size if member is None else member.stop
            return following if following < stop else None
    return None


async def _first_header(window: GrowingSlice, at: int, least: int) -> int:
    while (noted := await _extension_before(window, at, least)) is not None:
        at = noted
    return at


async def _extension_before(window: GrowingSlice, at: int, least: int) -> int | None:
    """Return the place of the extension header before the header at ``at``, not before ``least``."""
    found = _nearest_header(window, at)
    if found is None and least < window.start and _may_have_extension(window, at):
        await window.extend_back_to(least)
        found = _nearest_header(window, at)
    if found is None:
        return None
    start, header = found
    ends = start + TAR_BLOCK + padded(header.size) == at
    return start if header.kind in EXTENSION_KINDS and ends else None


def _nearest_header(window: GrowingSlice, at: int) -> tuple[int, TarHeader] | None:
    view, begin = window.view, window.start
    for start in range(at - TAR_BLOCK, max(begin, at - MOST_EXTENSION_BYTES) - 1, -TAR_BLOCK):
        if is_header(view, start - begin):
            header = parse_tar_header(bytes(view[start - begin : start - begin + TAR_BLOCK]))
            return None if header is None else (start, header)
    return None


def _may_have_extension(window: GrowingSlice, at: int) -> bool:
    """Whether the bytes before a position, which have no header, can be the end of an extension.

    A long name has zeros only at its end, and attributes are lines. The content of members
    usually has zeros and other ends, so nothing more has to be read.
    """
    if at - window.start >= MOST_EXTENSION_BYTES:
        return False
    text = bytes(window.view[: at - window.start]).rstrip(b"\0")
    return b"\0" not in text or text.endswith(b"\n")


READ_WHOLE_BYTES = 1 << 18  # a smaller object is read from its start, whatever the part
_MOST_READ_AHEAD = 1 << 22
_WALK_BYTES = 1 << 13  # of a read while walking, which covers several headers of small members
_MOST_WALK_BYTES = 1 << 20
_KEPT_BYTES = 1 << 25  # of the remembered indexes


@dataclass(frozen=True, slots=True)
class TarSample:
    key: str  # common part of its members' names
    members: tuple[TarMember, ...]  # in order
    contents: tuple[memoryview, ...]  # of the members

    @property
    def start(self) -> int:
        return self.members[0].start

    @property
    def stop(self) -> int:
        return self.members[-1].stop


@dataclass(frozen=True, slots=True)
class TarSamples:
    samples: list[TarSample]
    error: NoMemberError | None = None  # error that ended the search


class SampleScan:
    def __init__(self) -> None:
        self._ahead = 1 << 15  # bytes read after a block; no result depends on it

    async def samples_in(self, reader: ObjectReader, start: int, stop: int) -> TarSamples:
        """Return the samples after members that start in [start, stop)."""
        if start >= stop:
            return TarSamples([])
        small = reader.entry.size <= READ_WHOLE_BYTES
        window = GrowingSlice(
            reader, 0 if small else block_start_before(start, LOOK_BEHIND_BYTES)
        )
        await window.extend_to(reader.entry.size if small else stop + self._ahead)
        first: int | None = 0
        certain = small or not start
        try:
            if not certain:
                first = await first_member(window, reader.entry, start, stop)
            if first is None:
                return TarSamples([])
        except NoMemberError as error:
            return TarSamples([], error)
        members, wrong = await self._walk(reader, window, first, stop, certain=certain)
        owned = _owned_runs(members, start, stop, first=first)
        samples = [sample_of_members(window, run) for run in owned]
        if samples:
            average = (samples[-1].stop - samples[0].start) // len(samples)
            self._ahead = min(_MOST_READ_AHEAD, 2 * average + TAR_BLOCK)
        if not small:
            wrong = wrong or _look_alike_error(window, reader.entry, members, stop - start)
        return TarSamples(samples, wrong)

    async def _walk(
        self,
        reader: ObjectReader,
        window: GrowingSlice,
        first: int,
        stop: int,
        *,
        certain: bool,
    ) -> tuple[list[TarMember], NoMemberError | None]:
        entry, at = reader.entry, first
        fetch = SliceReader(window, self._ahead)
        members: list[TarMember] = []
        behind = 0  # samples that start after the last member of the block
        try:
            while (member := await member_at(fetch, entry, at, certain=certain)) is not None:
                at = member.stop
                if member.key is not None:
                    begins = not members or member.key != members[-1].key
                    behind += begins and member.start >= stop
                    members.append(member)
                if behind == 2:
                    members.pop()
                    break
                if at >= stop and not members and first:
                    break
        except NoMemberError as error:
            # The sample before the damage may be incomplete.
            return _without_last_run(members), error
        await window.extend_to(max((m.stop for m in members if not m.error), default=0))
        return members, None


def sample_of_members(window: GrowingSlice, members: Sequence[TarMember]) -> TarSample:
    begin = window.start
    contents = (window.view[m.data - begin : m.data + m.size - begin] for m in members)
    return TarSample(members[0].key or "", tuple(members), tuple(contents))


def _member_runs(members: Sequence[TarMember]) -> list[list[TarMember]]:
    return [list(run) for _, run in itertools.groupby(members, lambda member: member.key)]


def _without_last_run(members: Sequence[TarMember]) -> list[TarMember]:
    return [member for run in _member_runs(members)[:-1] for member in run]


def _owned_runs(
    members: Sequence[TarMember], start: int, stop: int, *, first: int
) -> list[list[TarMember]]:
    runs = _member_runs(members)
    owned = [
        run for before, run in itertools.pairwise(runs) if start <= before[-1].start < stop
    ]
    return runs[:1] + owned if not first and not start else owned


def _look_alike_error(
    window: GrowingSlice, entry: Entry, members: Sequence[TarMember], block: int
) -> NoMemberError | None:
    for member in members:
        if member.stop - member.start > block:
            begin, end = member.data - window.start, member.data + member.size - window.start
            if any(
                is_header(window.view[:end], at)
                for at in range(begin, min(end, len(window.view)), TAR_BLOCK)
            ):
                return NoMemberError(
                    f"{entry.key}: the member at byte {member.start:,} holds what looks like a "
                    "tar archive; set index: true in source.options",
                    code="GC303",
                )
    return None


class SampleOffsets:
    def __init__(self) -> None:
        self._known: SingleFlightCache[Entry, npt.NDArray[np.int64]] = SingleFlightCache(
            _KEPT_BYTES
        )

    async def offsets(self, reader: ObjectReader) -> npt.NDArray[np.int64]:
        """Return the bytes [start, stop) of each sample."""

        async def ask() -> tuple[npt.NDArray[np.int64], int]:
            found = np.array(await self._walk(reader), np.int64).reshape(-1, 2)
            return found, found.nbytes + 200

        return await self._known.get(reader.entry, ask)

    async def _walk(self, reader: ObjectReader) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        key: str | None = None
        async for member in _members(_HeaderReader(reader), reader.entry, 0, reader.entry.size):
            if member.key == key:
                found[-1] = (found[-1][0], member.stop)
            else:
                found.append((member.start, member.stop))
            key = member.key
        return found

    async def samples_in(self, reader: ObjectReader, start: int, stop: int) -> TarSamples:
        known = await self.offsets(reader)
        first, last = np.searchsorted(known[:, 0], [start, stop]).tolist()
        if first == last:
            return TarSamples([])
        begin, end = int(known[first, 0]), int(known[last - 1, 1])
        window = GrowingSlice(reader, begin)
        await window.extend_to(end)
        members = [m async for m in _members(SliceReader(window, 0), reader.entry, begin, end)]
        return TarSamples([sample_of_members(window, run) for run in _member_runs(members)])


async def _members(
    fetch: ReadBytes, entry: Entry, at: int, stop: int
) -> AsyncIterator[TarMember]:
    while at < stop and (member := await member_at(fetch, entry, at, certain=True)) is not None:
        at = member.stop
        if member.key is not None:
            yield member


class _HeaderReader:
    """Reads headers, and skips long content between them."""

    def __init__(self, reader: ObjectReader) -> None:
        self._reader = reader
        self._step = _WALK_BYTES
        self._window = GrowingSlice(reader, 0)

    async def __call__(self, start: int, stop: int) -> bytes:
        window = self._window
        if start < window.start or stop > window.stop:
            near = start - window.stop < _WALK_BYTES
            self._step = min(_MOST_WALK_BYTES, 2 * self._step) if near else _WALK_BYTES
            self._window = window = GrowingSlice(self._reader, start)
            await window.extend_to(max(stop, start + self._step))
        return bytes(window.view[start - window.start : stop - window.start])


async def all_samples(reader: ObjectReader) -> TarSamples:
    window = GrowingSlice(reader, 0)
    await window.extend_to(reader.entry.size)
    members: list[TarMember] = []
    wrong = None
    fetch = SliceReader(window, 0)
    try:
        async for member in _members(fetch, reader.entry, 0, reader.entry.size):
            members.append(member)
            await asyncio.sleep(0)  # so that other tasks run
    except NoMemberError as error:
        members, wrong = _without_last_run(members), error
    return TarSamples([sample_of_members(window, run) for run in _member_runs(members)], wrong)


def refuse_empty_object(reader: ObjectReader) -> None:
    """Refuse an object without bytes. Even an archive without members ends with zeros."""
    if not reader.entry.size:
        raise FormatError(f"{reader.entry.key}: expected a tar archive, found no bytes")
