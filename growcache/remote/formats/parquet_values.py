"""Columns of Arrow as one value per row: numbers, lists of them, bytes and strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.schema import Array

_COPIED_BYTES = 1 << 22  # of the rows of a batch, that each may have of its own

Column = tuple[Sequence[Any] | Array, Array]
"""A value per row, and which rows have none."""


def check_type(name: str, type_: Any) -> None:
    """Refuse a column that has no place in a sample.

    Raises:
        FormatError: names the column, its type, and what can be done.
    """
    if _kind(type_) is None:
        raise FormatError(
            f"column {name!r:.40} has type {str(type_)[:60]}; numbers, bool, times, strings, "
            "binary and lists of numbers can be read: leave it out of source.options.columns"
        )


def is_variable(type_: Any) -> bool:
    """Whether few bytes of the object can stand for a value of any length."""
    return _kind(type_) in ("text", "binary", "list", "dictionary")


def nbytes_of(array: Any) -> int:
    """Return the bytes of a column's rows, without those that all rows of a file may share."""
    import pyarrow as pa

    return int((array.indices if pa.types.is_dictionary(array.type) else array).nbytes)


def values_of(name: str, array: Any) -> Column:
    """Return the rows of a column.

    Null is NaN among floating point numbers. Elsewhere it is no value: such rows are marked.

    Raises:
        FormatError: it is of another type, or holds text that is no Unicode.
    """
    import pyarrow as pa

    kind, type_ = _kind(array.type), array.type
    if kind == "dictionary":
        if _kind(type_.value_type) in ("text", "binary"):
            return _shared(name, array)
        return values_of(name, array.cast(type_.value_type))
    if kind in ("text", "binary"):
        try:
            found = array.to_pylist()
        except UnicodeDecodeError as error:
            raise FormatError(
                f"column {name!r:.40} has text that is no UTF-8: {error}"
            ) from None
        return found, np.fromiter((value is None for value in found), np.bool_, len(found))
    if kind == "list":
        return _lists(name, array)
    if kind == "time":
        array = array.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    return _numbers(array)


def _shared(name: str, array: Any) -> Column:
    """Return the rows of a column of which many may have one long value."""
    absent = array.is_null().to_numpy(zero_copy_only=False)
    at = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
    if int(_lengths(array.dictionary, at).sum()) <= _COPIED_BYTES:
        return values_of(name, array.dictionary_decode())
    some, places = np.unique(at[~absent], return_inverse=True)
    values, _ = values_of(name, array.dictionary.take(some))
    found: list[Any] = [None] * len(array)
    for row, place in zip(np.flatnonzero(~absent).tolist(), places.tolist(), strict=True):
        found[row] = values[place]
    # The dictionary itself may hold a value that is none.
    return found, np.fromiter((value is None for value in found), np.bool_, len(found))


def _lengths(values: Any, at: Array) -> Array:
    """Return how many bytes some of the values have, of text or bytes."""
    import pyarrow as pa

    type_ = values.type
    if not len(values) or pa.types.is_fixed_size_binary(type_):
        return np.full(len(at), type_.byte_width if len(values) else 0, np.int64)
    large = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
    offsets = np.frombuffer(values.buffers()[1], np.int64 if large else np.int32)
    places = at.astype(np.int64) + values.offset
    lengths: Array = offsets[places + 1].astype(np.int64) - offsets[places]
    return lengths


def _kind(type_: Any) -> str | None:
    from pyarrow import types

    if types.is_dictionary(type_):
        return "dictionary" if _kind(type_.value_type) in ("text", "binary", "number") else None
    if types.is_string(type_) or types.is_large_string(type_):
        return "text"
    if types.is_binary(type_) or types.is_large_binary(type_):
        return "binary"
    if types.is_fixed_size_binary(type_) and not types.is_decimal(type_):
        return "binary"
    if types.is_temporal(type_) and not types.is_interval(type_):
        return "time"
    if types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_):
        return "number"
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        inner = type_.value_type
        fixed = types.is_fixed_size_list(inner) and _kind(inner) == "list"
        return "list" if fixed or _kind(inner) in ("number", "time") else None
    return None


def _numbers(array: Any) -> tuple[Array, Array]:
    import pyarrow as pa
    import pyarrow.compute as pc

    missing = np.zeros(len(array), np.bool_)
    if array.null_count:
        absent = array.is_null().to_numpy(zero_copy_only=False)
        if pa.types.is_floating(array.type):
            return array.to_numpy(zero_copy_only=False), missing
        # Without nulls, for else integers would come as floating point numbers.
        zero = pa.scalar(False if pa.types.is_boolean(array.type) else 0, array.type)
        return pc.fill_null(array, zero).to_numpy(zero_copy_only=False), absent
    return array.to_numpy(zero_copy_only=False), missing


def _lists(name: str, array: Any) -> Column:
    import pyarrow as pa

    count, absent = len(array), np.zeros(len(array), np.bool_)
    if array.null_count:
        absent = array.is_null().to_numpy(zero_copy_only=False).copy()
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        inner, gone = _inner(
            name, array.values[array.offset * size : (array.offset + count) * size]
        )
        shaped = inner.reshape(count, size, *inner.shape[1:])
        return shaped, absent | gone.reshape(count, -1).any(1)
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    first = int(offsets[0]) if len(offsets) else 0
    inner, gone = _inner(name, array.values[first : int(offsets[-1]) if len(offsets) else 0])
    bounds = list(
        zip((offsets[:-1] - first).tolist(), (offsets[1:] - first).tolist(), strict=True)
    )
    if gone.any():
        absent |= np.array([gone[start:stop].any() for start, stop in bounds])
    return [inner[start:stop] for start, stop in bounds], absent


def _inner(name: str, array: Any) -> tuple[Array, Array]:
    """Return the values of all lists as one array, and which of its first axis are null."""
    values, missing = values_of(name, array)
    assert isinstance(values, np.ndarray)
    return values, missing
