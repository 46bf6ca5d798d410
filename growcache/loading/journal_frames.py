"""The frames of a journal: their layout in the file, and the content of each kind.

A frame has its length, its kind, and a CRC32C of kind and body. So a reader finds the frames
after a damaged one.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import orjson

from growcache.loading.delivered_rows import BatchRows, Run, Substitute
from growcache.loading.plan import PassPlan, PlannedShard

MAGIC = b"GCJNL\x00\x00\x01"
NOTE, CATALOG, PASS, BATCH = range(1, 5)
KINDS = frozenset({NOTE, CATALOG, PASS, BATCH})
DIGEST_BYTES = 16
TAG_BYTES = 8

_HEAD = struct.Struct("<IBI")  # size of the body, kind, CRC32C of kind and body
_PASS = struct.Struct("<QQIB")  # number, samples of a window, shards, bytes per number
_CATALOG = struct.Struct("<IQ")  # number of the listing, and offset in it
_MOST_NOTE_BYTES = 1 << 28
_LENGTH_BYTES = 4
_KIND_BYTE = re.compile(b"[%s]" % bytes(sorted(KINDS)), re.DOTALL)


class Frame(NamedTuple):
    kind: int
    body: bytes

    def pack(self) -> bytes:
        return (
            _HEAD.pack(len(self.body), self.kind, _checksum(self.kind, self.body)) + self.body
        )


def _checksum(kind: int, body: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(bytes([kind])), body))


class Damage(NamedTuple):
    """Bytes that are not a valid frame."""

    start: int
    stop: int
    kind: int | None  # of the only frame that was there; None: nothing is known


def read_frames(data: bytes) -> Iterator[tuple[Frame | Damage, int]]:
    """Yield frames, and damage between them, each with its end.

    A torn last frame ends the iteration.

    The magic comes first.
    """
    at = len(MAGIC)
    while at < len(data):
        end = _frame_end(data, at) or _next_frame(data, at)
        if end is None:
            if _is_torn(data, at):
                return
            end = len(data)
        yield _frame_in(data, at, end) or Damage(at, end, _lost_kind(data, at, end)), end
        at = end


def _frame_end(data: bytes, at: int) -> int | None:
    """Return the end of a complete frame that starts here, or None."""
    if at + _HEAD.size > len(data):
        return None
    length, kind, crc = _HEAD.unpack_from(data, at)
    end: int = at + _HEAD.size + length
    if kind not in KINDS or end > len(data):
        return None
    return end if _checksum(kind, data[at + _HEAD.size : end]) == crc else None


def _next_frame(data: bytes, at: int) -> int | None:
    """Return the start of the next complete frame after a damaged one, or the end of the file."""
    if at + _HEAD.size <= len(data):
        length, kind, _ = _HEAD.unpack_from(data, at)
        end: int = at + _HEAD.size + length
        if kind in KINDS and (end == len(data) or _frame_end(data, end) is not None):
            return end
    for found in _KIND_BYTE.finditer(data, at + 1 + _LENGTH_BYTES):
        start = found.start() - _LENGTH_BYTES
        if _frame_end(data, start) is not None:
            return start
    return None


def _frame_in(data: bytes, at: int, end: int) -> Frame | None:
    """Return the only frame in these bytes, even if its length or kind was damaged."""
    if end - at < _HEAD.size:
        return None
    _, kind, crc = _HEAD.unpack_from(data, at)
    body = data[at + _HEAD.size : end]
    likely = sorted(KINDS, key=lambda one: one != kind)
    return next((Frame(one, body) for one in likely if _checksum(one, body) == crc), None)


def _lost_kind(data: bytes, at: int, end: int) -> int | None:
    if end - at < _HEAD.size:
        return None
    length, kind, _ = _HEAD.unpack_from(data, at)
    return kind if kind in KINDS and at + _HEAD.size + length == end else None


def _is_torn(data: bytes, at: int) -> bool:
    """Whether a kill in the middle of a write could have left these last bytes."""
    if at + _HEAD.size > len(data):
        return True
    length, kind, _ = _HEAD.unpack_from(data, at)
    return kind in KINDS and at + _HEAD.size + length > len(data)


# ------------------------------------------------------------------------------- bodies


def pack_note(values: dict[str, Any]) -> Frame:
    return Frame(NOTE, zlib.compress(orjson.dumps(values)))


def unpack_note(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(
        zlib.decompressobj().decompress(body, _MOST_NOTE_BYTES)
    )
    return found


class CatalogPart(NamedTuple):
    """Bytes of a listing. Another number is another listing, which started anew."""

    listing: int
    offset: int
    data: bytes


def pack_catalog(part: CatalogPart) -> Frame:
    return Frame(CATALOG, _CATALOG.pack(part.listing, part.offset) + part.data)


def unpack_catalog(body: bytes) -> CatalogPart:
    listing, offset = _CATALOG.unpack_from(body)
    return CatalogPart(listing, offset, body[_CATALOG.size :])


def session_tag(values: dict[str, Any]) -> bytes:
    """Return the tag by which a pass refers to its session, so that a lost note is noticed."""
    as_text = orjson.dumps(values, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(as_text, digest_size=TAG_BYTES).digest()


def pack_pass(plan: PassPlan, tag: bytes = b"") -> Frame:
    numbers = np.array([shard.number for shard in plan.shards], np.int64)
    samples = np.array([shard.samples for shard in plan.shards], np.int64)
    width = 4 if max([0, *numbers.tolist(), *samples.tolist()]) < 1 << 32 else 8
    columns = [column.astype(f"<u{width}").tobytes() for column in (numbers, samples)]
    # Digests of shards that were delivered before a state was loaded may be unknown.
    digests = bytes.fromhex(
        "".join(shard.digest.ljust(2 * DIGEST_BYTES, "0") for shard in plan.shards)
    )
    head = _PASS.pack(plan.number, plan.window_samples, len(plan.shards), width)
    return Frame(PASS, b"".join([head, *columns, digests, tag]))


def unpack_pass(body: bytes) -> PassPlan:
    number, window_samples, count, width = _PASS.unpack_from(body)
    at, columns = _PASS.size, []
    for _ in range(2):
        columns.append(np.frombuffer(body, f"<u{width}", count, at).tolist())
        at += count * width
    ends = range(at, at + count * DIGEST_BYTES, DIGEST_BYTES)
    digests = [body[end : end + DIGEST_BYTES].hex() for end in ends]
    shards = tuple(map(PlannedShard, *columns, digests))
    return PassPlan(number, shards, window_samples)


def tag_of_pass(body: bytes) -> bytes:
    """Return the tag of its session, which is empty in journals of an earlier version."""
    _, _, count, width = _PASS.unpack_from(body)
    return body[_PASS.size + count * (2 * width + DIGEST_BYTES) :]


def number_of_pass(body: bytes) -> int:
    return int(_PASS.unpack_from(body)[0])


def highest_shard(body: bytes) -> int:
    _, _, count, width = _PASS.unpack_from(body)
    return int(np.frombuffer(body, f"<u{width}", count, _PASS.size).max(initial=0))


def rows_of_pass(body: bytes) -> int:
    _, _, count, width = _PASS.unpack_from(body)
    samples = np.frombuffer(body, f"<u{width}", count, _PASS.size + count * width)
    return int(samples.sum(dtype=np.int64))


class DeliveredBatch(NamedTuple):
    step: int  # over all epochs, from 0
    epoch: int
    epoch_step: int  # in its epoch, from 0
    seconds: int  # of the wall clock, for display
    rows: BatchRows

    def after(self, batches: int, batch_size: int, stride: int) -> DeliveredBatch | None:
        """Return a later batch if all in between are regular, or None after an irregular batch."""
        rows = self.rows.after(batches, batch_size, stride) if batches else self.rows
        if rows is None:
            return None
        return self._replace(
            step=self.step + batches, epoch_step=self.epoch_step + batches, rows=rows
        )


def pack_batch(batch: DeliveredBatch) -> Frame:
    rows = batch.rows
    numbers = [*batch[:4], rows.padding, len(rows.runs), len(rows.substitutes)]
    for number, start, stop in rows.runs:
        numbers += (number, start, stop - start)
    for substitute in rows.substitutes:
        numbers += substitute
    return Frame(BATCH, b"".join(map(_varint, numbers)))


def unpack_batch(body: bytes) -> DeliveredBatch:
    numbers = _varints(body)
    step, epoch, epoch_step, seconds, padding, runs, substitutes = numbers[:7]
    rest = iter(numbers[7:])
    threes = list(zip(rest, rest, rest, strict=True))
    if len(threes) != runs + substitutes:
        raise ValueError(f"{len(threes)} runs and substitutes, not {runs + substitutes}")
    rows = BatchRows(
        tuple(Run(number, start, start + length) for number, start, length in threes[:runs]),
        tuple(Substitute(*three) for three in threes[runs:]),
        padding,
    )
    return DeliveredBatch(step, epoch, epoch_step, seconds, rows)


def _varint(number: int) -> bytes:
    """Return a number in seven bits per byte, lowest first.

    >>> _varint(300).hex(), _varints(_varint(300) + _varint(5))
    ('ac02', [300, 5])
    """
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _varints(data: bytes) -> list[int]:
    found, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(number)
            number = shift = 0
    if shift:
        raise ValueError("a number is cut off")
    return found
