"""TFRecord shards of samples that differ in size, with an index of where their values lie.

The records are `tf.train.Example`s like those of fixed schemas: every value is a bytes feature. Where
its bytes do not tell its shape, a feature of integers ``NAME/shape`` does. Readers need not parse
protobuf: ``.offsets.npy``, int64 [samples, columns], says where the record ends in the file, and per
field where its value begins and the sizes of its ragged dimensions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from growcache.cache.files import OFFSETS, RECORDS
from growcache.cache.formats import encoding
from growcache.cache.formats.encoding import (
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
    map_file,
)
from growcache.errors import CorruptShardError, FormatError
from growcache.schema import Field, Sample, Schema

SHAPE_SUFFIX = "/shape"
MOST_HEAD_BYTES = 32  # of a feature, beside its name: five lengths and their tags


@dataclass(frozen=True, slots=True)
class _Feature:
    """A feature of the records: the value of a field, or its shape."""

    name: str
    field: Field
    ragged_dims: tuple[int, ...]
    is_shape: bool


@functools.lru_cache(maxsize=64)
def features(schema: Schema) -> tuple[_Feature, ...]:
    """Return the features in protobuf's deterministic order, by name. FormatError: two have one name."""
    found = [_Feature(f.name, f, f.ragged_dims, False) for f in schema.fields]
    found += [
        _Feature(f.name + SHAPE_SUFFIX, f, f.ragged_dims, True)
        for f in schema.fields
        if f.needs_shape
    ]
    for feature in found:
        if feature.is_shape and feature.name in schema.names:
            raise FormatError(
                f"{feature.field} needs the name {feature.name!r} for its shape; rename that field"
            )
    try:
        return tuple(sorted(found, key=lambda feature: feature.name.encode()))
    except UnicodeEncodeError as error:
        raise FormatError(f"a field's name must be valid Unicode: {error}") from None


def overhead_bytes(schema: Schema) -> int:
    """Return the most bytes of a record in addition to its values. May raise FormatError."""
    most = encoding.RECORD_HEAD_BYTES + encoding.RECORD_TAIL_BYTES + MOST_HEAD_BYTES
    for feature in features(schema):
        most += len(feature.name.encode()) + MOST_HEAD_BYTES
        most += 10 * len(feature.field.dims) if feature.is_shape else 0
    return most


def offset_columns(schema: Schema) -> int:
    return 1 + sum(1 + len(field.ragged_dims) for field in schema.fields)


def encode(schema: Schema, samples: Sequence[Sample]) -> list[EncodedFile]:
    """Return the files of a shard. FormatError: a sample breaks the schema, or is too large for protobuf."""
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
    """The records; checksums are made on demand."""

    def __init__(self, records: list[list[Buffer]]) -> None:
        self._records = records

    def __iter__(self) -> Iterator[Buffer]:
        return coalesce(itertools.chain.from_iterable(map(_with_crc, self._records)))


def _record(
    parts: tuple[_Feature, ...], sample: Sample, position: int
) -> tuple[list[Buffer], list[int]]:
    """Return a record's bytes, and its row of the offsets."""
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
        raise FormatError(sample_too_large_message(length))
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


def open_shard(path: Path, schema: Schema, samples: int) -> MappedShard:
    """Return the mapped shard; checksums are not verified. May raise CorruptShardError."""
    memory = map_file(path)
    offsets_path = path.with_suffix(OFFSETS)
    offsets_memory, offsets = open_integer_table(
        offsets_path, (samples, offset_columns(schema))
    )
    data = np.frombuffer(memory, np.uint8)
    found = _ragged_columns(schema, data, offsets)
    if found is None:
        raise CorruptShardError(
            f"{offsets_path}: values do not lie in {path.name} as it says; run growcache check"
        )
    return MappedShard(schema, samples, [memory, offsets_memory], {}, found)


def _ragged_columns(
    schema: Schema, data: Bytes, offsets: Integers
) -> dict[str, RaggedColumn] | None:
    """Return the columns; None if a value is outside of its record."""
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
        # Compared this way, for the sum of two that are not to be trusted may overflow.
        if (starts > ends - encoding.RECORD_TAIL_BYTES - lengths).any():
            return None
        found[field.name] = RaggedColumn(data, starts, lengths, dims)
        column = stop
    return found


def bad_records(shard: MappedShard) -> list[int]:
    """Return the samples whose framing or CRC32C is wrong."""
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
