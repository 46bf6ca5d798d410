"""TFRecord shards: `tf.train.Example` records that also form a strided array.

Every array is a bytes feature in little-endian C order, in the order of the fields' names
(protobuf's deterministic order). With fixed shapes all records have one length, so the wire
bytes around the arrays are one template. Column ``name`` of the file is then ``ndarray(uint8,
(samples, nbytes), strides=(record_bytes, 1), offset)``.

Copying a row between different alignments to cache lines takes a fifth longer. So in every
record the largest array starts at a cache line. The padding is a field of `Example` that
nothing defines, and that every protobuf parser skips.

Samples of different sizes are records of the same kind. If a value's bytes do not determine its
shape, an integer feature ``NAME/shape`` does. Readers need not parse protobuf:
``.offsets.npy``, int64 [samples, columns], has the end of each record in the file, and per
field the start of its value and the sizes of its ragged dimensions.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from growcache.cache.files import OFFSETS, RECORDS
from growcache.cache.formats import encoding
from growcache.cache.formats.encoding import (
    DIRECT_BYTES,
    PIECE_BYTES,
    RECORD_HEAD_BYTES,
    RECORD_TAIL_BYTES,
    EncodedFile,
    checked_lengths,
    coalesce,
    file_of_buffers,
    integer_table,
    open_integer_table,
    split_buffer,
    value_bytes,
)
from growcache.cache.formats.mapped import (
    Buffer,
    Bytes,
    Integers,
    MappedShard,
    RaggedColumn,
    empty_shard,
    map_file,
)
from growcache.errors import CorruptShardError, FormatError
from growcache.schema import Field, Sample, Schema

EXTENSION = RECORDS
LAYOUT_VERSION = 2  # part of the fingerprint; raise it if any byte of a shard changes

LINE_BYTES = 64  # of the CPU's cache
LEAST_ALIGNED_BYTES = 2048  # padding adds at most a few percent to these
FILLER_TAG = 15  # the largest tag with a key of one byte


@dataclass(frozen=True, slots=True)
class RecordLayout:
    record_bytes: int  # length of every record, with framing
    fields: tuple[tuple[Field, int], ...]  # each with the offset of its bytes in the record
    template: bytes  # a record of zeros, in which the crc of the payload is zero, too


@functools.lru_cache(maxsize=64)
def record_layout(schema: Schema) -> RecordLayout:
    """Return the layout of a sample's record. FormatError if it is too large for TensorFlow."""
    if schema.nbytes > encoding.MAX_PAYLOAD_BYTES:
        raise FormatError(sample_too_large_message(schema.nbytes), code="GC305")
    try:
        heads = [encoding.feature_head(field.name, field.nbytes) for field in schema.fields]
    except UnicodeEncodeError as error:
        raise FormatError(
            f"a field's name must be valid Unicode: {error}", code="GC306"
        ) from None
    features = b"".join(
        head + bytes(field.nbytes) for head, field in zip(heads, schema.fields, strict=True)
    )
    offsets, end = [], 0
    for field, head in zip(schema.fields, heads, strict=True):
        offsets.append(end + len(head))
        end = offsets[-1] + field.nbytes
    start = RECORD_HEAD_BYTES + len(prefix := encoding.length_delimited_head(1, len(features)))
    before, behind = _fillers(schema, offsets, start, len(features))
    payload = before + prefix + features + behind
    if len(payload) > encoding.MAX_PAYLOAD_BYTES:
        raise FormatError(sample_too_large_message(schema.nbytes), code="GC305")
    places = [start + len(before) + offset for offset in offsets]
    template = encoding.record_head(len(payload)) + payload + bytes(RECORD_TAIL_BYTES)
    return RecordLayout(len(template), tuple(zip(schema.fields, places, strict=True)), template)


def _fillers(
    schema: Schema, offsets: Sequence[int], start: int, features_bytes: int
) -> tuple[bytes, bytes]:
    largest = max(schema.fields, key=lambda field: field.nbytes)
    if largest.nbytes < LEAST_ALIGNED_BYTES or largest.nbytes % LINE_BYTES:
        return b"", b""
    before = _filler(start + offsets[schema.fields.index(largest)])
    return before, _filler(start + len(before) + features_bytes + RECORD_TAIL_BYTES)


def _filler(position: int) -> bytes:
    """Return a padding field that ends at the end of a cache line."""
    gap = -position % LINE_BYTES
    if gap == 1:  # a field takes two bytes
        gap += LINE_BYTES
    return encoding.length_delimited_head(FILLER_TAG, gap - 2) + bytes(gap - 2) if gap else b""


def suffixes(schema: Schema) -> tuple[str, ...]:
    return (RECORDS, OFFSETS) if schema.is_ragged else (RECORDS,)


def record_bytes(schema: Schema, sample_bytes: float) -> int:
    """Return the bytes of a sample on disk. For ragged samples this is an upper estimate."""
    if not schema.is_ragged:
        return record_layout(schema).record_bytes
    offsets = 8 * offset_columns(schema)
    return int(sample_bytes) + 1 + overhead_bytes(schema) + offsets


def largest_sample(schema: Schema) -> int:
    return encoding.MAX_PAYLOAD_BYTES - overhead_bytes(schema)


def encode(schema: Schema, samples: Sequence[Sample]) -> list[EncodedFile]:
    """Return the files of a shard, which share the memory of large arrays.

    May raise FormatError.
    """
    if schema.is_ragged:
        return encode_ragged(schema, samples)
    if not samples:
        return []
    columns = [_column(field, samples) for field in schema.fields]
    direct = schema.nbytes >= DIRECT_BYTES * len(schema.fields)
    records = (_SplicedRecords if direct else _CopiedRecords)(
        record_layout(schema), columns, len(samples)
    )
    return [EncodedFile(RECORDS, records.nbytes, records, guarded=True)]


def _column(field: Field, samples: Sequence[Sample]) -> list[Bytes]:
    """Return the checked bytes of a field in every sample, without copying contiguous arrays."""
    dtype, shape, column = field.item_dtype, field.fixed_shape, []
    for sample in samples:
        array = sample.get(field.name)
        if array is None or array.shape != shape or array.dtype != dtype:
            found = f"{array.dtype}{list(array.shape)}" if array is not None else "nothing"
            raise FormatError(
                f"expected {field.name}: {dtype}{list(shape)}, found {found}", code="GC307"
            )
        column.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return column


@dataclass(frozen=True, slots=True)
class _EqualRecords:
    where: RecordLayout
    columns: list[list[Bytes]]
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.where.record_bytes


class _CopiedRecords(_EqualRecords):
    def __iter__(self) -> Iterator[Buffer]:
        rows = max(1, PIECE_BYTES // self.where.record_bytes)
        for start in range(0, self.count, rows):
            yield self._block(start, min(start + rows, self.count)).reshape(-1)

    def _block(self, start: int, stop: int) -> Bytes:
        count = stop - start
        block: Bytes = np.empty((count, self.where.record_bytes), np.uint8)
        block[:] = np.frombuffer(self.where.template, np.uint8)
        for (field, offset), column in zip(self.where.fields, self.columns, strict=True):
            if field.nbytes:
                np.stack(column[start:stop], out=block[:, offset : offset + field.nbytes])
        payloads = block[:, RECORD_HEAD_BYTES:-RECORD_TAIL_BYTES]
        crcs = np.fromiter(map(google_crc32c.value, payloads), "<u8", count)
        block[:, -RECORD_TAIL_BYTES:] = (
            encoding.masked_crcs(crcs).view(np.uint8).reshape(count, RECORD_TAIL_BYTES)
        )
        return block


class _SplicedRecords(_EqualRecords):
    """Records whose arrays are written from their own memory, with the bytes between them."""

    def __iter__(self) -> Iterator[Buffer]:
        heads, last = [], 0
        for field, offset in self.where.fields:
            heads.append(self.where.template[last:offset])
            last = offset + field.nbytes
        end = self.where.template[last:-RECORD_TAIL_BYTES]
        first_crc = google_crc32c.value(heads[0][RECORD_HEAD_BYTES:])
        for i in range(self.count):
            crc = first_crc
            for place, column in enumerate(self.columns):
                if place:
                    crc = google_crc32c.extend(crc, heads[place])
                yield heads[place]
                for piece in split_buffer(column[i]):
                    # The consumer's copy comes first, because it brings the bytes nearer at
                    # twice the speed of this checksum.
                    yield piece
                    crc = google_crc32c.extend(crc, piece)
            yield end + encoding.masked_crc_bytes(google_crc32c.extend(crc, end))


def open_shard(path: str | os.PathLike[str], schema: Schema, samples: int) -> MappedShard:
    """Return the mapped shard without verifying checksums. May raise CorruptShardError."""
    if not samples:
        return empty_shard(schema)
    if schema.is_ragged:
        return open_ragged_shard(Path(path), schema, samples)
    memory = map_file(Path(path))
    expected = samples * record_layout(schema).record_bytes
    if len(memory) != expected:
        raise CorruptShardError(
            f"{path}: expected {expected} bytes for {samples} samples, found {len(memory)}; "
            "run growcache check"
        )
    return shard_in_memory(schema, samples, memory)


def shard_in_memory(schema: Schema, samples: int, memory: Buffer) -> MappedShard:
    rows = _record_rows(schema, samples, memory)
    columns = {
        field.name: rows[:, offset : offset + field.nbytes]
        for field, offset in record_layout(schema).fields
    }
    return MappedShard(schema, samples, [memory], columns, {})


def _record_rows(schema: Schema, samples: int, memory: Buffer) -> Bytes:
    return np.frombuffer(memory, np.uint8).reshape(samples, record_layout(schema).record_bytes)


def bad_records(shard: MappedShard) -> list[int]:
    if not len(shard):
        return []
    if shard.schema.is_ragged:
        return bad_ragged_records(shard)
    records = _record_rows(shard.schema, len(shard), shard.memories[0])
    template: Any = np.frombuffer(record_layout(shard.schema).template, np.uint8)
    framed = (records[:, :RECORD_HEAD_BYTES] == template[:RECORD_HEAD_BYTES]).all(axis=1)
    payloads = records[:, RECORD_HEAD_BYTES:-RECORD_TAIL_BYTES]
    crcs = np.fromiter(map(google_crc32c.value, payloads), "<u8", len(shard))
    stored = records[:, -RECORD_TAIL_BYTES:].copy().view("<u4")[:, 0]
    return [int(i) for i in np.flatnonzero(~framed | (encoding.masked_crcs(crcs) != stored))]


SHAPE_SUFFIX = "/shape"
MOST_HEAD_BYTES = 32  # of a feature without its name: five lengths and their tags


@dataclass(frozen=True, slots=True)
class _Feature:
    name: str
    field: Field
    ragged_dims: tuple[int, ...]
    is_shape: bool


@functools.lru_cache(maxsize=64)
def features(schema: Schema) -> tuple[_Feature, ...]:
    """Return the features in protobuf's deterministic order.

    FormatError if two share a name.
    """
    found = [_Feature(f.name, f, f.ragged_dims, False) for f in schema.fields]
    found += [
        _Feature(f.name + SHAPE_SUFFIX, f, f.ragged_dims, True)
        for f in schema.fields
        if f.needs_shape
    ]
    for feature in found:
        if feature.is_shape and feature.name in schema.names:
            raise FormatError(
                f"{feature.field} needs the name {feature.name!r} for its shape; rename that field",
                code="GC306",
            )
    try:
        return tuple(sorted(found, key=lambda feature: feature.name.encode()))
    except UnicodeEncodeError as error:
        raise FormatError(
            f"a field's name must be valid Unicode: {error}", code="GC306"
        ) from None


def overhead_bytes(schema: Schema) -> int:
    """Return the largest size of a record without its values, in bytes."""
    most = encoding.RECORD_HEAD_BYTES + encoding.RECORD_TAIL_BYTES + MOST_HEAD_BYTES
    for feature in features(schema):
        most += len(feature.name.encode()) + MOST_HEAD_BYTES
        most += 10 * len(feature.field.dims) if feature.is_shape else 0
    return most


def offset_columns(schema: Schema) -> int:
    return 1 + sum(1 + len(field.ragged_dims) for field in schema.fields)


def encode_ragged(schema: Schema, samples: Sequence[Sample]) -> list[EncodedFile]:
    records: list[list[Buffer]] = []
    rows: list[list[int]] = []
    position, parts = 0, features(schema)
    for sample in samples:
        record, row = _record(parts, sample, position)
        position = row[0]
        records.append(record)
        rows.append(row)
    if not rows:
        return []
    offsets = file_of_buffers(OFFSETS, [*integer_table(np.array(rows, np.int64))])
    return [EncodedFile(RECORDS, position, _RaggedRecords(records), guarded=True), offsets]


class _RaggedRecords:
    def __init__(self, records: list[list[Buffer]]) -> None:
        self._records = records

    def __iter__(self) -> Iterator[Buffer]:
        return coalesce(itertools.chain.from_iterable(map(_with_crc, self._records)))


def _record(
    parts: tuple[_Feature, ...], sample: Sample, position: int
) -> tuple[list[Buffer], list[int]]:
    pieces: list[Buffer] = []
    places: list[tuple[int, list[int]]] = []
    length = 0
    for feature in parts:
        name, field = feature.name, feature.field
        if feature.is_shape:
            shape = encoding.int64_feature(name, sample[field.name].shape)
            pieces.append(shape)
            length += len(shape)
            continue
        raw, dims = value_bytes(field, feature.ragged_dims, sample.get(name))
        head = encoding.feature_head(name, len(raw))
        pieces += (head, raw)
        places.append((length + len(head), dims))
        length += len(head) + len(raw)
    outer = encoding.length_delimited_head(1, length)
    if len(outer) + length > encoding.MAX_PAYLOAD_BYTES:
        raise FormatError(sample_too_large_message(length), code="GC305")
    first = encoding.record_head(len(outer) + length) + outer
    position += len(first)
    row = [position + length + encoding.RECORD_TAIL_BYTES]
    for place, dims in places:
        row += (position + place, *dims)
    return [first, *pieces], row


def _with_crc(record: list[Buffer]) -> Iterator[Buffer]:
    pieces = coalesce(record)
    first = next(pieces)
    crc = google_crc32c.value(first[encoding.RECORD_HEAD_BYTES :])
    yield first
    for buffer in pieces:
        for piece in split_buffer(buffer):
            yield piece
            crc = google_crc32c.extend(crc, piece)
    yield encoding.masked_crc_bytes(crc)


def sample_too_large_message(nbytes: int) -> str:
    return (
        f"a sample of {nbytes:,} bytes does not fit a tf.train.Example "
        f"(at most {encoding.MAX_PAYLOAD_BYTES:,}); cut smaller windows"
    )


def open_ragged_shard(path: Path, schema: Schema, samples: int) -> MappedShard:
    memory = map_file(path)
    offsets_path = path.with_suffix(OFFSETS)
    offsets_memory, offsets = open_integer_table(
        offsets_path, (samples, offset_columns(schema))
    )
    data = np.frombuffer(memory, np.uint8)
    found = _ragged_columns(schema, data, offsets)
    if found is None:
        raise CorruptShardError(
            f"{offsets_path}: the values are not in {path.name} where it says; run growcache "
            "check"
        )
    return MappedShard(schema, samples, [memory, offsets_memory], {}, found)


def _ragged_columns(
    schema: Schema, data: Bytes, offsets: Integers
) -> dict[str, RaggedColumn] | None:
    """Return the columns, or None if a value is outside its record."""
    ends = offsets[:, 0]
    records = np.append(0, ends[:-1])
    if (records < 0).any() or (records >= ends).any() or ends[-1] != len(data):
        return None
    found, column = {}, 1
    for field in schema.fields:
        stop = column + 1 + len(field.ragged_dims)
        starts, dims = offsets[:, column], offsets[:, column + 1 : stop]
        lengths = checked_lengths(dims, field.unit_bytes, len(data))
        if lengths is None or (starts < records + encoding.RECORD_HEAD_BYTES).any():
            return None
        # Not as a sum, because that of two untrusted numbers may overflow.
        if (starts > ends - encoding.RECORD_TAIL_BYTES - lengths).any():
            return None
        found[field.name] = RaggedColumn(data, starts, lengths, dims)
        column = stop
    return found


def bad_ragged_records(shard: MappedShard) -> list[int]:
    data = np.frombuffer(shard.memories[0], np.uint8)
    ends = _record_ends(shard)
    return [
        i
        for i, (start, end) in enumerate(itertools.pairwise([0, *ends]))
        if not _is_whole(data[start:end])
    ]


def _record_ends(shard: MappedShard) -> list[int]:
    width = offset_columns(shard.schema)
    data = np.frombuffer(shard.memories[1], np.uint8)[-8 * width * len(shard) :]
    ends: list[int] = data.view("<i8")[::width].tolist()
    return ends


def _is_whole(record: Bytes) -> bool:
    payload = record[encoding.RECORD_HEAD_BYTES : -encoding.RECORD_TAIL_BYTES]
    head, tail = (
        record[: encoding.RECORD_HEAD_BYTES].tobytes(),
        record[-encoding.RECORD_TAIL_BYTES :].tobytes(),
    )
    return head == encoding.record_head(len(payload)) and tail == encoding.masked_crc_bytes(
        google_crc32c.value(payload)
    )
