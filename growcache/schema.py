"""A sample, which is a dict of named values, and the schema that all samples of a cache share.

A value is an array, ``bytes`` or a ``str``. A dimension of an array is ragged if its size
differs from sample to sample. Bytes and strings are always ragged.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from growcache.errors import FormatError

Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = Array | bytes | str

# The values are `Value`s. The type does not say so, because mypy would then refuse a dict of
# arrays alone.
Sample: TypeAlias = dict[str, Any]

_STORED_DTYPE = re.compile(r"[<|][biufc][0-9]{1,2}")
DTYPE_KINDS = "biufc"  # bool, signed, unsigned, float, complex
BYTES = "bytes"
STR = "str"
_DTYPE_NAMES = (
    "bytes", "str", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip

_SHOWN_CHARACTERS, _SHOWN_FIELDS = 400, 3  # characters and fields, in messages

# Suffixes of the arrays that give the places of a ragged field's values in a batch.
RAGGED_SUFFIXES = ("_offsets", "_shapes", "_lengths")


@dataclass(frozen=True, slots=True)
class Origin:
    """The object, its version and the rows that a sample came from.

    A loader passes it to a ``transform`` that takes an argument ``origin``, and so does the
    sampling service.

    Attributes:
        key: Key of the object in its store, without bucket or scheme. For a Dataset, the index
            as text.
        etag: Version of the object as its store reports it; None if the store has no versions.
        start: First row of the sample in its object. Formats without rows count bytes; the
            reference of each format says which.
        stop: One after the last row or byte.
    """

    key: str
    etag: str | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a sample, or its bytes or string.

    Attributes:
        name: Name of the field.
        dtype: Little-endian `numpy.dtype.str`, such as ``"<f4"``, or ``"bytes"`` or ``"str"``.
        shape: Sizes of the dimensions, with None for ragged ones; ``()`` for bytes and strings.
        classes: Names of the classes that the integers of the field stand for, from 0 on.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    classes: tuple[str, ...] = ()

    @property
    def is_blob(self) -> bool:
        """Whether the values are bytes or strings."""
        return self.dtype in (BYTES, STR)

    @property
    def is_ragged(self) -> bool:
        """Whether values may differ in size."""
        return self.is_blob or None in self.shape

    @property
    def is_integer(self) -> bool:
        """Whether each value is one integer."""
        return not self.is_blob and not self.shape and np.dtype(self.dtype).kind in "iu"

    @property
    def item_dtype(self) -> np.dtype[Any]:
        """The dtype of the items as they are stored; uint8 for bytes and strings (UTF-8)."""
        return np.dtype("|u1" if self.is_blob else self.dtype)

    @property
    def dims(self) -> tuple[int | None, ...]:
        """The shape, in which bytes and strings have one ragged dimension, in bytes."""
        return (None,) if self.is_blob else self.shape

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """The positions of the ragged dimensions in `dims`."""
        return tuple(i for i, size in enumerate(self.dims) if size is None)

    @property
    def unit_bytes(self) -> int:
        """Size in bytes of a value whose ragged dimensions are all 1."""
        return (
            math.prod(size for size in self.dims if size is not None) * self.item_dtype.itemsize
        )

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape that all values have; ValueError if the field is ragged."""
        if self.is_ragged:
            raise ValueError(f"field {self} is ragged; its values have no common shape")
        return tuple(size for size in self.shape if size is not None)

    @property
    def nbytes(self) -> int:
        """Size in bytes of each value in C order; ValueError if the field is ragged."""
        return math.prod(self.fixed_shape) * self.item_dtype.itemsize

    @property
    def needs_shape(self) -> bool:
        """Whether the shape of a value cannot be computed from its number of bytes."""
        ragged = len(self.ragged_dims)
        return ragged > 1 or (ragged == 1 and not self.unit_bytes)

    def shape_of(self, ragged: Sequence[int]) -> tuple[int, ...]:
        """Return `dims` with the sizes of the ragged dimensions filled in."""
        sizes = iter(ragged)
        return tuple(next(sizes) if size is None else size for size in self.dims)

    def allows(self, shape: Sequence[int | None]) -> bool:
        """Whether a value of this shape fits, or values of another field with this shape."""
        if len(shape) != len(self.shape):
            return False
        # all() would take three times as long.
        for mine, size in zip(self.shape, shape, strict=True):
            if mine is not None and mine != size:
                return False
        return True

    @property
    def is_of_an_empty_list(self) -> bool:
        """Whether the value may be `[]`, because NumPy makes float64[0] of any empty list."""
        return (self.dtype, self.shape) == (_EMPTY_LIST.dtype.str, _EMPTY_LIST.shape)

    def emptied(self) -> Field:
        """Return this field with the shape of a value without items."""
        return replace(self, shape=(0, *(size or 0 for size in self.shape[1:])))

    def stores_as_is(self, value: object) -> bool:
        """Whether the value can be stored without a conversion (the usual case)."""
        if isinstance(value, np.ndarray):
            return (
                (value.shape == self.shape or self.allows(value.shape))
                and value.dtype.str == self.dtype
                and value.flags.c_contiguous
            )
        if type(value) is bytes:
            return self.dtype == BYTES
        return type(value) is str and self.dtype == STR and is_utf8(value)

    def __str__(self) -> str:
        if self.is_blob:
            return f"{self.name}: {self.dtype}"
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.item_dtype.name}[{sizes}]"


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a sample, sorted by name, which is the stored order."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = set(self.names)
        for field in self.fields:
            taken = names.intersection(field.name + end for end in RAGGED_SUFFIXES)
            if taken and field.is_ragged:
                raise FormatError(
                    f"{field} is ragged, and batches need the name {min(taken)!r} to say where "
                    "its values are; rename that field",
                    code="GC306",
                )

    @classmethod
    def from_sample(cls, sample: object) -> Schema:
        """Return the schema of one sample.

        Raises:
            FormatError: The sample is not a dict of arrays, bytes and strings.
        """
        if not isinstance(sample, Mapping) or not sample:
            raise FormatError(
                f"a sample must be a non-empty dict of arrays, found {type(sample).__name__}",
                code="GC306",
            )
        for name in sample:
            if not isinstance(name, str) or not name:
                raise FormatError(
                    f"the names of a sample's arrays must be strings, found {name!r}",
                    code="GC306",
                )
        return cls(tuple(_field_of_value(name, sample[name]) for name in sorted(sample)))

    @classmethod
    def declared(cls, fields: Mapping[str, str | Sequence[Any]]) -> Schema:
        """Return the schema that a user declared.

        Args:
            fields: Per name ``"bytes"``, ``"str"`` or a dtype, or a list ``[dtype, size, ...]``
                with None for ragged dimensions.

        Raises:
            FormatError: No field, a name that is not a string, or no such dtype or size.

        >>> str(Schema.declared({"x": ["float32", None, 64], "note": "str"}))
        'note: str, x: float32[?, 64]'
        """
        if not fields:
            raise FormatError("a schema needs at least one field", code="GC306")
        return cls(tuple(_declared_field(name, fields[name]) for name in sorted(fields)))

    @classmethod
    def covering(cls, schemas: Sequence[Schema]) -> Schema:
        """Return the narrowest schema that fits the samples of all ``schemas``.

        Raises:
            FormatError: The schemas differ in more than the sizes of dimensions.

        >>> shapes = [(3, 8), (5, 8)]
        >>> str(Schema.covering([Schema((Field("x", "<f4", shape),)) for shape in shapes]))
        'x: float32[?, 8]'
        """
        first = schemas[0]
        for other in schemas[1:]:
            if first._kinds() != other._kinds():
                one, two = _differences(first, other)
                raise FormatError(
                    f"samples with {one} and with {two} cannot be in one cache: names, "
                    "dtypes and numbers of dimensions must agree",
                    code="GC307",
                )
        return cls(
            tuple(
                replace(fields[0], shape=_covering_shape([f.shape for f in fields]))
                for fields in zip(*(schema.fields for schema in schemas), strict=True)
            )
        )

    def _kinds(self) -> list[tuple[str, str, int]]:
        return [(f.name, f.dtype, len(f.shape)) for f in self.fields]

    @property
    def is_ragged(self) -> bool:
        """Whether samples may differ in size."""
        return any(field.is_ragged for field in self.fields)

    @property
    def nbytes(self) -> int:
        """Size in bytes of each sample without framing; ValueError if the schema is ragged."""
        return sum(field.nbytes for field in self.fields)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in stored order."""
        return tuple(field.name for field in self.fields)

    @property
    def classes(self) -> dict[str, list[str]]:
        """Names of classes by field, for the fields that have classes."""
        return {field.name: list(field.classes) for field in self.fields if field.classes}

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Schema:
        """Return the schema with these classes set on its integer fields.

        >>> Schema.declared({"y": "int64", "x": "float32"}).with_classes({"y": ["a", "b"]}).classes
        {'y': ['a', 'b']}
        """
        return Schema(
            tuple(
                replace(field, classes=tuple(classes[field.name]))
                if field.name in classes and field.is_integer
                else field
                for field in self.fields
            )
        )

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"no field {name!r}; the schema has {', '.join(self.names)}")

    def to_json(self) -> list[list[Any]]:
        """Return a JSON value that `from_json` reads."""
        return [
            [f.name, f.dtype, list(f.shape), *([list(f.classes)] if f.classes else ())]
            for f in self.fields
        ]

    @classmethod
    def from_json(cls, value: list[list[Any]]) -> Schema:
        """Return the schema that `to_json` described; FormatError if the value is damaged."""
        try:
            return cls(tuple(_field_from_json(*described) for described in value))
        except (TypeError, ValueError) as error:
            raise FormatError(f"a schema is damaged: {error}", code="GC302") from None

    def allows(self, found: Schema) -> bool:
        """Whether samples of the schema ``found`` fit this one."""
        return found._kinds() == self._kinds() and all(
            mine.allows(other.shape)
            for mine, other in zip(self.fields, found.fields, strict=True)
        )

    def conform(self, sample: Mapping[str, Any]) -> Sample:
        """Return the sample in stored order, with little-endian, C-ordered arrays.

        Raises:
            FormatError: The sample does not fit the schema.
        """
        if self._is_of(sample):
            return dict(sample)
        sample = self._with_empty_lists(sample)
        found = Schema.from_sample(sample)
        if not self.allows(found):
            raise FormatError(f"expected a sample with {self}, found {found}", code="GC307")
        return {f.name: _stored_value(f, sample[f.name]) for f in self.fields}

    def _with_empty_lists(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace empty lists by arrays without items, in fields whose first dimension is ragged."""
        empty = {
            field.name: np.empty(field.emptied().fixed_shape, field.dtype)
            for field in self.fields
            if field.shape[:1] == (None,) and _is_empty_list(sample.get(field.name))
        }
        return {**sample, **empty} if empty else sample

    def _is_of(self, sample: Mapping[str, Any]) -> bool:
        return tuple(sample) == self.names and all(
            field.stores_as_is(value)
            for field, value in zip(self.fields, sample.values(), strict=True)
        )

    def __str__(self) -> str:
        return ", ".join(map(str, self.fields))


_EMPTY_LIST = np.asarray([], "<f8")


def _is_empty_list(value: object) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.shape == _EMPTY_LIST.shape
        and value.dtype == _EMPTY_LIST.dtype
    )


def sample_bytes(sample: Mapping[str, Value]) -> int:
    """Return the size of a sample's values in bytes, as they are stored, without framing."""
    return sum(map(_value_nbytes, sample.values()))


def _value_nbytes(value: Value) -> int:
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if isinstance(value, bytes) else np.asarray(value).nbytes


def _field_of_value(name: str, value: object) -> Field:
    blob = _as_bytes_or_str(value)
    if isinstance(blob, bytes):
        return Field(name, BYTES, ())
    if isinstance(blob, str):
        if not is_utf8(blob):
            raise FormatError(
                f"the string {name!r} is not valid Unicode; cache it as bytes", code="GC306"
            )
        return Field(name, STR, ())
    array = np.asarray(value)
    return Field(name, _stored_dtype(name, array.dtype), array.shape)


def _as_bytes_or_str(value: object) -> bytes | str | None:
    if isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind in "SU":
        value = value.item()
    if isinstance(value, bytes):
        return bytes(value)
    return str(value) if isinstance(value, str) else None


def _stored_dtype(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.kind not in DTYPE_KINDS or dtype.hasobject:
        raise FormatError(
            f"array {name!r} has dtype {dtype}; "
            "bool, integers, floats, complex, bytes and str can be cached",
            code="GC306",
        )
    return dtype.newbyteorder("<").str


def _field_from_json(
    name: object, dtype: object, shape: Sequence[object], classes: object = ()
) -> Field:
    """Return the field that a file describes.

    The checks are strict, because NumPy would accept any type.
    """
    sizes = tuple(None if s is None else int(str(s)) for s in shape)
    if type(name) is not str or not name or any(s is not None and s < 0 for s in sizes):
        raise ValueError(f"no field: {name!r:.40} {sizes!r:.40}")
    if dtype in (BYTES, STR) and not sizes:
        return Field(name, str(dtype), ())
    # NumPy would evaluate the text after a comma.
    if (
        type(dtype) is not str
        or not _STORED_DTYPE.fullmatch(dtype)
        or np.dtype(dtype).str != dtype
    ):
        raise ValueError(f"no dtype: {dtype!r:.40}")
    if not isinstance(classes, list | tuple) or not all(type(one) is str for one in classes):
        raise ValueError(f"no classes: {classes!r:.40}")
    return Field(name, dtype, sizes, tuple(classes))


def _declared_field(name: object, declared: object) -> Field:
    if not isinstance(name, str) or not name:
        raise FormatError(
            f"the names of a schema's fields must be strings, found {name!r}", code="GC306"
        )
    is_list = isinstance(declared, list | tuple) and declared
    dtype, *sizes = cast("Sequence[Any]", declared if is_list else [declared])
    if dtype in (BYTES, STR):
        if sizes:
            raise FormatError(f"{name}: {dtype} has no dimensions", code="GC306")
        return Field(name, dtype, ())
    try:
        found = np.dtype(dtype) if isinstance(dtype, str) else None
    except (TypeError, ValueError, SyntaxError):
        found = None
    if found is None or found.kind not in DTYPE_KINDS:
        close = difflib.get_close_matches(str(dtype), _DTYPE_NAMES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ", as float32, int16 or uint8"
        raise FormatError(f"{name}: expected bytes, str or a dtype{hint}", code="GC306")
    if not all(size is None or (type(size) is int and size >= 0) for size in sizes):
        raise FormatError(
            f"{name}: dimensions are integers, or null where samples differ", code="GC306"
        )
    return Field(name, _stored_dtype(name, found), tuple(sizes))


def _differences(first: Schema, other: Schema) -> tuple[str, str]:
    """Return both schemas as text; of large schemas, only the first fields that differ."""
    if len(str(first)) + len(str(other)) <= _SHOWN_CHARACTERS:
        return str(first), str(other)
    theirs, mine = set(other._kinds()), set(first._kinds())
    return _few_fields(first, theirs), _few_fields(other, mine)


def _few_fields(schema: Schema, known: set[tuple[str, str, int]]) -> str:
    own = [
        field
        for field in schema.fields
        if (field.name, field.dtype, len(field.shape)) not in known
    ]
    more = f" and {len(own) - _SHOWN_FIELDS} more fields" if len(own) > _SHOWN_FIELDS else ""
    return ", ".join(map(str, own[:_SHOWN_FIELDS])) + more if own else "no other field"


def _covering_shape(shapes: Sequence[tuple[int | None, ...]]) -> tuple[int | None, ...]:
    return tuple(
        sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)
    )


def _stored_value(field: Field, value: object) -> Value:
    blob = _as_bytes_or_str(value)
    return np.asarray(value, dtype=field.dtype, order="C") if blob is None else blob


def is_utf8(text: str) -> bool:
    """Whether the text can be encoded as UTF-8. Lone surrogates, as in file names, cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
