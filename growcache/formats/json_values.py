"""Convert JSON values to arrays, text and bytes."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import orjson

from growcache.errors import FormatError
from growcache.schema import Array, Sample, Value

MOST_KEYS = 10_000  # of an object that becomes a sample with all its keys
_MOST_DIMENSIONS = 32
_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
DTYPES = (*_NUMBERS, "str", "bytes", "base64", "json")
_EXACT_FLOATS = 1 << 53  # above it, floats skip integers


def parse_json(text: bytes) -> Any:
    """Parse JSON, with NaN, Infinity and -Infinity as in Python."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        why = str(error)
    if b"NaN" in text or b"Infinity" in text:
        try:
            return json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError):
            pass
    raise FormatError(f"expected JSON, found {text[:40]!r}: {why}")


def sample_of_record(record: Mapping[str, Any]) -> Sample:
    if len(record) > MOST_KEYS:
        raise FormatError(
            f"expected at most {MOST_KEYS:,} keys, found {len(record):,}", code="GC305"
        )
    sample: Sample = {}
    for name, value in record.items():
        if value is None:
            raise FormatError(
                f"expected a value for {name!r}, found null; name the fields, with a default "
                "for this one, in source.options.fields",
                code="GC303",
            )
        try:
            sample[name] = value_of_json(value)
        except (ValueError, OverflowError, TypeError) as error:
            raise FormatError(f"{name}: {error}") from None
    return sample


def value_of_json(value: Any) -> Value:
    """Return the value of a JSON value.

    Even lists of numbers become arrays. Other lists, and objects, become JSON text.
    """
    kind = type(value)
    if kind is str:
        return str(value)
    if kind is list:
        found = number_array(value)
        return _text(value) if found is None else found
    if kind is dict:
        return _text(value)
    return _scalar(value)


def number_array(value: list[Any], *, nulls: bool = False) -> Array | None:
    """Return an evenly nested list of numbers or bools as an array, or else None.

    NumPy does not inspect the list, because a list with texts could take any amount of memory.
    """
    flat: list[Any] = value
    shape = [len(flat)]
    while flat and type(flat[0]) is list:
        inner = len(flat[0])
        if set(map(type, flat)) != {list} or set(map(len, flat)) != {inner}:
            return None
        flat = list(chain.from_iterable(flat))
        shape.append(inner)
        if len(shape) > _MOST_DIMENSIONS:
            return None
    kinds = set(map(type, flat))
    if nulls and type(None) in kinds:
        flat = [math.nan if item is None else item for item in flat]
        kinds = set(map(type, flat))
    dtype = _common_dtype(kinds)
    return None if dtype is None else np.array(flat, dtype).reshape(shape)


def _common_dtype(kinds: set[type]) -> str | None:
    if kinds == {bool}:
        return "?"
    if kinds == {int}:
        return "<i8"
    return "<f8" if kinds <= {int, float} else None


def _scalar(value: Any) -> Array:
    if type(value) is bool:
        return np.array(value)
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(
            f"{value} is not a 64-bit integer; name a dtype in source.options.fields"
        )
    return np.array(value, "<i8" if type(value) is int else "<f8")


def _number_converter(dtype: str) -> Callable[[Any], Array]:
    wanted = np.dtype(dtype)

    def convert(value: Any) -> Array:
        found = _checked_numbers(value, wanted)
        if wanted.kind == "b" and found.dtype.kind != "b":
            raise ValueError("found numbers")
        if wanted.kind in "iu" and found.size:
            _refuse_lossy(found, wanted)
        with np.errstate(over="ignore"):
            return found.astype(wanted)

    return convert


def _checked_numbers(value: Any, wanted: np.dtype[Any]) -> Array:
    if type(value) is list:
        found = None
        if wanted == np.uint64 and value and set(map(type, value)) == {int}:
            return np.array(value, np.uint64)
        found = number_array(value, nulls=wanted.kind == "f")
        if found is None:
            raise ValueError("found a list of something else, or unevenly nested")
        return found
    if type(value) not in (bool, int, float):
        raise ValueError(f"found {_short(value)}")
    if type(value) is int and wanted.kind in "iu":
        info = np.iinfo(wanted)
        if not info.min <= value <= info.max:
            raise ValueError(f"found {_short(value)}")
        return np.array(value, wanted)
    return np.array(float(value) if type(value) is int else value)


def _refuse_lossy(found: Array, wanted: np.dtype[Any]) -> None:
    if found.dtype.kind == "f" and not (
        np.isfinite(found).all() and (found == np.trunc(found)).all()
    ):
        raise ValueError("found numbers that are not integers")
    info = np.iinfo(wanted)
    least, most = found.min(), found.max()
    if found.dtype.kind == "f" and max(-least, most) > _EXACT_FLOATS:
        raise ValueError("found numbers beyond 2^53 that are not integers in this JSON")
    if found.dtype.kind != "b" and (int(least) < info.min or int(most) > info.max):
        raise ValueError(f"found numbers from {least} to {most}")


def _text(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # integers beyond 64 bits, or half characters
        return json.dumps(value)


def _as_text(value: Any) -> str:
    return str(value) if type(value) is str else _text(value)


def _as_bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise ValueError(f"found {_short(value)}")
    return value.encode()


def _as_base64(value: Any) -> bytes:
    try:
        return base64.b64decode(_as_bytes(value), validate=True)
    except binascii.Error as error:
        raise ValueError(f"found {_short(value)}: {error}") from None


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, list | dict) else type(value).__name__
    return text if len(text) <= 40 else text[:40] + "…"


CONVERTERS: dict[str, Callable[[Any], Value]] = {
    **{name: _number_converter(name) for name in _NUMBERS},
    "str": _as_text,
    "bytes": _as_bytes,
    "base64": _as_base64,
    "json": _text,
}
