"""Fields of the cache as TensorFlow tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from growcache.errors import ConfigError, FormatError
from growcache.loading.options import LoaderOptions, unknown_field
from growcache.loading.ragged import RaggedStyle
from growcache.schema import Array, Field, Schema

Tensor: TypeAlias = Any  # TensorFlow has no types
Spec: TypeAlias = Any

# Types that decode_raw lacks; they are read as integers of the same size first.
SAME_SIZE = {"uint32": "int32", "uint64": "int64"}
DECODABLE = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "float16", "float32"}
    | {"float64", "complex64", "complex128"}
)


def tensor_spec(dtype: Any, shape: Sequence[int | None] = ()) -> Spec:
    return tf.TensorSpec(shape, dtype)


@dataclass(frozen=True, slots=True)
class BatchForm:
    fields: tuple[Field, ...]
    style: str
    as_tuple: tuple[str, ...] | None

    @classmethod
    def of(
        cls, schema: Schema, options: LoaderOptions, names: tuple[str, ...] | None
    ) -> BatchForm:
        fields = options.chosen(schema).fields
        made = {
            name: field for field in fields for name in _names_in_batch(field, options.ragged)
        }
        for name in names or ():
            if name not in made:
                raise ConfigError(f"as_tuple: {unknown_field(name, list(made))}", code="GC601")
        if names is not None:
            fields = tuple(dict.fromkeys(made[name] for name in names))
        for field in fields:
            _refuse_unknown(field)
        return cls(fields, options.ragged, names)

    def batch(self, values: Mapping[str, Any]) -> Any:
        if self.as_tuple is None:
            return dict(values)
        return tuple(values[name] for name in self.as_tuple)


def _names_in_batch(field: Field, style: str) -> tuple[str, ...]:
    padded = style == "pad" and field.is_ragged and not field.is_blob
    return (field.name, f"{field.name}_lengths") if padded else (field.name,)


def _refuse_unknown(field: Field) -> None:
    name = field.item_dtype.name
    if name not in DECODABLE and name not in SAME_SIZE:
        raise FormatError(
            f"field {field.name!r} has dtype {name}, which TensorFlow does not have; cast it in "
            "sampling.transform, or leave it out by fields",
            code="GC306",
        )


def typed_tensor(raw: Tensor, field: Field) -> Tensor:
    """Return strings [batch] as tensors ``[batch, *shape]``."""
    batch = raw.shape[0] if raw.shape[0] is not None else tf.shape(raw)[0]
    return tf.reshape(decode_numbers(raw, field), [batch, *field.fixed_shape])


def decode_numbers(raw: Tensor, field: Field) -> Tensor:
    wanted = field.item_dtype.name
    stored = SAME_SIZE.get(wanted, wanted)
    flat = tf.io.decode_raw(raw, tf.as_dtype(stored))
    return flat if stored == wanted else tf.bitcast(flat, tf.as_dtype(wanted))


def ragged_rows(flat: Tensor, lengths: Tensor, field: Field) -> Tensor:
    """Return values whose first dimension alone is ragged: `nested_ragged` in fewer steps."""
    values = tf.reshape(flat, [tf.reduce_sum(lengths), *field.dims[1:]])
    return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)


def nested_ragged(flat: Tensor, shapes: Tensor, field: Field) -> Tensor:
    """Return values that are stored back to back as a ragged tensor."""
    last = field.ragged_dims[-1]
    rows = [tf.reduce_prod(shapes[:, :level], axis=1) for level in range(last + 2)]
    values = tf.reshape(flat, [tf.reduce_sum(rows[last + 1]), *field.dims[last + 1 :]])
    for level in range(last, -1, -1):
        size = field.dims[level]
        if size is None:
            lengths = tf.repeat(shapes[:, level], rows[level])
            values = tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
        else:
            values = tf.RaggedTensor.from_uniform_row_length(
                values, size, nrows=tf.reduce_sum(rows[level]), validate=False
            )
    return values


def loader_style(form: BatchForm) -> RaggedStyle:
    ragged = [field for field in form.fields if field.is_ragged]
    if all(field.is_blob for field in ragged):
        return "list"
    return "pad" if form.style == "pad" else "offsets"


@dataclass(frozen=True)
class TensorColumn:
    field: Field
    style: RaggedStyle

    @functools.cached_property
    def specs(self) -> dict[str, Spec]:
        field, name = self.field, self.field.name
        if field.is_blob:
            return {name: tensor_spec(tf.string, [None])}
        dtype = tf.as_dtype(field.item_dtype)
        if not field.is_ragged:
            return {name: tensor_spec(dtype, [None, *field.fixed_shape])}
        if self.style == "pad":
            sizes = [None] if len(field.ragged_dims) == 1 else [None, len(field.ragged_dims)]
            padded = tensor_spec(dtype, [None, *field.dims])
            return {name: padded, f"{name}_lengths": tensor_spec(tf.int64, sizes)}
        if field.ragged_dims == (0,):
            values = tensor_spec(dtype, [None, *field.dims[1:]])
            return {name: values, f"{name}_offsets": tensor_spec(tf.int64, [None])}
        shapes = tensor_spec(tf.int64, [None, len(field.dims)])
        return {name: tensor_spec(dtype, [None]), f"{name}_shapes": shapes}

    def arrays(self, batch: Mapping[str, Any]) -> list[Array]:
        """Return the arrays of this field, in the order of `specs`."""
        if self.field.is_blob:
            return [self._blobs(batch)]
        return [batch[name] for name in self.specs]

    def nothing(self) -> list[Array]:
        return [
            np.empty([size or 0 for size in each.shape], each.dtype.as_numpy_dtype)
            for each in self.specs.values()
        ]

    def tensors(self, values: Mapping[str, Tensor], rows: int | None) -> dict[str, Tensor]:
        field, name = self.field, self.field.name
        if field.is_blob or not field.is_ragged or self.style == "pad":
            return {key: _with_rows(values[key], rows) for key in self.specs}
        if field.ragged_dims == (0,):
            splits = _with_rows(values[f"{name}_offsets"], None if rows is None else rows + 1)
            flat = values[name]
            return {name: tf.RaggedTensor.from_row_splits(flat, splits, validate=False)}
        return {
            name: nested_ragged(values[name], _with_rows(values[f"{name}_shapes"], rows), field)
        }

    def _blobs(self, batch: Mapping[str, Any]) -> Array:
        found, name = batch[self.field.name], self.field.name
        if isinstance(found, list):
            made = [value.encode() if isinstance(value, str) else value for value in found]
        elif self.style == "pad":
            lengths = batch[f"{name}_lengths"].tolist()
            made = [row[:n].tobytes() for row, n in zip(found, lengths, strict=True)]
        else:
            ends = itertools.pairwise(batch[f"{name}_offsets"].tolist())
            made = [found[start:stop].tobytes() for start, stop in ends]
        return np.array(made, object)


def _with_rows(values: Tensor, rows: int | None) -> Tensor:
    if rows is None or values.shape[0] == rows:
        return values
    return tf.ensure_shape(values, [rows, *values.shape[1:]])
