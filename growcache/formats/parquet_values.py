"""The values of a Parquet file's columns, from Arrow to samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson

from growcache.errors import FormatError
from growcache.formats.parquet_columns import ColumnField, column_kind, is_list
from growcache.schema import Array

_OBJECT_BYTES = 64  # of a Python object, in addition to its text
_MOST_PYTHON_BYTES = 1 << 25  # of rows that are becoming JSON text
_COPIED_BYTES = 1 << 22  # of the rows of a batch that may each have their own copy


@dataclass(frozen=True, slots=True)
class ColumnValues:
    """A value per row, and the rows that have none."""

    values: Sequence[Any] | Array
    absent: Array
    uneven: Array | None = None  # rows without a value, because their lists are uneven

    def reason(self, name: str, at: int, row: int) -> str:
        if self.uneven is not None and self.uneven[at]:
            return (
                f"column {name!r:.40} has lists of different lengths in row {row}, which do "
                f"not form an array; name it in source.options.json: [{name:.40}]"
            )
        return (
            f"column {name!r:.40} is null in row {row}, which only floating point "
            "numbers can be (NaN); set nulls: drop to leave such rows out"
        )


def field_values(field: ColumnField, batch: Any) -> ColumnValues:
    array = field_column(field, batch)
    if field.kind == "json":
        return _json_values(field.name, array)
    if field.kind == "decimal text":
        import pyarrow as pa

        array = array.cast(pa.string())
    return column_values(field.name, array)


def field_column(field: ColumnField, batch: Any) -> Any:
    """Return the column of a field. A null struct is null in all of its fields."""
    import pyarrow.compute as pc

    array = batch.column(field.path[0])
    for name in field.path[1:]:
        array = pc.struct_field(array, [array.type.get_field_index(name)])
    return array


def column_bytes(array: Any) -> int:
    """Return the bytes of rows, without those that all rows of a file may share."""
    import pyarrow as pa

    return int((array.indices if pa.types.is_dictionary(array.type) else array).nbytes)


def column_values(name: str, array: Any) -> ColumnValues:
    """Return the values of a column.

    Null becomes NaN in floats; other rows have no value then.
    """
    import pyarrow as pa

    kind, type_ = column_kind(array.type), array.type
    if kind == "dictionary":
        if column_kind(type_.value_type) in ("text", "binary"):
            return _dictionary_values(name, array)
        return column_values(name, array.cast(type_.value_type))
    if kind in ("text", "binary"):
        try:
            found = array.to_pylist()
        except UnicodeDecodeError as error:
            raise FormatError(
                f"column {name!r:.40} has text that is not valid UTF-8: {error}", code="GC302"
            ) from None
        return ColumnValues(found, _is_none(found))
    if kind == "list":
        return _list_values(name, array)
    if kind == "time":
        array = array.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    if kind == "decimal":
        array = array.cast(pa.float64())
    return _number_values(array)


def _is_none(found: Sequence[Any]) -> Array:
    return np.fromiter((value is None for value in found), np.bool_, len(found))


def _dictionary_values(name: str, array: Any) -> ColumnValues:
    absent = array.is_null().to_numpy(zero_copy_only=False)
    at = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
    if int(_lengths(array.dictionary, at).sum()) <= _COPIED_BYTES:
        return column_values(name, array.dictionary_decode())
    some, places = np.unique(at[~absent], return_inverse=True)
    values = column_values(name, array.dictionary.take(some)).values
    found: list[Any] = [None] * len(array)
    for row, place in zip(np.flatnonzero(~absent).tolist(), places.tolist(), strict=True):
        found[row] = values[place]
    # The dictionary itself may contain a null.
    return ColumnValues(found, _is_none(found))


def _lengths(values: Any, at: Array) -> Array:
    import pyarrow as pa

    type_ = values.type
    if not len(values) or pa.types.is_fixed_size_binary(type_):
        return np.full(len(at), type_.byte_width if len(values) else 0, np.int64)
    large = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
    offsets = np.frombuffer(values.buffers()[1], np.int64 if large else np.int32)
    places = at.astype(np.int64) + values.offset
    lengths: Array = offsets[places + 1].astype(np.int64) - offsets[places]
    return lengths


def _number_values(array: Any) -> ColumnValues:
    import pyarrow as pa
    import pyarrow.compute as pc

    missing = np.zeros(len(array), np.bool_)
    if array.null_count:
        absent = array.is_null().to_numpy(zero_copy_only=False)
        if pa.types.is_floating(array.type):
            return ColumnValues(array.to_numpy(zero_copy_only=False), missing)
        # Without nulls, because otherwise integers would become floats.
        zero = pa.scalar(False if pa.types.is_boolean(array.type) else 0, array.type)
        return ColumnValues(pc.fill_null(array, zero).to_numpy(zero_copy_only=False), absent)
    return ColumnValues(array.to_numpy(zero_copy_only=False), missing)


@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists of any depth: element i is leaves[starts[i]:starts[i + 1]] with the shape shapes[i]."""

    leaves: Array
    starts: Array
    shapes: Array
    absent: Array
    uneven: Array  # elements without a shape, because their lists differ


def _list_values(name: str, array: Any) -> ColumnValues:
    found = _lists_in(name, array)
    sizes = _fixed_sizes(array.type)
    if None not in sizes:
        return ColumnValues(found.leaves.reshape(len(array), *sizes), found.absent)
    spans = zip(found.starts[:-1].tolist(), found.starts[1:].tolist(), strict=True)
    if len(sizes) == 1:
        return ColumnValues([found.leaves[start:stop] for start, stop in spans], found.absent)
    bad = found.absent | found.uneven
    shapes = map(tuple, found.shapes.tolist())
    values = [
        None if wrong else found.leaves[start:stop].reshape(shape)
        for (start, stop), wrong, shape in zip(spans, bad.tolist(), shapes, strict=True)
    ]
    return ColumnValues(values, bad, found.uneven)


def _lists_in(name: str, array: Any) -> _Lists:
    if not is_list(array.type):
        found = column_values(name, array)
        count = len(array)
        return _Lists(
            np.asarray(found.values),
            np.arange(count + 1),
            np.empty((count, 0), np.int64),
            found.absent,
            np.zeros(count, np.bool_),
        )
    bounds, items = _items_of_lists(array)
    inner = _lists_in(name, items)
    lengths, some = np.diff(bounds), np.diff(bounds) > 0
    shapes = np.zeros((len(array), 1 + inner.shapes.shape[1]), np.int64)
    shapes[:] = [size or 0 for size in _fixed_sizes(array.type)]
    shapes[:, 0] = lengths
    uneven = _any_between(inner.uneven, bounds)
    if some.any() and inner.shapes.size:
        least = np.minimum.reduceat(inner.shapes, bounds[:-1][some])
        most = np.maximum.reduceat(inner.shapes, bounds[:-1][some])
        shapes[some, 1:] = least
        uneven[some] |= (least != most).any(1)
    absent = _nulls(array) | _any_between(inner.absent, bounds)
    return _Lists(inner.leaves, inner.starts[bounds], shapes, absent, uneven & ~absent)


def _fixed_sizes(type_: Any) -> list[int | None]:
    """Return the size of each dimension, with None for sizes that may differ."""
    from pyarrow import types

    sizes: list[int | None] = []
    while is_list(type_):
        sizes.append(type_.list_size if types.is_fixed_size_list(type_) else None)
        type_ = type_.value_type
    return sizes


def _items_of_lists(array: Any) -> tuple[Array, Any]:
    """Return the start of each list's items, and the items of all lists."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(array.type):
        size, first = array.type.list_size, array.offset
        items = array.values[first * size : (first + len(array)) * size]
        return np.arange(len(array) + 1) * size, items
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    if not len(offsets):
        offsets = np.zeros(1, np.int64)
    return offsets - offsets[0], array.values[int(offsets[0]) : int(offsets[-1])]


def _any_between(marked: Array, bounds: Array) -> Array:
    if not marked.any():
        return np.zeros(len(bounds) - 1, np.bool_)
    counts = np.concatenate([[0], np.cumsum(marked)])
    between: Array = counts[bounds[1:]] > counts[bounds[:-1]]
    return between


def _nulls(array: Any) -> Array:
    if not array.null_count:
        return np.zeros(len(array), np.bool_)
    nulls: Array = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _json_values(name: str, array: Any) -> ColumnValues:
    absent = _nulls(array)
    if _python_bytes(array) <= _MOST_PYTHON_BYTES:
        found = [_json_text(value) for value in array.to_pylist(maps_as_pydicts="strict")]
    else:
        found = [_single_row(name, array.slice(i, 1)) for i in range(len(array))]
    return ColumnValues(found, absent)


def _single_row(name: str, array: Any) -> str:
    if (nbytes := _python_bytes(array)) > _MOST_PYTHON_BYTES:
        raise FormatError(
            f"column {name!r:.40} has a row of about {nbytes:,} bytes, but one that becomes "
            f"JSON text may take at most {_MOST_PYTHON_BYTES:,}; leave it out of "
            "source.options.columns",
            code="GC305",
        )
    return _json_text(array.to_pylist(maps_as_pydicts="strict")[0])


def _python_bytes(array: Any) -> int:
    """Return the approximate bytes of an array as Python objects."""
    from pyarrow import types

    own = _OBJECT_BYTES * len(array)
    if types.is_struct(array.type):
        return own + sum(map(_python_bytes, array.flatten()))
    if types.is_map(array.type):
        start, stop = (array.offsets[i].as_py() for i in (0, len(array)))
        items = (_python_bytes(some[start:stop]) for some in (array.keys, array.items))
        return own + sum(items)
    if is_list(array.type):
        return own + _python_bytes(array.flatten())
    if types.is_dictionary(array.type) and column_kind(array.type.value_type) == "text":
        at = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return own + int(_lengths(array.dictionary, at).sum())
    return own + int(array.nbytes)


def _json_text(value: Any) -> str:
    return orjson.dumps(value, default=_json_default).decode()


def _json_default(value: Any) -> str:
    said: Callable[[], str] = getattr(value, "isoformat", partial(str, value))
    return said()
