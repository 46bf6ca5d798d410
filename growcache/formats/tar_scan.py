"""Find the samples of a tar archive in a byte range, or by an index of all headers.

A sample is a run of members with the same key. It belongs to the byte range in which the member
*before* it begins, and the first sample to the first range, so that no range needs to know a
key from the range before. The first member of a range is found by the checksum of its header.
Headers with long names or attributes precede the header of a member and may begin in the range
before; then the member begins there. An archive inside a member can imitate a header;
`SampleOffsets` reads such archives by walking over all headers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from growcache.errors import FormatError
from growcache.formats.base import ObjectReader
from growcache.formats.byte_ranges import GrowingSlice
from growcache.formats.memory import SingleFlightCache
from growcache.formats.tar_headers import (
    EXTENSION_KINDS,
    MOST_EXTENSION_BYTES,
    TAR_BLOCK,
    NoMemberError,
    TarHeader,
    TarMember,
    is_header,
    member_at,
    padded,
    parse_tar_header,
)
from growcache.store.contract import Entry

LOOK_BEHIND_BYTES = 1 << 12  # before a block, with nearly all headers that go on in it


class SliceReader:
    """Fetches the requested bytes and ``more`` after them into a window."""

    def __init__(self, window: GrowingSlice, more: int) -> None:
        self._window = window
        self._more = more

    async def __call__(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), fewer at the end of the object."""
        if stop > self._window.stop:
            await self._window.extend_to(stop + self._more)
        begin = self._window.start
        return bytes(self._window.view[start - begin : stop - begin])


def block_start_before(start: int, nbytes: int) -> int:
    """Return the start of the archive's block that is ``nbytes`` before a position; at least 0."""
    return max(0, start // TAR_BLOCK * TAR_BLOCK - nbytes)


async def first_member(window: GrowingSlice, entry: Entry, start: int, stop: int) -> int | None:
    """Return where the first member in [start, stop) begins, with its first header.

    ``window`` reaches from ``block_start_before(start, LOOK_BEHIND_BYTES)`` to ``stop``, and may grow.

    Raises:
        NoMemberError: it begins before, and does not end well.
    """
    for at in range(padded(start), stop, TAR_BLOCK):
        if is_header(window.view, at - window.start):
            begin = await _first_header(
                window, at, block_start_before(start, MOST_EXTENSION_BYTES)
            )
            if begin >= start:
                return begin
            # What was found is the end of its headers, whose beginning is in the block before.
            member = await member_at(
                SliceReader(window, TAR_BLOCK), entry, begin, certain=False
            )
            following = entry.size if member is None else member.stop
            return following if following < stop else None
    return None


async def _first_header(window: GrowingSlice, at: int, least: int) -> int:
    """Return where the headers begin of which one is here."""
    while (noted := await _extension_before(window, at, least)) is not None:
        at = noted
    return at


async def _extension_before(window: GrowingSlice, at: int, least: int) -> int | None:
    """Return where an extension header of the one here is, not before ``least``."""
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
    """Return the last header before a position, and its position."""
    view, begin = window.view, window.start
    for start in range(at - TAR_BLOCK, max(begin, at - MOST_EXTENSION_BYTES) - 1, -TAR_BLOCK):
        if is_header(view, start - begin):
            header = parse_tar_header(bytes(view[start - begin : start - begin + TAR_BLOCK]))
            return None if header is None else (start, header)
    return None


def _may_have_extension(window: GrowingSlice, at: int) -> bool:
    """Whether the bytes before a position, without a header, can end an extension.

    A long name has zeros only behind it, and attributes are lines. The content of members mostly
    has zeros and ends otherwise, so that no more must be read.
    """
    if at - window.start >= MOST_EXTENSION_BYTES:
        return False
    text = bytes(window.view[: at - window.start]).rstrip(b"\0")
    return b"\0" not in text or text.endswith(b"\n")


READ_WHOLE_BYTES = 1 << 18  # an object as small is read from its start, whatever the part
_MOST_READ_AHEAD = 1 << 22
_WALK_BYTES = 1 << 13  # bytes of a read while walking: headers of small members come together
_MOST_WALK_BYTES = 1 << 20
_KEPT_BYTES = 1 << 25  # bytes of the indexes that are remembered


@dataclass(frozen=True, slots=True)
class TarSample:
    """A sample as it is stored in an archive."""

    key: str  # what the names of its members have in common
    members: tuple[TarMember, ...]  # in their order
    contents: tuple[memoryview, ...]  # of the members

    @property
    def start(self) -> int:
        return self.members[0].start

    @property
    def stop(self) -> int:
        return self.members[-1].stop


@dataclass(frozen=True, slots=True)
class TarSamples:
    """The samples of a block, and the error that ended the search, if any."""

    samples: list[TarSample]
    error: NoMemberError | None = None


class SampleScan:
    """Finds samples by byte range; learns how long they are, to read as little as it can."""

    def __init__(self) -> None:
        self._ahead = 1 << 15  # behind a block; no result depends on it

    async def samples_in(self, reader: ObjectReader, start: int, stop: int) -> TarSamples:
        """Return the samples behind a member that begins in [start, stop)."""
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
        """Return the members up to the end of the block's last sample."""
        entry, at = reader.entry, first
        fetch = SliceReader(window, self._ahead)
        members: list[TarMember] = []
        behind = 0  # samples that begin behind the last member that begins in the block
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
            # What the damage follows may not be all of its sample.
            return list(_without_last_run(members)), error
        await window.extend_to(max((m.stop for m in members if not m.error), default=0))
        return members, None


def sample_of_members(window: GrowingSlice, members: Sequence[TarMember]) -> TarSample:
    """Return a sample with the contents that the window holds."""
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
    """Return the samples of a block among consecutive ones."""
    runs = _member_runs(members)
    owned = [
        run for before, run in itertools.pairwise(runs) if start <= before[-1].start < stop
    ]
    return runs[:1] + owned if not first and not start else owned


def _look_alike_error(
    window: GrowingSlice, entry: Entry, members: Sequence[TarMember], block: int
) -> NoMemberError | None:
    """Return the error of a member in which other blocks would find members."""
    for member in members:
        if member.stop - member.start > block:
            begin, end = member.data - window.start, member.data + member.size - window.start
            if any(
                is_header(window.view[:end], at)
                for at in range(begin, min(end, len(window.view)), TAR_BLOCK)
            ):
                return NoMemberError(
                    f"{entry.key}: the member at byte {member.start:,} holds what looks like a "
                    "tar archive; set index: true in source.options"
                )
    return None


class SampleOffsets:
    """Walks from header to header of an object, and keeps the offsets of its samples."""

    def __init__(self) -> None:
        self._known: SingleFlightCache[Entry, npt.NDArray[np.int64]] = SingleFlightCache(
            _KEPT_BYTES
        )

    async def offsets(self, reader: ObjectReader) -> npt.NDArray[np.int64]:
        """Return the [start, stop) of each sample."""

        async def ask() -> tuple[npt.NDArray[np.int64], int]:
            found = np.array(await self._walk(reader), np.int64).reshape(-1, 2)
            return found, found.nbytes + 200

        return await self._known.get(reader.entry, ask)

    async def _walk(self, reader: ObjectReader) -> list[tuple[int, int]]:
        fetch, at = _HeaderReader(reader), 0
        found: list[tuple[int, int]] = []
        key: str | None = None
        while (member := await member_at(fetch, reader.entry, at, certain=True)) is not None:
            at = member.stop
            if member.key is None:
                continue
            if member.key == key:
                found[-1] = (found[-1][0], member.stop)
            else:
                found.append((member.start, member.stop))
            key = member.key
        return found

    async def samples_in(self, reader: ObjectReader, start: int, stop: int) -> TarSamples:
        """Return the samples that begin in [start, stop)."""
        known = await self.offsets(reader)
        first, last = np.searchsorted(known[:, 0], [start, stop]).tolist()
        if first == last:
            return TarSamples([])
        begin, end = int(known[first, 0]), int(known[last - 1, 1])
        window = GrowingSlice(reader, begin)
        await window.extend_to(end)
        members = await _members_between(window, reader.entry, begin, end)
        return TarSamples([sample_of_members(window, run) for run in _member_runs(members)])


async def _members_between(
    window: GrowingSlice, entry: Entry, at: int, end: int
) -> list[TarMember]:
    fetch = SliceReader(window, 0)
    members = []
    while at < end and (member := await member_at(fetch, entry, at, certain=True)) is not None:
        at = member.stop
        if member.key is not None:
            members.append(member)
    return members


class _HeaderReader:
    """Fetches headers, and reads through short content between them."""

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
    fetch, at = SliceReader(window, 0), 0
    try:
        while (member := await member_at(fetch, reader.entry, at, certain=True)) is not None:
            at = member.stop
            members += [member] if member.key is not None else []
            await asyncio.sleep(0)  # others run meanwhile
    except NoMemberError as error:
        kept = _without_last_run(members)
        return TarSamples([sample_of_members(window, run) for run in _member_runs(kept)], error)
    return TarSamples([sample_of_members(window, run) for run in _member_runs(members)])


def refuse_empty_object(reader: ObjectReader) -> None:
    """Refuse an object without a byte, because an archive ends with zeros."""
    if not reader.entry.size:
        raise FormatError(f"{reader.entry.key}: expected a tar archive, found no bytes")
