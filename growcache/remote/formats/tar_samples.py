"""The samples of a tar archive, by byte range or by an index.

A sample is the members that follow one another with one key. Where an archive is cut into blocks,
a sample belongs to the block in which the member *before* it begins, and the first one to the first
block: so a block needs to know no key that stands before it. The first member of a block is
found by the checksum of its header. What is a tar archive within another one can imitate that; who
has such members, or several archives put together, walks from header to header (`Index`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from growcache.errors import FormatError
from growcache.remote.formats.kept import Asked
from growcache.remote.formats.objects import Reader
from growcache.remote.formats.records import Window
from growcache.remote.formats.tar_borders import BEHIND, Following, back_from, first_member
from growcache.remote.formats.tar_headers import BLOCK, is_header
from growcache.remote.formats.tar_members import ChainError, Member, member_at
from growcache.remote.store import Entry

SMALL = 1 << 18  # bytes; such an object is read from its start, whatever part is asked for
_MOST_AHEAD = 1 << 22
_WALK = 1 << 13  # bytes of a read while walking: headers of small members come together
_MOST_WALK = 1 << 20
_KEPT = 1 << 25  # bytes of the indexes that are remembered


@dataclass(frozen=True, slots=True)
class Packed:
    """A sample as it lies in an archive.

    Attributes:
        key: what the names of its members have in common.
        members: of it, in their order.
        contents: of the members, as they are.
    """

    key: str
    members: tuple[Member, ...]
    contents: tuple[memoryview, ...]

    @property
    def start(self) -> int:
        """Where its first member begins."""
        return self.members[0].start

    @property
    def stop(self) -> int:
        """Where its last member ends."""
        return self.members[-1].stop


@dataclass(frozen=True, slots=True)
class Found:
    """The samples of a block, and what ended the search for more, if anything was wrong."""

    samples: list[Packed]
    wrong: ChainError | None = None


class Blocks:
    """Finds samples by byte range; remembers how long they are, to read as little as it can."""

    def __init__(self) -> None:
        self._ahead = 1 << 15  # behind a block; no result depends on it

    async def between(self, reader: Reader, start: int, stop: int) -> Found:
        """Return the samples behind whose preceding member begins in [start, stop).

        Raises:
            FormatError: more than a sampler can hold.
        """
        if start >= stop:
            return Found([])
        small = reader.entry.size <= SMALL
        window = Window(reader, 0 if small else back_from(start, BEHIND))
        await window.reach(reader.entry.size if small else stop + self._ahead)
        first: int | None = 0
        certain = small or not start
        try:
            if not certain:
                first = await first_member(window, reader.entry, start, stop)
            if first is None:
                return Found([])
        except ChainError as error:
            return Found([], error)
        members, wrong = await self._walk(reader, window, first, stop, certain=certain)
        owned = _owned(members, start, stop, first=first)
        samples = [packed(window, run) for run in owned]
        if samples:
            average = (samples[-1].stop - samples[0].start) // len(samples)
            self._ahead = min(_MOST_AHEAD, 2 * average + BLOCK)
        if not small:
            wrong = wrong or _look_alikes(window, reader.entry, members, stop - start)
        return Found(samples, wrong)

    async def _walk(
        self, reader: Reader, window: Window, first: int, stop: int, *, certain: bool
    ) -> tuple[list[Member], ChainError | None]:
        """Return the members of samples until the last sample of the block is complete."""
        entry, at = reader.entry, first
        fetch = Following(window, self._ahead)
        members: list[Member] = []
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
        except ChainError as error:
            # What the damage follows may not be all of its sample.
            return list(_without_last(members)), error
        await window.reach(max((m.stop for m in members if not m.wrong), default=0))
        return members, None


def packed(window: Window, members: Sequence[Member]) -> Packed:
    """Return a sample with what the window holds of it."""
    begin = window.start
    contents = (window.view[m.data - begin : m.data + m.size - begin] for m in members)
    return Packed(members[0].key or "", tuple(members), tuple(contents))


def _runs(members: Sequence[Member]) -> list[list[Member]]:
    return [list(run) for _, run in itertools.groupby(members, lambda member: member.key)]


def _without_last(members: Sequence[Member]) -> list[Member]:
    return [member for run in _runs(members)[:-1] for member in run]


def _owned(
    members: Sequence[Member], start: int, stop: int, *, first: int
) -> list[list[Member]]:
    """Return the samples of a block among those that follow one another."""
    runs = _runs(members)
    owned = [
        run for before, run in itertools.pairwise(runs) if start <= before[-1].start < stop
    ]
    return runs[:1] + owned if not first and not start else owned


def _look_alikes(
    window: Window, entry: Entry, members: Sequence[Member], block: int
) -> ChainError | None:
    """Return what is said of a member in which other blocks would find members."""
    for member in members:
        if member.stop - member.start > block:
            begin, end = member.data - window.start, member.data + member.size - window.start
            if any(
                is_header(window.view[:end], at)
                for at in range(begin, min(end, len(window.view)), BLOCK)
            ):
                return ChainError(
                    f"{entry.key}: the member at byte {member.start:,} holds what looks like a "
                    "tar archive; set index: true in source.options"
                )
    return None


class Index:
    """Walks from header to header, from an object's first one on, and remembers its samples."""

    def __init__(self) -> None:
        self._known: Asked[Entry, npt.NDArray[np.int64]] = Asked(_KEPT)

    async def of(self, reader: Reader) -> npt.NDArray[np.int64]:
        """Return where each sample starts and stops.

        Raises:
            FormatError: there is no way to the end of the object.
        """

        async def ask() -> tuple[npt.NDArray[np.int64], int]:
            found = np.array(await self._walk(reader), np.int64).reshape(-1, 2)
            return found, found.nbytes + 200

        return await self._known.get(reader.entry, ask)

    async def _walk(self, reader: Reader) -> list[tuple[int, int]]:
        fetch, at = _Headers(reader), 0
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

    async def between(self, reader: Reader, start: int, stop: int) -> Found:
        """Return the samples that begin in [start, stop).

        Raises:
            FormatError: there is no way to the end of the object, or too much is asked for.
        """
        known = await self.of(reader)
        first, last = np.searchsorted(known[:, 0], [start, stop]).tolist()
        if first == last:
            return Found([])
        begin, end = int(known[first, 0]), int(known[last - 1, 1])
        window = Window(reader, begin)
        await window.reach(end)
        members = await _all(window, reader.entry, begin, end)
        return Found([packed(window, run) for run in _runs(members)])


async def _all(window: Window, entry: Entry, at: int, end: int) -> list[Member]:
    fetch = Following(window, 0)
    members = []
    while at < end and (member := await member_at(fetch, entry, at, certain=True)) is not None:
        at = member.stop
        if member.key is not None:
            members.append(member)
    return members


class _Headers:
    """Fetches headers, and reads through all that lies between them where that is little."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._step = _WALK
        self._window = Window(reader, 0)

    async def __call__(self, start: int, stop: int) -> bytes:
        window = self._window
        if start < window.start or stop > window.stop:
            near = start - window.stop < _WALK
            self._step = min(_MOST_WALK, 2 * self._step) if near else _WALK
            self._window = window = Window(self._reader, start)
            await window.reach(max(stop, start + self._step))
        return bytes(window.view[start - window.start : stop - window.start])


async def everything(reader: Reader) -> Found:
    """Return all samples of an object in memory.

    Raises:
        FormatError: more than a sampler can hold.
    """
    window = Window(reader, 0)
    await window.reach(reader.entry.size)
    members: list[Member] = []
    fetch, at = Following(window, 0), 0
    try:
        while (member := await member_at(fetch, reader.entry, at, certain=True)) is not None:
            at = member.stop
            members += [member] if member.key is not None else []
            await asyncio.sleep(0)  # others run meanwhile
    except ChainError as error:
        kept = _without_last(members)
        return Found([packed(window, run) for run in _runs(kept)], error)
    return Found([packed(window, run) for run in _runs(members)])


def refuse_nothing(reader: Reader) -> None:
    """Refuse an object without a byte: an archive has zeros at its end.

    Raises:
        FormatError: it is one.
    """
    if not reader.entry.size:
        raise FormatError(f"{reader.entry.key}: expected a tar archive, found no bytes")
