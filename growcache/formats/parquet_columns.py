"""What the columns of a Parquet file become: which are fields, and their values."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson

from growcache.errors import FormatError
from growcache.schema import Array

_MOST_DEPTH = 32  # of types in types
_OBJECT_BYTES = 64  # of one of Python's, in addition to its text
_MOST_PYTHON_BYTES = 1 << 25  # bytes of rows on the way to JSON text
_COPIED_BYTES = 1 << 22  # of the rows of a batch, that each may have of its own


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    columns: tuple[str, ...] | None = None
    json: tuple[str, ...] = ()  # columns that become JSON text
    decimals: str = "float64"  # or str


@dataclass(frozen=True, slots=True)
class ColumnField:
    """A field, and the column of the file that it is, or the part of a struct."""

    name: str
    path: tuple[str, ...]  # the column, and the names inside of its structs
    kind: str  # that of `column_kind`, or "json" or "decimal text"

    @property
    def stored(self) -> str:
        """The name by which Arrow reads it alone."""
        return ".".join(self.path)

    @property
    def is_variable(self) -> bool:
        """Whether a few bytes of the object can stand for a value of any length."""
        return self.kind in ("text", "binary", "list", "dictionary", "json")


def column_fields(schema: Any, options: ColumnOptions) -> list[ColumnField]:
    """Raise FormatError for what is wanted and cannot be read."""
    if not schema.names:
        raise FormatError("a table without columns")
    wanted = schema.names if options.columns is None else options.columns
    found = [field for name in wanted for field in _fields_of(schema, name, options)]
    names: set[str] = set()
    for field in found:
        if field.name in names:
            raise FormatError(f"two columns would be the field {field.name!r:.40}")
        names.add(field.name)
    for name in options.json:
        if name not in names:
            raise FormatError(f"source.options.json names {name!r:.40}, which is not read")
    return found


def _fields_of(schema: Any, name: str, options: ColumnOptions) -> Iterator[ColumnField]:
    path = _path_of(schema, name)
    type_ = schema.field(path[0]).type
    for part in path[1:]:
        type_ = type_.field(part).type
    yield from _flattened(name, path, type_, options)


def _path_of(schema: Any, name: str) -> tuple[str, ...]:
    """Return the path of a column, or of a value in a struct, as ``meta.author``."""
    if schema.names.count(name) == 1:
        return (name,)
    parts = name.split(".")
    for at in range(1, len(parts)):
        top, rest = ".".join(parts[:at]), parts[at:]
        if schema.names.count(top) == 1 and _has_path(schema.field(top).type, rest):
            return (top, *rest)
    close = difflib.get_close_matches(name, schema.names, n=1)
    shown = ", ".join(f"{one!r:.40}" for one in schema.names[:8])
    hint = f"did you mean {close[0]!r:.40}?" if close else f"there are {shown}"
    raise FormatError(f"expected one column {name!r:.40}; {hint}")


def _has_path(type_: Any, path: Sequence[str]) -> bool:
    from pyarrow import types

    for name in path:
        if not types.is_struct(type_) or type_.get_field_index(name) < 0:
            return False
        type_ = type_.field(name).type
    return True


def _flattened(
    name: str, path: tuple[str, ...], type_: Any, options: ColumnOptions
) -> Iterator[ColumnField]:
    from pyarrow import types

    if name in options.json:
        if not _is_json(type_):
            raise FormatError(
                f"column {name!r:.40} has type {str(type_)[:60]}, which is no JSON"
            )
        yield ColumnField(name, path, "json")
    elif not types.is_struct(type_):
        yield ColumnField(name, path, _checked_kind(name, type_, options))
    elif _is_file(type_):
        yield ColumnField(name, (*path, "bytes"), "binary")
    else:
        if len(path) > _MOST_DEPTH or not type_.num_fields:
            raise FormatError(f"column {name!r:.40} is a struct without fields, or too deep")
        for i in range(type_.num_fields):
            inner = type_.field(i)
            yield from _flattened(
                f"{name}.{inner.name}", (*path, inner.name), inner.type, options
            )


def _is_file(type_: Any) -> bool:
    """Whether it is what the library ``datasets`` writes for an image or a sound."""
    from pyarrow import types

    if {type_.field(i).name for i in range(type_.num_fields)} != {"bytes", "path"}:
        return False
    data, path = type_.field("bytes").type, type_.field("path").type
    return column_kind(data) == "binary" and (
        types.is_null(path) or column_kind(path) == "text"
    )


def check_column_type(name: str, type_: Any) -> None:
    """Raise where a column, or a part of a struct, cannot be read."""
    for _ in _flattened(name, (name,), type_, ColumnOptions()):
        pass


def _checked_kind(name: str, type_: Any, options: ColumnOptions) -> str:
    kind = column_kind(type_)
    if kind is None:
        hint = f", or name it in source.options.json: [{name:.40}]" if _is_json(type_) else ""
        raise FormatError(
            f"column {name!r:.40} has type {str(type_)[:60]}; numbers, bool, times, strings, "
            "binary, structs, and lists of numbers or of strings can be read: leave it out of "
            f"source.options.columns{hint}"
        )
    return "decimal text" if kind == "decimal" and options.decimals == "str" else kind


def column_kind(type_: Any, depth: int = 0) -> str | None:
    from pyarrow import types

    if types.is_dictionary(type_):
        return (
            "dictionary"
            if column_kind(type_.value_type) in ("text", "binary", "number")
            else None
        )
    if types.is_string(type_) or types.is_large_string(type_):
        return "text"
    if types.is_decimal(type_):
        return "decimal"
    if (
        types.is_binary(type_)
        or types.is_large_binary(type_)
        or types.is_fixed_size_binary(type_)
    ):
        return "binary"
    if types.is_temporal(type_) and not types.is_interval(type_):
        return "time"
    if types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_):
        return "number"
    if _is_list(type_) and depth < _MOST_DEPTH:
        inner = column_kind(type_.value_type, depth + 1)
        if inner in ("number", "time", "decimal", "list"):
            return "list"
        return "json" if _is_json(type_) else None
    return "json" if types.is_map(type_) and _is_json(type_) else None


def _is_list(type_: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    )


def _is_json(type_: Any, depth: int = 0) -> bool:
    """Whether its values are JSON: all but bytes and what has no name or no end."""
    from pyarrow import types

    if depth > _MOST_DEPTH:
        return False
    if types.is_map(type_):
        return column_kind(type_.key_type) == "text" and _is_json(type_.item_type, depth + 1)
    if types.is_struct(type_):
        return all(_is_json(type_.field(i).type, depth + 1) for i in range(type_.num_fields))
    if _is_list(type_):
        return _is_json(type_.value_type, depth + 1)
    if types.is_dictionary(type_):
        return column_kind(type_.value_type) in ("text", "number")
    return types.is_null(type_) or column_kind(type_) in ("text", "number", "time", "decimal")


@dataclass(frozen=True, slots=True)
class ColumnValues:
    """A value per row, and which rows have none."""

    values: Sequence[Any] | Array
    absent: Array
    uneven: Array | None = None  # the rows that are missing because their lists are no array

    def reason(self, name: str, at: int, row: int) -> str:
        if self.uneven is not None and self.uneven[at]:
            return (
                f"column {name!r:.40} has lists of different lengths in row {row}, which are no "
                f"array; name it in source.options.json: [{name:.40}]"
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
    """A null struct is null in all of its fields."""
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
    """Null is NaN among floats; elsewhere such rows are marked as without value."""
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
                f"column {name!r:.40} has text that is no UTF-8: {error}"
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
    # The dictionary itself may hold a value that is none.
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
        # Without nulls, for else integers would come as floating point numbers.
        zero = pa.scalar(False if pa.types.is_boolean(array.type) else 0, array.type)
        return ColumnValues(pc.fill_null(array, zero).to_numpy(zero_copy_only=False), absent)
    return ColumnValues(array.to_numpy(zero_copy_only=False), missing)


@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists of any depth: element i is leaves[starts[i]:starts[i + 1]], of shape shapes[i]."""

    leaves: Array
    starts: Array
    shapes: Array
    absent: Array
    uneven: Array  # elements that have no shape, because their lists differ


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
    if not _is_list(array.type):
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
    """Return the size of each dimension, None where it may differ."""
    from pyarrow import types

    sizes: list[int | None] = []
    while _is_list(type_):
        sizes.append(type_.list_size if types.is_fixed_size_list(type_) else None)
        type_ = type_.value_type
    return sizes


def _items_of_lists(array: Any) -> tuple[Array, Any]:
    """Return where the items of each list begin, and the items of all."""
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
            f"column {name!r:.40} has a row of about {nbytes:,} bytes, and one that becomes JSON text "
            f"may take {_MOST_PYTHON_BYTES:,}; leave it out of source.options.columns"
        )
    return _json_text(array.to_pylist(maps_as_pydicts="strict")[0])


def _python_bytes(array: Any) -> int:
    """Return about how many bytes an array takes as objects of Python."""
    from pyarrow import types

    own = _OBJECT_BYTES * len(array)
    if types.is_struct(array.type):
        return own + sum(map(_python_bytes, array.flatten()))
    if types.is_map(array.type):
        start, stop = (array.offsets[i].as_py() for i in (0, len(array)))
        items = (_python_bytes(some[start:stop]) for some in (array.keys, array.items))
        return own + sum(items)
    if _is_list(array.type):
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


def stored_columns(metadata: Any, fields: Sequence[ColumnField]) -> tuple[int, ...]:
    """Return the numbers of the stored columns that Arrow reads, several for a list or a struct."""
    names = {field.stored for field in fields}
    found = []
    for number in range(metadata.num_columns):
        parts = metadata.schema.column(number).path.split(".")
        if any(".".join(parts[: i + 1]) in names for i in range(len(parts))):
            found.append(number)
    return tuple(found)
