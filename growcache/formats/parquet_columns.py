"""The fields that the columns of a Parquet file become."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from growcache.errors import FormatError

_MOST_DEPTH = 32  # of nested types


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    columns: tuple[str, ...] | None = None
    json: tuple[str, ...] = ()  # columns that become JSON text
    decimals: str = "float64"  # or str


@dataclass(frozen=True, slots=True)
class ColumnField:
    """A field, and its column of the file or part of a struct."""

    name: str
    path: tuple[str, ...]  # the column, and the names inside its structs
    kind: str  # as from `column_kind`, or "json" or "decimal text"

    @property
    def stored(self) -> str:
        """Name under which Arrow reads it."""
        return ".".join(self.path)

    @property
    def is_variable(self) -> bool:
        """Whether a few bytes of the object may represent a value of any length."""
        return self.kind in ("text", "binary", "list", "dictionary", "json")


def column_fields(schema: Any, options: ColumnOptions) -> list[ColumnField]:
    """Return the fields of a file.

    Raises:
        FormatError: A chosen column is missing or cannot be read.
    """
    if not schema.names:
        raise FormatError("a table without columns")
    wanted = schema.names if options.columns is None else options.columns
    found = [field for name in wanted for field in _fields_of(schema, name, options)]
    names: set[str] = set()
    for field in found:
        if field.name in names:
            raise FormatError(
                f"two columns would be the field {field.name!r:.40}", code="GC303"
            )
        names.add(field.name)
    for name in options.json:
        if name not in names:
            raise FormatError(
                f"source.options.json names {name!r:.40}, which is not read", code="GC304"
            )
    return found


def _fields_of(schema: Any, name: str, options: ColumnOptions) -> Iterator[ColumnField]:
    path = _path_of(schema, name)
    type_ = schema.field(path[0]).type
    for part in path[1:]:
        type_ = type_.field(part).type
    yield from _flattened(name, path, type_, options)


def _path_of(schema: Any, name: str) -> tuple[str, ...]:
    """Return the path of a column, or of a value in a struct such as ``meta.author``."""
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
    raise FormatError(f"expected one column {name!r:.40}; {hint}", code="GC303")


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
                f"column {name!r:.40} has type {str(type_)[:60]}, which cannot become JSON",
                code="GC303",
            )
        yield ColumnField(name, path, "json")
    elif not types.is_struct(type_):
        yield ColumnField(name, path, _checked_kind(name, type_, options))
    elif _is_file(type_):
        yield ColumnField(name, (*path, "bytes"), "binary")
    else:
        if len(path) > _MOST_DEPTH or not type_.num_fields:
            raise FormatError(
                f"column {name!r:.40} is a struct without fields, or too deep", code="GC303"
            )
        for i in range(type_.num_fields):
            inner = type_.field(i)
            yield from _flattened(
                f"{name}.{inner.name}", (*path, inner.name), inner.type, options
            )


def _is_file(type_: Any) -> bool:
    """Whether the type is the one that the library ``datasets`` writes for an image or a sound."""
    from pyarrow import types

    if {type_.field(i).name for i in range(type_.num_fields)} != {"bytes", "path"}:
        return False
    data, path = type_.field("bytes").type, type_.field("path").type
    return column_kind(data) == "binary" and (
        types.is_null(path) or column_kind(path) == "text"
    )


def check_column_type(name: str, type_: Any) -> None:
    """Raise FormatError if a column, or a part of a struct, cannot be read."""
    for _ in _flattened(name, (name,), type_, ColumnOptions()):
        pass


def _checked_kind(name: str, type_: Any, options: ColumnOptions) -> str:
    kind = column_kind(type_)
    if kind is None:
        hint = f", or name it in source.options.json: [{name:.40}]" if _is_json(type_) else ""
        raise FormatError(
            f"column {name!r:.40} has type {str(type_)[:60]}; numbers, bool, times, strings, "
            "binary, structs, and lists of numbers or of strings can be read: leave it out of "
            f"source.options.columns{hint}",
            code="GC303",
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
    if is_list(type_) and depth < _MOST_DEPTH:
        inner = column_kind(type_.value_type, depth + 1)
        if inner in ("number", "time", "decimal", "list"):
            return "list"
        return "json" if _is_json(type_) else None
    return "json" if types.is_map(type_) and _is_json(type_) else None


def is_list(type_: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    )


def _is_json(type_: Any, depth: int = 0) -> bool:
    """Whether JSON can express the values, which excludes bytes, unnamed fields and endless depth."""
    from pyarrow import types

    if depth > _MOST_DEPTH:
        return False
    if types.is_map(type_):
        return column_kind(type_.key_type) == "text" and _is_json(type_.item_type, depth + 1)
    if types.is_struct(type_):
        return all(_is_json(type_.field(i).type, depth + 1) for i in range(type_.num_fields))
    if is_list(type_):
        return _is_json(type_.value_type, depth + 1)
    if types.is_dictionary(type_):
        return column_kind(type_.value_type) in ("text", "number")
    return types.is_null(type_) or column_kind(type_) in ("text", "number", "time", "decimal")


def stored_columns(metadata: Any, fields: Sequence[ColumnField]) -> tuple[int, ...]:
    """Return the numbers of the stored columns that Arrow reads: several for a list or a struct."""
    names = {field.stored for field in fields}
    found = []
    for number in range(metadata.num_columns):
        parts = metadata.schema.column(number).path.split(".")
        if any(".".join(parts[: i + 1]) in names for i in range(len(parts))):
            found.append(number)
    return tuple(found)
