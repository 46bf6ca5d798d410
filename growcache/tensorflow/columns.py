"""Arrays of the loader's batches as tensors: what each field comes as, and what is made of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from growcache.loading.ragged import RaggedStyle
from growcache.schema import Array, Field
from growcache.tensorflow.tensors import Form, Spec, Tensor, nested, spec


def style_of(form: Form) -> RaggedStyle:
    """Return how the loader is to deliver what is ragged.

    Where that is bytes and strings alone, single values are what TensorFlow takes.
    """
    ragged = [field for field in form.fields if field.is_ragged]
    if all(field.is_blob for field in ragged):
        return "list"
    return "pad" if form.style == "pad" else "offsets"


@dataclass(frozen=True)
class Column:
    """A field on its way from the loader into a tensor.

    Attributes:
        field: of the cache.
        style: in which the loader delivers it.
    """

    field: Field
    style: RaggedStyle

    @functools.cached_property
    def specs(self) -> dict[str, Spec]:
        """What `arrays` returns, as TensorFlow is told; batches are of any length here."""
        field, name = self.field, self.field.name
        if field.is_blob:
            return {name: spec(tf.string, [None])}
        dtype = tf.as_dtype(field.item)
        if not field.is_ragged:
            return {name: spec(dtype, [None, *field.fixed_shape])}
        if self.style == "pad":
            sizes = [None] if len(field.ragged_dims) == 1 else [None, len(field.ragged_dims)]
            padded = spec(dtype, [None, *field.dims])
            return {name: padded, f"{name}_lengths": spec(tf.int64, sizes)}
        if field.ragged_dims == (0,):
            values = spec(dtype, [None, *field.dims[1:]])
            return {name: values, f"{name}_offsets": spec(tf.int64, [None])}
        shapes = spec(tf.int64, [None, len(field.dims)])
        return {name: spec(dtype, [None]), f"{name}_shapes": shapes}

    def arrays(self, batch: Mapping[str, Any]) -> list[Array]:
        """Return what of a loader's batch this field is, in the order of `specs`."""
        if self.field.is_blob:
            return [self._blobs(batch)]
        return [batch[name] for name in self.specs]

    def nothing(self) -> list[Array]:
        """Return what stands for no batch at all."""
        return [
            np.empty([size or 0 for size in each.shape], each.dtype.as_numpy_dtype)
            for each in self.specs.values()
        ]

    def tensors(self, values: Mapping[str, Tensor], rows: int | None) -> dict[str, Tensor]:
        """Return what a batch holds of this field.

        Args:
            values: by the names of `specs`.
            rows: of every batch, where that is known beforehand.
        """
        field, name = self.field, self.field.name
        if field.is_blob or not field.is_ragged or self.style == "pad":
            return {key: _of_rows(values[key], rows) for key in self.specs}
        if field.ragged_dims == (0,):
            splits = _of_rows(values[f"{name}_offsets"], None if rows is None else rows + 1)
            flat = values[name]
            return {name: tf.RaggedTensor.from_row_splits(flat, splits, validate=False)}
        return {name: nested(values[name], _of_rows(values[f"{name}_shapes"], rows), field)}

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


def _of_rows(values: Tensor, rows: int | None) -> Tensor:
    """Return the tensor, its first dimension known."""
    if rows is None or values.shape[0] == rows:
        return values
    return tf.ensure_shape(values, [rows, *values.shape[1:]])
