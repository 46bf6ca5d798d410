"""Find the records of a TFRecord file in a byte range, which owns the records that start in it.

A record is found by the checksum of its length and by the chain of records after it. Bytes
inside a record may look like records, as in a TFRecord file stored in a record, but such a
chain breaks at the end of the record. So the result is correct if no record is longer than the
range. A longer record with look-alikes is refused. `RecordOffsets` reads all record heads
instead.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from growcache.errors import FormatError
from growcache.formats.base import ObjectReader
from growcache.formats.byte_ranges import GrowingSlice, ReadAhead
from growcache.formats.compressed import refuse_compressed
from growcache.formats.memory import SingleFlightCache
from growcache.schema import Array
from growcache.store.contract import Entry

# Length as u64 and its masked crc32c; masked crc32c of the content.
RECORD_HEAD_BYTES, RECORD_TAIL_BYTES = 12, 4
_SCAN_BYTES = 1 << 16  # examined together


def record_length_at(data: memoryview, at: int) -> int | None:
    head = data[at : at + RECORD_HEAD_BYTES]
    if (
        head.nbytes < RECORD_HEAD_BYTES
        or masked_crc(head[:8]) != struct.unpack_from("<I", head, 8)[0]
    ):
        return None
    length: int = struct.unpack_from("<Q", head)[0]
    return length


def masked_crc(data: memoryview) -> int:
    crc = google_crc32c.value(bytes(data))
    return int(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def find_heads(data: memoryview, start: int, stop: int, most: int) -> Iterator[int]:
    stop = min(stop, data.nbytes - RECORD_HEAD_BYTES + 1)
    for at in range(start, stop, _SCAN_BYTES):
        end = min(at + _SCAN_BYTES, stop)
        part = np.frombuffer(data[at : end + RECORD_HEAD_BYTES - 1], np.uint8)
        # No record has 2^40 bytes, so three bytes of its length are zero.
        n = end - at
        places = np.flatnonzero((part[5 : n + 5] | part[6 : n + 6] | part[7 : n + 7]) == 0)
        if len(places):
            for place in _with_right_checksum(part, places, most).tolist():
                yield at + place


def _with_right_checksum(part: Array, places: Array, most: int) -> Array:
    words = part[places[:, None] + np.arange(RECORD_HEAD_BYTES)]
    lengths = words[:, :8].copy().view("<u8")[:, 0]
    crcs = np.full(len(places), 0xFFFFFFFF, np.uint32)
    for column in range(8):
        crcs = _CRC_TABLE[(crcs ^ words[:, column]) & 0xFF] ^ crcs >> np.uint32(8)
    crcs = ~crcs
    found = (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)
    told = words[:, 8:].copy().view("<u4")[:, 0]
    fitting: Array = places[(found == told) & (lengths <= most)]
    return fitting


def _crc_table() -> npt.NDArray[np.uint32]:
    crcs = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crcs = np.where(
            crcs & 1, crcs >> np.uint32(1) ^ np.uint32(0x82F63B78), crcs >> np.uint32(1)
        )
    return crcs


_CRC_TABLE = _crc_table()


READ_WHOLE_BYTES = 1 << 18  # a smaller object is read from its start, whatever the part
_MOST_READ_AHEAD = 1 << 22
_WALK_BYTES = 1 << 12  # of a read while walking, which covers many heads of small records
_MOST_WALK_BYTES = 1 << 20
_KEPT_BYTES = 1 << 25  # of the remembered heads
_LEAST_KEPT_BYTES = _KEPT_BYTES // 64  # of at most 64 objects


@dataclass(frozen=True, slots=True)
class Record:
    start: int  # first byte of its head in the object
    stop: int  # one past its end
    data: memoryview | None  # None if its checksum is wrong


class BrokenChainError(Exception):
    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class RecordScan:
    def __init__(self) -> None:
        self._ahead = ReadAhead(1 << 14, RECORD_HEAD_BYTES, _MOST_READ_AHEAD)

    async def records_in(self, reader: ObjectReader, start: int, stop: int) -> list[Record]:
        if start >= stop:
            return []
        if reader.entry.size <= READ_WHOLE_BYTES or not start:
            window = GrowingSlice(reader, 0)
            whole = reader.entry.size <= READ_WHOLE_BYTES
            await window.extend_to(reader.entry.size if whole else stop + self._ahead.nbytes)
            records = await self._certain(reader, window, reader.entry.size if whole else stop)
            return [record for record in records if start <= record.start < stop]
        window = GrowingSlice(reader, start)
        await window.extend_to(stop + self._ahead.nbytes)
        return await self._found(reader, window, stop)

    async def _certain(
        self, reader: ObjectReader, window: GrowingSlice, stop: int
    ) -> list[Record]:
        """Return the records from the object's first one on."""
        try:
            return await self._learnt(reader, window, 0, stop)
        except BrokenChainError as error:
            raise no_record_error(reader.entry, error.at, window) from None

    async def _found(
        self, reader: ObjectReader, window: GrowingSlice, stop: int
    ) -> list[Record]:
        """Return the records of the first unbroken chain."""
        entry, first = reader.entry, window.start
        broken: int | None = None
        while (at := _next_head(window, entry, first, stop)) is not None:
            if broken is not None:
                _refuse_damaged(entry, window, broken, at)
            try:
                return await self._learnt(reader, window, at, stop)
            except BrokenChainError as error:
                if error.at >= stop:  # no record within one that fits a block
                    raise no_record_error(entry, error.at, window) from None
                # The chain was inside a longer record, and another chain may follow.
                first = broken = max(error.at, at + 1)
        return []

    async def _learnt(
        self, reader: ObjectReader, window: GrowingSlice, first: int, stop: int
    ) -> list[Record]:
        records = await read_chain(reader, window, first, stop)
        if not records:
            return []
        self._ahead.learn([record.stop - record.start for record in records])
        for record in records:
            if record.stop - record.start > stop - window.start:
                refuse_look_alikes(reader.entry, record)
        return records


def _next_head(window: GrowingSlice, entry: Entry, first: int, stop: int) -> int | None:
    start = window.start
    found = find_heads(window.view, first - start, stop - start, entry.size - first)
    at = next(found, None)
    return None if at is None else start + at


def _refuse_damaged(entry: Entry, window: GrowingSlice, broken: int, following: int) -> None:
    """Refuse a block in which only the head of a record is damaged."""
    begin, end = (
        broken - window.start + RECORD_HEAD_BYTES,
        following - window.start - RECORD_TAIL_BYTES,
    )
    if begin > end:
        return
    (told,) = struct.unpack_from("<I", window.view, end)
    if told == masked_crc(window.view[begin:end]):
        raise no_record_error(entry, broken, window)


async def read_chain(
    reader: ObjectReader, window: GrowingSlice, first: int, stop: int
) -> list[Record]:
    """Return the records from ``first`` to the last one that starts before ``stop``.

    Raises:
        BrokenChainError: One of them is not a record, or no record follows the last one.
    """
    entry = reader.entry
    records: list[Record] = []
    at = first
    while at < stop:
        end = await _record_end(window, entry, at)
        await window.extend_to(end + RECORD_HEAD_BYTES)
        begin = at - window.start
        records.append(_record_at(window, begin, end - at))
        at = end
    if at < entry.size and record_length_at(window.view, at - window.start) is None:
        raise BrokenChainError(at)
    return records


async def _record_end(window: GrowingSlice, entry: Entry, at: int) -> int:
    await window.extend_to(at + RECORD_HEAD_BYTES)
    length = record_length_at(window.view, at - window.start)
    if length is None or at + RECORD_HEAD_BYTES + length + RECORD_TAIL_BYTES > entry.size:
        raise BrokenChainError(at)
    return at + RECORD_HEAD_BYTES + length + RECORD_TAIL_BYTES


def _record_at(window: GrowingSlice, begin: int, nbytes: int) -> Record:
    start = window.start + begin
    data = window.view[begin + RECORD_HEAD_BYTES : begin + nbytes - RECORD_TAIL_BYTES]
    (crc,) = struct.unpack_from("<I", window.view, begin + nbytes - RECORD_TAIL_BYTES)
    # Copied, because the window's memory is larger, and moves when it grows.
    content = bytes(data)
    data.release()
    good = masked_crc(memoryview(content)) == crc
    return Record(start, start + nbytes, memoryview(content) if good else None)


def refuse_look_alikes(entry: Entry, record: Record) -> None:
    """Refuse a record that is longer than a block, and in which blocks would find other records."""
    if record.data is None:
        return
    view = record.data
    for at in find_heads(view, 0, view.nbytes, view.nbytes):
        length = record_length_at(view, at) or 0
        end = at + RECORD_HEAD_BYTES + length
        if end + RECORD_TAIL_BYTES <= view.nbytes and struct.unpack_from("<I", view, end)[
            0
        ] == masked_crc(view[at + RECORD_HEAD_BYTES : end]):
            raise FormatError(
                f"{entry.key}: the record at byte {record.start:,} holds what looks like "
                "records; set index: true in source.options",
                code="GC303",
            )


def no_record_error(entry: Entry, at: int, window: GrowingSlice) -> FormatError:
    found = bytes(window.view[at - window.start : at - window.start + RECORD_HEAD_BYTES])
    if not at:
        refuse_compressed(entry, found)
    return FormatError(
        f"{entry.key}: expected a TFRecord at byte {at:,} of {entry.size:,}, found {found!r}"
    )


class RecordOffsets:
    def __init__(self) -> None:
        self._known: SingleFlightCache[Entry, npt.NDArray[np.int64]] = SingleFlightCache(
            _KEPT_BYTES
        )

    async def offsets(self, reader: ObjectReader) -> npt.NDArray[np.int64]:
        """Return the start of each record, and the end of the last."""

        async def ask() -> tuple[npt.NDArray[np.int64], int]:
            found = np.array([at async for at in self._walk(reader)], np.int64)
            return found, max(found.nbytes, _LEAST_KEPT_BYTES)

        return await self._known.get(reader.entry, ask)

    async def _walk(self, reader: ObjectReader) -> AsyncIterator[int]:
        entry, at, step = reader.entry, 0, _WALK_BYTES
        window = GrowingSlice(reader, 0)
        while at < entry.size:
            if at + RECORD_HEAD_BYTES > window.stop:
                near = at - window.stop < _WALK_BYTES  # small records: read all of them
                step = min(_MOST_WALK_BYTES, 2 * step) if near else _WALK_BYTES
                window = GrowingSlice(reader, at)
                await window.extend_to(at + (step if near else RECORD_HEAD_BYTES))
            yield at
            try:
                at = await _record_end(window, entry, at)
            except BrokenChainError:
                raise no_record_error(entry, at, window) from None
        yield entry.size

    async def records_in(self, reader: ObjectReader, start: int, stop: int) -> list[Record]:
        heads = await self.offsets(reader)
        first, last = np.searchsorted(heads[:-1], [start, stop]).tolist()
        if first == last:
            return []
        window = GrowingSlice(reader, int(heads[first]))
        await window.extend_to(int(heads[last]))
        pairs = zip(
            heads[first:last].tolist(), heads[first + 1 : last + 1].tolist(), strict=True
        )
        return [_record_at(window, at - window.start, end - at) for at, end in pairs]
