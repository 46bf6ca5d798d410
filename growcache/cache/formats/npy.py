"""Shards as directories of `.npy` files, which `numpy.load(mmap_mode="r")` reads anywhere.

    NAME.npy          [samples, *shape]; of a ragged field the values, one after the other:
                      [rows, *shape[1:]] where only the first dimension is ragged, else one
                      dimension of items; of bytes and strings uint8
    NAME.offsets.npy  int64 [samples + 1], of a ragged field: the first row of each value
    NAME.shapes.npy   int64 [samples, dimensions], if the number of rows does not determine them

The author of the data may have chosen a field's name. In a file's name it is percent-encoded,
including dots, so it can neither leave the directory nor replace another file.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from growcache.cache.files import ARRAYS
from growcache.cache.formats.encoding import (
    EncodedFile,
    checked_lengths,
    coalesce,
    file_of_buffers,
    integer_table,
    npy_header,
    open_integer_table,
    open_npy_array,
    value_bytes,
)
from growcache.cache.formats.mapped import (
    Buffer,
    Bytes,
    Integers,
    MappedShard,
    RaggedColumn,
    empty_shard,
)
from growcache.errors import CorruptShardError, FormatError
from growcache.schema import Field, Sample, Schema

EXTENSION = ARRAYS
LAYOUT_VERSION = 1  # part of the fingerprint; raise it if any byte of a shard changes

VALUES, OFFSETS, SHAPES = ".npy", ".offsets.npy", ".shapes.npy"
MOST_NAME_BYTES = 255 - len(OFFSETS)  # of a file name


def file_stem(field: Field) -> str:
    """Return the field's name as a file name. May raise FormatError.

    >>> file_stem(Field("../a b", "<f4", ()))
    '%2E%2E%2Fa%20b'
    """
    try:
        stem = quote(field.name, safe="").replace(".", "%2E")
    except UnicodeEncodeError as error:
        raise FormatError(
            f"a field's name must be valid Unicode: {error}", code="GC306"
        ) from None
    if len(stem) > MOST_NAME_BYTES:
        raise FormatError(
            f"the field {field.name[:40]!r}… has a name that is too long for a file "
            f"({len(stem)} bytes of at most {MOST_NAME_BYTES}); choose a shorter name, or set "
            "cache.format: tfrecord",
            code="GC306",
        )
    return stem


def suffixes(schema: Schema) -> tuple[str, ...]:
    return tuple(
        f"{ARRAYS}/{file_stem(field)}{end}" for field in schema.fields for end in _ends(field)
    )


def _ends(field: Field) -> tuple[str, ...]:
    if not field.is_ragged:
        return (VALUES,)
    return (VALUES, OFFSETS, SHAPES) if _has_shapes(field) else (VALUES, OFFSETS)


def _has_shapes(field: Field) -> bool:
    return field.needs_shape and not _by_rows(field)


def _by_rows(field: Field) -> bool:
    return field.ragged_dims == (0,)


def _row_shape(field: Field) -> tuple[int, ...]:
    return tuple(size or 0 for size in field.dims[1:]) if _by_rows(field) else ()


def record_bytes(schema: Schema, sample_bytes: float) -> int:
    """Return the approximate bytes of a sample on disk, without headers.

    May raise FormatError.
    """
    tables = len(suffixes(schema)) - len(schema.fields)
    return int(sample_bytes) + 8 * tables


def largest_sample(schema: Schema) -> int:
    return 2**62


def encode(schema: Schema, samples: Sequence[Sample]) -> list[EncodedFile]:
    """Return the files of a shard, which share the memory of large values.

    May raise FormatError.
    """
    if not samples:
        return []
    found = itertools.chain.from_iterable(_encode(f, samples) for f in schema.fields)
    return [
        file_of_buffers(suffix, buffers)
        for suffix, buffers in zip(suffixes(schema), found, strict=True)
    ]


def _encode(field: Field, samples: Sequence[Sample]) -> list[list[Buffer]]:
    name, where = field.name, field.ragged_dims
    pairs = [value_bytes(field, where, sample.get(name)) for sample in samples]
    values = [*coalesce(raw for raw, _ in pairs)]
    if not field.is_ragged:
        return [[npy_header(field.item_dtype.str, (len(samples), *field.fixed_shape)), *values]]
    if _by_rows(field):
        rows = [dims[0] for _, dims in pairs]
    else:
        rows = [len(raw) // field.item_dtype.itemsize for raw, _ in pairs]
    offsets = np.cumsum([0, *rows])
    head = npy_header(field.item_dtype.str, (int(offsets[-1]), *_row_shape(field)))
    files: list[list[Buffer]] = [[head, *values], [*integer_table(offsets)]]
    if _has_shapes(field):
        files.append([*integer_table(np.array([field.shape_of(dims) for _, dims in pairs]))])
    return files


def open_shard(path: str | os.PathLike[str], schema: Schema, samples: int) -> MappedShard:
    """Return the mapped shard without verifying checksums. May raise CorruptShardError."""
    if not samples:
        return empty_shard(schema)
    memories: list[Bytes] = []
    fields: dict[str, Bytes] = {}
    ragged: dict[str, RaggedColumn] = {}
    for field in schema.fields:
        stem = Path(path) / file_stem(field)
        if field.is_ragged:
            maps, ragged[field.name] = _open_ragged(stem, field, samples)
            memories += maps
        else:
            shape = (samples, *field.fixed_shape)
            memory, data = open_npy_array(_with_end(stem, VALUES), field.item_dtype.str, shape)
            fields[field.name] = data.reshape(samples, field.nbytes)
            memories.append(memory)
    return MappedShard(schema, samples, memories, fields, ragged)


def _with_end(stem: Path, end: str) -> Path:
    return stem.with_name(stem.name + end)


def _open_ragged(stem: Path, field: Field, samples: int) -> tuple[list[Bytes], RaggedColumn]:
    offsets_map, offsets = open_integer_table(_with_end(stem, OFFSETS), (samples + 1,))
    rows, total = np.diff(offsets), int(offsets[-1])
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        raise _offsets_error(_with_end(stem, OFFSETS))
    row_shape = _row_shape(field)
    values_map, data = open_npy_array(
        _with_end(stem, VALUES), field.item_dtype.str, (total, *row_shape)
    )
    row_bytes = math.prod(row_shape) * field.item_dtype.itemsize
    maps, lengths = [values_map, offsets_map], _in_bytes(rows, row_bytes)
    if _has_shapes(field):
        path = _with_end(stem, SHAPES)
        shapes_map, shapes = open_integer_table(path, (samples, len(field.dims)))
        maps.append(shapes_map)
        dims = _checked_dims(path, field, shapes, lengths)
    else:
        dims = _dims(_with_end(stem, OFFSETS), field, rows, lengths)
    return maps, RaggedColumn(data, _in_bytes(offsets[:-1], row_bytes), lengths, dims)


def _in_bytes(rows: Integers, row_bytes: int) -> Integers:
    return rows if row_bytes == 1 else rows * row_bytes


def _dims(path: Path, field: Field, rows: Integers, lengths: Integers) -> Integers:
    """Return the sizes of the only ragged dimension: int64 [samples, 1]."""
    if _by_rows(field):
        return rows[:, None]
    sizes, rest = np.divmod(lengths, field.unit_bytes)
    if rest.any():
        raise _offsets_error(path)
    return sizes[:, None]


def _checked_dims(path: Path, field: Field, shapes: Integers, lengths: Integers) -> Integers:
    """Return the sizes of the ragged dimensions: int64 [samples, k]."""
    fixed = np.array([size is not None for size in field.dims])
    wanted = [size for size in field.dims if size is not None]
    dims = shapes[:, ~fixed]
    found = checked_lengths(dims, field.unit_bytes, int(lengths.max()))
    if found is None or (found != lengths).any() or (shapes[:, fixed] != wanted).any():
        raise _offsets_error(path)
    return dims


def _offsets_error(path: Path) -> CorruptShardError:
    return CorruptShardError(f"{path}: the values are not where it says; run growcache check")


def bad_records(shard: MappedShard) -> list[int]:
    """Return nothing, because there are no records, and `check` verifies the CRC32C of the files."""
    return []
