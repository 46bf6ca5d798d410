"""What a batch is made of: fields of the cache as tensors of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from growcache.errors import ConfigError, FormatError
from growcache.loading.options import LoaderOptions, missing
from growcache.schema import Field, Schema

Tensor: TypeAlias = Any  # TensorFlow has no types
Spec: TypeAlias = Any

# What decode_raw has no kernel for is read as an integer of that size first.
SAME_SIZE = {"uint32": "int32", "uint64": "int64"}
DECODABLE = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "float16", "float32"}
    | {"float64", "complex64", "complex128"}
)


def spec(dtype: Any, shape: Sequence[int | None] = ()) -> Spec:
    """Return what TensorFlow is to expect."""
    return tf.TensorSpec(shape, dtype)


@dataclass(frozen=True, slots=True)
class Form:
    """Which fields batches are made of, and how.

    Attributes:
        fields: that are needed.
        style: of ragged ones, ``offsets`` or ``pad``.
        as_tuple: names in the order of a tuple; None for dicts.
    """

    fields: tuple[Field, ...]
    style: str
    as_tuple: tuple[str, ...] | None

    @classmethod
    def of(cls, schema: Schema, options: LoaderOptions, names: tuple[str, ...] | None) -> Form:
        """Return the form of the batches of a cache.

        Raises:
            ConfigError: ``names`` or the options' fields name one that is not there.
            FormatError: a field that TensorFlow cannot hold.
        """
        fields = options.chosen(schema).fields
        made = {name: field for field in fields for name in _made_of(field, options.ragged)}
        for name in names or ():
            if name not in made:
                raise ConfigError(f"as_tuple: {missing(name, list(made))}")
        if names is not None:
            fields = tuple(dict.fromkeys(made[name] for name in names))
        for field in fields:
            _refuse_unknown(field)
        return cls(fields, options.ragged, names)

    def batch(self, values: Mapping[str, Any]) -> Any:
        """Return what is delivered of the values by name."""
        if self.as_tuple is None:
            return dict(values)
        return tuple(values[name] for name in self.as_tuple)


def _made_of(field: Field, style: str) -> tuple[str, ...]:
    """Return the names in a batch that come of a field."""
    padded = style == "pad" and field.is_ragged and not field.is_blob
    return (field.name, f"{field.name}_lengths") if padded else (field.name,)


def _refuse_unknown(field: Field) -> None:
    name = field.item.name
    if name not in DECODABLE and name not in SAME_SIZE:
        raise FormatError(
            f"field {field.name!r} has dtype {name}, which TensorFlow does not have; cast it in "
            "sampling.transform, or leave it out by fields"
        )


def typed(raw: Tensor, field: Field) -> Tensor:
    """Return strings [batch] as tensors [batch, *shape]."""
    batch = raw.shape[0] if raw.shape[0] is not None else tf.shape(raw)[0]
    return tf.reshape(numbers(raw, field), [batch, *field.fixed_shape])


def numbers(raw: Tensor, field: Field) -> Tensor:
    """Return strings, all of one length, as numbers of the field's dtype."""
    wanted = field.item.name
    stored = SAME_SIZE.get(wanted, wanted)
    flat = tf.io.decode_raw(raw, tf.as_dtype(stored))
    return flat if stored == wanted else tf.bitcast(flat, tf.as_dtype(wanted))


def rows_of(flat: Tensor, lengths: Tensor, field: Field) -> Tensor:
    """Return values of which the first dimension alone is ragged: `nested`, in fewer steps.

    Args:
        flat: [total], the numbers of all values.
        lengths: int64 [batch], of each.
        field: that they are of.
    """
    values = tf.reshape(flat, [tf.reduce_sum(lengths), *field.dims[1:]])
    return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)


def nested(flat: Tensor, shapes: Tensor, field: Field) -> Tensor:
    """Return values that lie one behind the other as a ragged tensor.

    Args:
        flat: [total], the numbers of all values.
        shapes: int64 [batch, rank].
        field: that they are of; what is fixed in it is uniform in the tensor.
    """
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
