"""Functions for ``source.format`` that read files which no format of growcache reads by range.

For example ``source: {format: "growcache.readers:mat", options: {variables: [eeg], axis: 1,
window: 1000}}``. Each object is fetched whole. The functions need
``pip install 'growcache[scipy]'``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import require_library
from growcache.schema import Sample

__all__ = ["mat", "netcdf3"]

_MOST_BYTES = 1_000_000_000  # of all arrays of an object together
_ITEM_BYTES = {
    "int8": 1, "uint8": 1, "logical": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8,
    "uint64": 8, "single": 4, "double": 8, "char": 4,
}  # fmt: skip
_TEXT, _NUMBERS = "SU", "biufc"


class _Object(Protocol):
    key: str

    def open(self) -> Any: ...


def mat(
    object: _Object,
    variables: Sequence[str] | None = None,
    axis: int | None = None,
    window: int | None = None,
) -> Iterator[Sample]:
    """Yield the variables of a MAT-file of version 4 or 5 (`scipy.io.loadmat`) as samples.

    Each variable is a field. Scalars have shape ``()``, and text is a str. Cells, structs,
    objects and sparse arrays are left out.

    Args:
        object: The MAT-file.
        variables: Names of the variables that become fields. None takes all numbers and text.
        axis: Axis of all arrays along which the samples follow each other. None makes one
            sample of the object.
        window: Values per sample along ``axis``. A shorter rest at the end is dropped. None
            makes a sample of each value.

    Yields:
        Samples: dicts of field name to value.

    Raises:
        FormatError: A variable does not exist or is no array, the lengths along ``axis``
            differ, or all arrays together take more than 1 GB.
    """
    require_library("growcache.readers:mat", "scipy", "scipy")
    import scipy.io

    with object.open() as file:
        about = {name: (shape, of) for name, shape, of in scipy.io.whosmat(file)}
        plain = {name: one for name, one in about.items() if one[1] in _ITEM_BYTES}
        wanted = [name for name in plain if variables is None or name in variables]
        _check_bytes(
            object.key, sum(math.prod(plain[n][0]) * _ITEM_BYTES[plain[n][1]] for n in wanted)
        )
        file.seek(0)
        # Other variables are never read, because the file does not give the size of a cell's
        # contents.
        found = scipy.io.loadmat(file, chars_as_strings=True, variable_names=wanted)
    held = {name: found.get(name) for name in about}
    chosen = _chosen(object.key, held, variables)
    yield from _cut(object.key, {n: _matlab_value(v) for n, v in chosen.items()}, axis, window)


def netcdf3(
    object: _Object,
    variables: Sequence[str] | None = None,
    axis: int | None = None,
    window: int | None = None,
    scale: bool = False,
) -> Iterator[Sample]:
    """Yield the variables of a NetCDF file of version 3 (`scipy.io.netcdf_file`) as samples.

    Each variable is a field.

    Args:
        object: The NetCDF file.
        variables: Names of the variables that become fields. None takes all variables of
            numbers.
        axis: Axis of all arrays along which the samples follow each other. None makes one
            sample of the object.
        window: Values per sample along ``axis``. A shorter rest at the end is dropped. None
            makes a sample of each value.
        scale: Apply scale_factor and add_offset, and replace missing values by NaN.

    Yields:
        Samples: dicts of field name to array.

    Raises:
        FormatError: A variable does not exist or is no array of numbers, or the lengths along
            ``axis`` differ.
    """
    require_library("growcache.readers:netcdf3", "scipy", "scipy")
    import scipy.io

    with (
        object.open() as file,
        scipy.io.netcdf_file(file, "r", mmap=False, maskandscale=scale) as found,
    ):
        held = {name: _netcdf_value(value, scale) for name, value in found.variables.items()}
    yield from _cut(object.key, _chosen(object.key, held, variables), axis, window)


def _check_bytes(key: str, nbytes: int) -> None:
    if nbytes > _MOST_BYTES:
        raise FormatError(
            f"{key}: its arrays would take {nbytes:,} bytes, but at most {_MOST_BYTES:,} are "
            "allowed",
            code="GC305",
        )


def _netcdf_value(variable: Any, scale: bool) -> Any:
    value = variable[...] if variable.shape else variable.getValue()
    if not scale:
        return np.array(value)
    missing = np.ma.getmaskarray(value)
    plain = np.array(np.ma.getdata(value))
    return np.where(missing, np.nan, plain) if missing.any() else plain


def _chosen(
    key: str, held: Mapping[str, Any], variables: Sequence[str] | None
) -> dict[str, Any]:
    if variables is None:
        found = {name: value for name, value in held.items() if _is_plain(value)}
        if not found:
            raise FormatError(f"{key}: none of its variables is an array: {_names(held)}")
        return found
    for name in variables:
        if name not in held:
            raise FormatError(
                f"{key}: expected a variable {name!r}, found {_names(held)}", code="GC303"
            )
        if not _is_plain(held[name]):
            raise FormatError(
                f"{key}: {name} is neither an array of numbers nor text", code="GC306"
            )
    return {name: held[name] for name in variables}


def _names(held: Mapping[str, Any]) -> str:
    return ", ".join(sorted(held)[:10]) or "none"


def _is_plain(value: Any) -> bool:
    if not isinstance(value, np.ndarray):
        return False
    return value.dtype.kind in _NUMBERS or (value.dtype.kind in _TEXT and value.size <= 1)


def _matlab_value(value: Any) -> Any:
    """Return the value without the two dimensions that MATLAB gives to scalars and text."""
    if value.dtype.kind in _TEXT:
        return str(value.item()) if value.size else ""
    return value.reshape(()) if value.shape == (1, 1) else value


def _cut(
    key: str, values: Mapping[str, Any], axis: int | None, window: int | None
) -> Iterator[Sample]:
    if axis is None:
        yield dict(values)
        return
    arrays = {name: value for name, value in values.items() if np.ndim(value)}
    length = _common_length(key, arrays, axis)
    along = {name: np.moveaxis(value, axis, 0) for name, value in arrays.items()}
    rest = {name: value for name, value in values.items() if name not in arrays}
    for start in range(0, length - (window or 1) + 1, window or 1):
        cut = {name: _part(value, start, axis, window) for name, value in along.items()}
        yield {**rest, **cut}


def _part(value: Any, start: int, axis: int, window: int | None) -> Any:
    if window is None:
        return value[start]
    return np.moveaxis(value[start : start + window], 0, axis)


def _common_length(key: str, arrays: Mapping[str, Any], axis: int) -> int:
    try:
        lengths = {name: value.shape[axis] for name, value in arrays.items()}
    except IndexError:
        raise FormatError(
            f"{key}: not all of {_names(arrays)} have an axis {axis}", code="GC303"
        ) from None
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise FormatError(
            f"{key}: expected variables of one length along axis {axis}, found {shown or 'none'}; "
            "name some in source.options.variables",
            code="GC303",
        )
    return int(next(iter(lengths.values())))
