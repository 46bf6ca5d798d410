"""Records of shards as TensorFlow's own code reads and parses them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from growcache.cache.formats.ragged import SHAPE_SUFFIX
from growcache.cache.formats.tfrecord import record_layout
from growcache.schema import Field, Schema
from growcache.tensorflow.pipeline import Dataset
from growcache.tensorflow.tensors import (
    BatchForm,
    Tensor,
    decode_numbers,
    nested_ragged,
    ragged_rows,
    tensor_spec,
    typed_tensor,
)

# Below, to hand a record from thread to thread takes as long as to read it.
SMALL_RECORD_BYTES = 16 * 1024

READ_BYTES = 256 * 1024  # as TensorFlow does by itself
UNBUFFERED = 0  # to where it stays: a copy less


class RecordReader(Protocol):
    """How the records of a cache are read."""

    threads: int | None
    cuts: bool

    def read_bytes(self, sample_bytes: int) -> int: ...

    def read(self, paths: Tensor, read_bytes: Tensor) -> Dataset: ...

    def decode(self, records: Tensor) -> Any: ...


def record_reader(schema: Schema, form: BatchForm) -> RecordReader:
    return _ExampleRecords(form) if schema.is_ragged else _FixedRecords(schema, form)


class _FixedRecords:
    """Records of one length, in which every value has a fixed place.

    TFRecord's own checksums are not checked, because each shard's digest was.
    """

    def __init__(self, schema: Schema, form: BatchForm) -> None:
        where = record_layout(schema)
        offsets = {field.name: offset for field, offset in where.fields}
        self._record_bytes = where.record_bytes
        small = where.record_bytes < SMALL_RECORD_BYTES
        self.threads: int | None = None if small else tf.data.AUTOTUNE
        self.cuts = True  # slices share the memory
        self._offsets = [(field, offsets[field.name]) for field in form.fields]
        self._form = form

    def read_bytes(self, sample_bytes: int) -> int:
        return READ_BYTES

    def read(self, paths: Tensor, read_bytes: Tensor) -> Dataset:
        found = tf.raw_ops.FixedLengthRecordDatasetV2(
            filenames=paths,
            header_bytes=np.int64(0),
            record_bytes=np.int64(self._record_bytes),
            footer_bytes=np.int64(0),
            buffer_size=read_bytes,
            compression_type="",
        )
        return tf.data.experimental.from_variant(found, tensor_spec(tf.string))

    def decode(self, records: Tensor) -> Any:
        batch = records.shape[0] if records.shape[0] is not None else tf.shape(records)[0]
        rows = tf.reshape(tf.io.decode_raw(records, tf.uint8), [batch, self._record_bytes])
        values = {
            field.name: _fixed_tensor(rows[:, offset : offset + field.nbytes], batch, field)
            for field, offset in self._offsets
        }
        return self._form.batch(values)


def _fixed_tensor(raw: Tensor, batch: Tensor, field: Field) -> Tensor:
    """Return uint8 [batch, nbytes] as tensors [batch, *shape]."""
    dtype, nbytes = tf.as_dtype(field.item_dtype), field.nbytes
    if dtype == tf.bool:
        cells = tf.cast(raw, tf.bool)
    elif dtype.size == 1:
        cells = tf.bitcast(raw, dtype)
    else:
        cells = tf.bitcast(tf.reshape(raw, [batch, nbytes // dtype.size, dtype.size]), dtype)
    return tf.reshape(cells, [batch, *field.fixed_shape])


class _ExampleRecords:
    """Records that differ in length: `tf.train.Example`s, parsed a batch at a time."""

    def __init__(self, form: BatchForm) -> None:
        self.threads: int | None = tf.data.AUTOTUNE
        self.cuts = False
        self._form = form
        self._features = {}
        for field in form.fields:
            self._features[field.name] = tf.io.FixedLenFeature([], tf.string)
            if field.needs_shape:
                shape = tf.io.FixedLenFeature([len(field.shape)], tf.int64)
                self._features[field.name + SHAPE_SUFFIX] = shape

    def read_bytes(self, sample_bytes: int) -> int:
        return READ_BYTES if sample_bytes < SMALL_RECORD_BYTES else UNBUFFERED

    def read(self, paths: Tensor, read_bytes: Tensor) -> Dataset:
        found = tf.raw_ops.TFRecordDataset(
            filenames=paths, compression_type="", buffer_size=read_bytes
        )
        return tf.data.experimental.from_variant(found, tensor_spec(tf.string))

    def decode(self, records: Tensor) -> Any:
        parsed = tf.io.parse_example(records, self._features)
        values: dict[str, Any] = {}
        for field in self._form.fields:
            values |= _decode_field(field, parsed, self._form.style)
        return self._form.batch(values)


def _decode_field(field: Field, parsed: dict[str, Tensor], style: str) -> dict[str, Any]:
    raw = parsed[field.name]
    if field.is_blob:
        return {field.name: raw}
    if not field.is_ragged:
        return {field.name: typed_tensor(raw, field)}
    flat = decode_numbers(tf.strings.reduce_join(raw), field)
    if style == "offsets" and field.ragged_dims == (0,) and not field.needs_shape:
        return {field.name: ragged_rows(flat, _lengths(raw, field), field)}
    shapes = parsed[field.name + SHAPE_SUFFIX] if field.needs_shape else _shapes(raw, field)
    values = nested_ragged(flat, shapes, field)
    if style == "offsets":
        return {field.name: values}
    lengths = tf.gather(shapes, field.ragged_dims, axis=1)
    if len(field.ragged_dims) == 1:
        lengths = lengths[:, 0]
    return {field.name: values.to_tensor(), f"{field.name}_lengths": lengths}


def _shapes(raw: Tensor, field: Field) -> Tensor:
    """Return int64 [batch, rank], read from the bytes of the values."""
    found = _lengths(raw, field)
    sizes = [found if size is None else tf.fill(tf.shape(raw), size) for size in field.dims]
    return tf.stack([tf.cast(size, tf.int64) for size in sizes], axis=1)


def _lengths(raw: Tensor, field: Field) -> Tensor:
    """Return int64 [batch], the sizes of the ragged dimension."""
    return tf.cast(tf.strings.length(raw), tf.int64) // field.unit_bytes
