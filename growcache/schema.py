"""What a sample is: a dict of named arrays, and the schema that all samples of a cache share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.errors import FormatError

Array: TypeAlias = npt.NDArray[Any]
Sample: TypeAlias = dict[str, Array]

KINDS = "biufc"  # bool, signed, unsigned, float, complex


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sample came from.

    Attributes:
        key: the object's key, without bucket or scheme.
        etag: the version that was read; None where the store has none.
        start: first row (or byte, for formats without rows) of the object.
        stop: one past the last row (or byte).
    """

    key: str
    etag: str | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a sample: little-endian dtype (as `numpy.dtype.str`) and fixed shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one value in C order."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a sample, sorted by name (the order in which they are stored)."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, sample: object) -> Schema:
        """Return the schema of a sample.

        Raises:
            FormatError: not a non-empty mapping of names to numeric arrays.
        """
        if not isinstance(sample, Mapping) or not sample:
            raise FormatError(
                f"a sample must be a non-empty dict of arrays, found {type(sample).__name__}"
            )
        return cls(tuple(_field(name, sample[name]) for name in sorted(sample)))

    @property
    def nbytes(self) -> int:
        """Bytes of one sample, all fields together, without framing."""
        return sum(field.nbytes for field in self.fields)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in stored order."""
        return tuple(field.name for field in self.fields)

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"no field {name!r}; the schema has {', '.join(self.names)}")

    def to_json(self) -> list[list[Any]]:
        """Return a value that `from_json` takes back."""
        return [[f.name, f.dtype, list(f.shape)] for f in self.fields]

    @classmethod
    def from_json(cls, value: list[list[Any]]) -> Schema:
        """Return the schema that `to_json` described."""
        return cls(tuple(Field(n, str(d), tuple(map(int, s))) for n, d, s in value))

    def conform(self, sample: Mapping[str, Any]) -> Sample:
        """Return the sample as little-endian C-ordered arrays in stored order.

        Raises:
            FormatError: other names, dtypes or shapes than the schema's.
        """
        if self._is_of(sample):
            return dict(sample)
        found = Schema.of(sample)
        if found != self:
            raise FormatError(f"expected a sample with {self}, found {found}")
        return {
            f.name: np.asarray(sample[f.name], dtype=f.dtype, order="C") for f in self.fields
        }

    def _is_of(self, sample: Mapping[str, Any]) -> bool:
        """Whether the sample is already what `conform` would make of it (the usual case)."""
        if tuple(sample) != self.names:
            return False
        return all(
            isinstance(array, np.ndarray)
            and array.shape == field.shape
            and array.dtype.str == field.dtype
            and array.flags.c_contiguous
            for field, array in zip(self.fields, sample.values(), strict=True)
        )

    def __str__(self) -> str:
        return ", ".join(
            f"{f.name}: {np.dtype(f.dtype).name}{list(f.shape)}" for f in self.fields
        )


def _field(name: object, value: object) -> Field:
    if not isinstance(name, str) or not name:
        raise FormatError(f"the names of a sample's arrays must be strings, found {name!r}")
    array = np.asarray(value)
    if array.dtype.kind not in KINDS or array.dtype.hasobject:
        raise FormatError(
            f"array {name!r} has dtype {array.dtype}; "
            "bool, integers, floats and complex can be cached"
        )
    return Field(name, array.dtype.newbyteorder("<").str, array.shape)
