"""TFRecord shards: `tf.train.Example` records that are at the same time a strided array.

Every array is a bytes feature in little-endian C order, in the order of the fields' names
(protobuf's deterministic order). With fixed shapes all records have one length, so the
wire bytes around the arrays are one template, and column ``name`` of the file is
``ndarray(uint8, (samples, nbytes), strides=(record_bytes, 1), offset)``.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from growcache.cache.formats.mapped import Buffer, Bytes, MappedShard, Memory, map_file
from growcache.errors import CorruptShardError, FormatError
from growcache.schema import Field, Sample, Schema

EXTENSION = ".tfrecord"
HEAD_BYTES = 12  # u64 length, masked crc32c of it
TAIL_BYTES = 4  # masked crc32c of the payload
MAX_PAYLOAD_BYTES = 2**31 - 1  # protobuf parses no larger message

# From here on an array is handed to writev as it is; below, one copy into a common block
# costs less than the Python operations per array would.
DIRECT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where everything of a record lies.

    Attributes:
        record_bytes: length of every record, framing included.
        fields: each field with the offset of its bytes in the record.
        template: a whole record of zeros; the crc of the payload is left zero.
    """

    record_bytes: int
    fields: tuple[tuple[Field, int], ...]
    template: bytes


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _head(tag: int, size: int) -> bytes:
    """Return the key of a length-delimited protobuf field, up to its content."""
    return bytes([tag << 3 | 2]) + _varint(size)


def _entry(field: Field) -> tuple[bytes, bytes]:
    """Return the wire bytes of one feature: before its array, and with zeros for it."""
    head = _head(1, field.nbytes)  # BytesList.value
    for tag in (1, 2):  # Feature.bytes_list, FeatureEntry.value
        head = _head(tag, len(head) + field.nbytes) + head
    name = field.name.encode("utf-8")
    head = _head(1, len(name)) + name + head  # FeatureEntry.key
    head = _head(1, len(head) + field.nbytes) + head  # Features.feature
    return head, head + bytes(field.nbytes)


@functools.lru_cache(maxsize=64)
def layout(schema: Schema) -> RecordLayout:
    """Return where the arrays of a sample lie in its record.

    Raises:
        FormatError: a sample is larger than TensorFlow can parse, or a name is no text.
    """
    if schema.nbytes > MAX_PAYLOAD_BYTES:
        raise FormatError(_too_large(schema))
    try:
        entries = [_entry(field) for field in schema.fields]
    except UnicodeEncodeError as error:
        raise FormatError(f"a field's name must be valid Unicode: {error}") from None
    features = b"".join(whole for _, whole in entries)
    payload = _head(1, len(features)) + features
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FormatError(_too_large(schema))
    offset = HEAD_BYTES + len(payload) - len(features)
    fields = []
    for field, (head, whole) in zip(schema.fields, entries, strict=True):
        fields.append((field, offset + len(head)))
        offset += len(whole)
    length = struct.pack("<Q", len(payload))
    template = length + _crc_bytes(google_crc32c.value(length)) + payload + bytes(TAIL_BYTES)
    return RecordLayout(len(template), tuple(fields), template)


def _too_large(schema: Schema) -> str:
    return (
        f"a sample of {schema.nbytes:,} bytes does not fit a tf.train.Example "
        f"(at most {MAX_PAYLOAD_BYTES:,}); cut smaller windows"
    )


def _mask(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_bytes(crc: int) -> bytes:
    return struct.pack("<I", _mask(crc))


def encode(schema: Schema, samples: Sequence[Sample]) -> list[Buffer]:
    """Return buffers that, written one after the other, are the shard.

    Large arrays are not copied: the buffers share memory with the samples.

    Raises:
        FormatError: a sample is not what the schema says.
    """
    columns = [_column(field, samples) for field in schema.fields]
    if schema.nbytes >= DIRECT_BYTES * len(schema.fields):
        return _encode_direct(layout(schema), columns, len(samples))
    return _encode_block(layout(schema), columns, len(samples))


def _column(field: Field, samples: Sequence[Sample]) -> list[Bytes]:
    """Return the field's bytes of every sample, checked, without copying what is in order."""
    dtype, shape, column = np.dtype(field.dtype), field.shape, []
    for sample in samples:
        array = sample.get(field.name)
        if array is None or array.shape != shape or array.dtype != dtype:
            found = f"{array.dtype}{list(array.shape)}" if array is not None else "nothing"
            raise FormatError(f"expected {field.name}: {dtype}{list(shape)}, found {found}")
        column.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return column


def _encode_block(where: RecordLayout, columns: list[list[Bytes]], count: int) -> list[Buffer]:
    if not count:
        return []
    block: Bytes = np.empty((count, where.record_bytes), np.uint8)
    block[:] = np.frombuffer(where.template, np.uint8)
    for (field, offset), column in zip(where.fields, columns, strict=True):
        if field.nbytes:
            np.stack(column, out=block[:, offset : offset + field.nbytes])
    crcs = np.fromiter(map(google_crc32c.value, block[:, HEAD_BYTES:-TAIL_BYTES]), "<u8", count)
    block[:, -TAIL_BYTES:] = _masked(crcs).view(np.uint8).reshape(count, TAIL_BYTES)
    return [block.reshape(-1)]


def _masked(crcs: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    rotated = crcs >> np.uint64(15) | crcs << np.uint64(17)
    return ((rotated + np.uint64(0xA282EAD8)) & np.uint64(0xFFFFFFFF)).astype("<u4")


def _encode_direct(where: RecordLayout, columns: list[list[Bytes]], count: int) -> list[Buffer]:
    heads, last = [], 0
    for field, offset in where.fields:
        heads.append(where.template[last:offset])
        last = offset + field.nbytes
    first_crc = google_crc32c.value(heads[0][HEAD_BYTES:])
    buffers: list[Buffer] = []
    for i in range(count):
        crc = first_crc
        for place, column in enumerate(columns):
            if place:
                crc = google_crc32c.extend(crc, heads[place])
            crc = google_crc32c.extend(crc, column[i])
            buffers += (heads[place], column[i])
        buffers.append(_crc_bytes(crc))
    return buffers


def open_shard(path: str | os.PathLike[str], schema: Schema, samples: int) -> MappedShard:
    """Return the mapped shard; its checksums are not looked at.

    Raises:
        CorruptShardError: the file is missing or has not the size of so many records.
    """
    memory = map_file(Path(path)) if samples else b""
    expected = samples * layout(schema).record_bytes
    if len(memory) != expected:
        raise CorruptShardError(
            f"{path}: expected {expected} bytes for {samples} samples, found {len(memory)}; "
            "run growcache check"
        )
    return mapped(schema, samples, memory)


def mapped(schema: Schema, samples: int, memory: Memory) -> MappedShard:
    """Return the shard whose records are in memory."""
    rows = _records(schema, samples, memory)
    columns = {
        field.name: rows[:, offset : offset + field.nbytes]
        for field, offset in layout(schema).fields
    }
    return MappedShard(schema, samples, [memory], columns, {})


def _records(schema: Schema, samples: int, memory: Memory) -> Bytes:
    return np.frombuffer(memory, np.uint8).reshape(samples, layout(schema).record_bytes)


def bad_records(shard: MappedShard) -> list[int]:
    """Return the samples whose record is not framed, or whose CRC32C is wrong."""
    records = _records(shard.schema, len(shard), *shard.memories)
    template: Any = np.frombuffer(layout(shard.schema).template, np.uint8)
    framed = (records[:, :HEAD_BYTES] == template[:HEAD_BYTES]).all(axis=1)
    payloads = records[:, HEAD_BYTES:-TAIL_BYTES]
    crcs = np.fromiter(map(google_crc32c.value, payloads), "<u8", len(shard))
    stored = records[:, -TAIL_BYTES:].copy().view("<u4")[:, 0]
    return [int(i) for i in np.flatnonzero(~framed | (_masked(crcs) != stored))]
