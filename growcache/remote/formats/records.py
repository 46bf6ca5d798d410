"""The records of a TFRecord file, by byte range: a block owns those that start in it.

Their borders are found in the middle of a file by the checksum of a record's length, and by the
chain of records that follows. Bytes within a record may imitate that, as a TFRecord file does that is
itself the content of a record; but its chain breaks where it ends. So what is found is right where
no record is longer than a block; a longer one that holds look-alikes is refused, loudly, and
whoever has such records walks from head to head (`Heads`).
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from growcache.errors import FormatError
from growcache.remote.formats.ahead import Ahead
from growcache.remote.formats.compressed import refuse_compressed
from growcache.remote.formats.framing import HEAD, TAIL, heads_in, length_at, masked
from growcache.remote.formats.kept import Asked
from growcache.remote.formats.objects import LARGEST_WHOLE, Reader
from growcache.remote.store import Entry

MOST_BYTES = LARGEST_WHOLE // 2  # of a visit, or a record: what is made of it is in memory, too
SMALL = 1 << 18  # bytes; such an object is read from its start, whatever part is asked for
_MOST_AHEAD = 1 << 22
_WALK = 1 << 12  # bytes of a read while walking: many heads of small records at once
_MOST_WALK = 1 << 20
_KEPT = 1 << 25  # bytes of the heads that are remembered,
_LEAST_KEPT = _KEPT // 64  # of 64 objects at most


@dataclass(frozen=True, slots=True)
class Record:
    """A record.

    Attributes:
        start: of its head in the object.
        stop: one past its end.
        data: its content; None where its checksum is wrong.
    """

    start: int
    stop: int
    data: memoryview | None


class ChainError(Exception):
    """What should be a record is none.

    Args:
        at: where.
    """

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class Window:
    """Bytes of an object from a position on, of which more are read when they are needed."""

    def __init__(self, reader: Reader, start: int) -> None:
        self.start = start
        self._reader = reader
        self._data = bytearray()
        self.view = memoryview(b"")

    @property
    def stop(self) -> int:
        """Where it ends in the object."""
        return self.start + len(self._data)

    async def reach(self, stop: int) -> None:
        """Read on to a position, at most to the end of the object.

        Raises:
            FormatError: that is more than a sampler can hold.
        """
        entry = self._reader.entry
        stop = min(stop, entry.size)
        if stop <= self.stop:
            return
        if stop - self.start > MOST_BYTES:
            raise FormatError(
                f"{entry.key}: one visit may read {MOST_BYTES:,} bytes of records, found "
                f"{stop - self.start:,}; lower sampling.samples_per_object"
            )
        more = memoryview(await self._reader.read(self.stop, stop))
        self._data = self._data + more if self._data else bytearray(more)
        self.view = memoryview(self._data)

    async def reach_back(self, start: int) -> None:
        """Read what lies before it, too, from a position on."""
        if start < self.start:
            before = memoryview(await self._reader.read(start, self.start))
            self._data = bytearray(before) + self._data
            self.start, self.view = start, memoryview(self._data)


class Records:
    """Finds and reads records; remembers how long they are, to read as little as it can."""

    def __init__(self) -> None:
        self._ahead = Ahead(1 << 14, HEAD, _MOST_AHEAD)

    async def between(self, reader: Reader, start: int, stop: int) -> list[Record]:
        """Return the records whose heads lie in [start, stop) of an object.

        Raises:
            FormatError: there is no way from record to record.
        """
        if start >= stop:
            return []
        if reader.entry.size <= SMALL or not start:
            window = Window(reader, 0)
            whole = reader.entry.size <= SMALL
            await window.reach(reader.entry.size if whole else stop + self._ahead.nbytes)
            records = await self._certain(reader, window, reader.entry.size if whole else stop)
            return [record for record in records if start <= record.start < stop]
        window = Window(reader, start)
        await window.reach(stop + self._ahead.nbytes)
        return await self._found(reader, window, stop)

    async def _certain(self, reader: Reader, window: Window, stop: int) -> list[Record]:
        """Return the records from the first one of the object on."""
        try:
            return await self._learnt(reader, window, 0, stop)
        except ChainError as error:
            raise no_record(reader.entry, error.at, window) from None

    async def _found(self, reader: Reader, window: Window, stop: int) -> list[Record]:
        """Return the records from the first chain on that does not break."""
        entry, first = reader.entry, window.start
        broken: int | None = None
        while (at := _next_head(window, entry, first, stop)) is not None:
            if broken is not None:
                _refuse_damaged(entry, window, broken, at)
            try:
                return await self._learnt(reader, window, at, stop)
            except ChainError as error:
                if error.at >= stop:  # no record within one that fits a block
                    raise no_record(entry, error.at, window) from None
                # The chain lay within a record that reaches further, and there may be another.
                first = broken = max(error.at, at + 1)
        return []

    async def _learnt(
        self, reader: Reader, window: Window, first: int, stop: int
    ) -> list[Record]:
        records = await chain(reader, window, first, stop)
        if not records:
            return []
        self._ahead.learn([record.stop - record.start for record in records])
        for record in records:
            if record.stop - record.start > stop - window.start:
                refuse_look_alikes(reader.entry, record)
        return records


def _next_head(window: Window, entry: Entry, first: int, stop: int) -> int | None:
    """Return where the first head in [first, stop) of an object is."""
    start = window.start
    found = heads_in(window.view, first - start, stop - start, entry.size - first)
    at = next(found, None)
    return None if at is None else start + at


def _refuse_damaged(entry: Entry, window: Window, broken: int, following: int) -> None:
    """Refuse a block in which the head of a record is damaged, but not what follows the head.

    Raises:
        FormatError: it is.
    """
    begin, end = broken - window.start + HEAD, following - window.start - TAIL
    if begin > end:
        return
    (told,) = struct.unpack_from("<I", window.view, end)
    if told == masked(window.view[begin:end]):
        raise no_record(entry, broken, window)


async def chain(reader: Reader, window: Window, first: int, stop: int) -> list[Record]:
    """Return the records from ``first`` on to the last one that starts before ``stop``.

    Raises:
        ChainError: one of them, or what follows the last, is none.
        FormatError: a record is longer than a sampler can hold.
    """
    entry = reader.entry
    records: list[Record] = []
    at = first
    while at < stop:
        end = await _end_of(window, entry, at)
        await window.reach(end + HEAD)
        begin = at - window.start
        records.append(_record(window, begin, end - at))
        at = end
    if at < entry.size and length_at(window.view, at - window.start) is None:
        raise ChainError(at)
    return records


async def _end_of(window: Window, entry: Entry, at: int) -> int:
    await window.reach(at + HEAD)
    length = length_at(window.view, at - window.start)
    if length is None or at + HEAD + length + TAIL > entry.size:
        raise ChainError(at)
    return at + HEAD + length + TAIL


def _record(window: Window, begin: int, nbytes: int) -> Record:
    start = window.start + begin
    data = window.view[begin + HEAD : begin + nbytes - TAIL]
    (crc,) = struct.unpack_from("<I", window.view, begin + nbytes - TAIL)
    # A copy: the window's memory is larger, and moves when it grows.
    content = bytes(data)
    data.release()
    good = masked(memoryview(content)) == crc
    return Record(start, start + nbytes, memoryview(content) if good else None)


def refuse_look_alikes(entry: Entry, record: Record) -> None:
    """Refuse a record, longer than a block, in which blocks would find other records.

    Raises:
        FormatError: says what to set.
    """
    if record.data is None:
        return
    view = record.data
    for at in heads_in(view, 0, view.nbytes, view.nbytes):
        length = length_at(view, at) or 0
        end = at + HEAD + length
        if end + TAIL <= view.nbytes and struct.unpack_from("<I", view, end)[0] == masked(
            view[at + HEAD : end]
        ):
            raise FormatError(
                f"{entry.key}: the record at byte {record.start:,} holds what looks like "
                "records; set index: true in source.options"
            )


def no_record(entry: Entry, at: int, window: Window) -> FormatError:
    """Return what is said where there is no record."""
    found = bytes(window.view[at - window.start : at - window.start + HEAD])
    if not at:
        refuse_compressed(entry, found)
    return FormatError(
        f"{entry.key}: expected a TFRecord at byte {at:,} of {entry.size:,}, found {found!r}"
    )


class Heads:
    """Walks from head to head, from an object's first record on, and remembers the way."""

    def __init__(self) -> None:
        self._known: Asked[Entry, npt.NDArray[np.int64]] = Asked(_KEPT)

    async def of(self, reader: Reader) -> npt.NDArray[np.int64]:
        """Return where each record starts, and the end of the last.

        Raises:
            FormatError: there is no way to the end of the object.
        """

        async def ask() -> tuple[npt.NDArray[np.int64], int]:
            found = np.array([at async for at in self._walk(reader)], np.int64)
            return found, max(found.nbytes, _LEAST_KEPT)

        return await self._known.get(reader.entry, ask)

    async def _walk(self, reader: Reader) -> AsyncIterator[int]:
        entry, at, step = reader.entry, 0, _WALK
        window = Window(reader, 0)
        while at < entry.size:
            if at + HEAD > window.stop:
                near = at - window.stop < _WALK  # small records: read through all of them
                step = min(_MOST_WALK, 2 * step) if near else _WALK
                window = Window(reader, at)
                await window.reach(at + (step if near else HEAD))
            yield at
            try:
                at = await _end_of(window, entry, at)
            except ChainError:
                raise no_record(entry, at, window) from None
        yield entry.size

    async def between(self, reader: Reader, start: int, stop: int) -> list[Record]:
        """Return the records whose heads lie in [start, stop) of an object.

        Raises:
            FormatError: there is no way from record to record.
        """
        heads = await self.of(reader)
        first, last = np.searchsorted(heads[:-1], [start, stop]).tolist()
        if first == last:
            return []
        window = Window(reader, int(heads[first]))
        await window.reach(int(heads[last]))
        pairs = zip(
            heads[first:last].tolist(), heads[first + 1 : last + 1].tolist(), strict=True
        )
        return [_record(window, at - window.start, end - at) for at, end in pairs]
