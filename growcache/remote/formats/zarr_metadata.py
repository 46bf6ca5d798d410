"""What the metadata of a Zarr array says, of version 2 (``.zarray``) and 3 (``zarr.json``)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from growcache.errors import FormatError
from growcache.remote.formats.windows import MOST_ROWS
from growcache.remote.formats.zarr_codecs import Decoder, decoders_of_2, decoders_of_3
from growcache.schema import Array

if TYPE_CHECKING:
    from typing_extensions import Buffer

FILES = ("zarr.json", ".zarray")
LARGEST = 1 << 24  # bytes of metadata
_MOST_DIMENSIONS = 32
_PLAIN = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c(8|16))")
_TYPES = {
    "bool": "|b1", "int8": "|i1", "uint8": "|u1", "complex64": "<c8", "complex128": "<c16",
    **{f"{name}{8 * size}": f"<{name[0]}{size}" for name in ("int", "uint") for size in (2, 4, 8)},
    "float16": "<f2", "float32": "<f4", "float64": "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """Of one array.

    Attributes:
        shape: of the array.
        chunks: of a chunk, which is one object.
        dtype: of a value once it is decoded.
        fill: value of chunks that were never written.
        decode: makes an array of a chunk's bytes.
        name: makes the name of a chunk's object, below that of the array, of its place.
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Array
    decode: Decoder
    name: Callable[[Sequence[int]], str]


def parse_metadata(data: Buffer, file: str) -> ArrayMetadata:
    """Return what a metadata object says.

    Args:
        data: of the object.
        file: its name, one of `FILES`.

    Raises:
        FormatError: it is none of an array, or of one that cannot be read.
    """
    try:
        found = orjson.loads(bytes(memoryview(data)))
        if not isinstance(found, dict):
            raise FormatError("expected a JSON object")
        return _version_3(found) if file == "zarr.json" else _version_2(found)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        said = " ".join(str(error).split())[:100]
        raise FormatError(
            f"is no metadata of an array: {type(error).__name__}: {said}"
        ) from None


def _version_2(found: Mapping[str, Any]) -> ArrayMetadata:
    kind = found["dtype"]
    if not isinstance(kind, str) or not _PLAIN.fullmatch(kind):
        what = "Python objects, which are not unpickled" if "O" in str(kind) else str(kind)[:40]
        raise FormatError(f"expected plain numbers, found dtype {what}")
    dtype: np.dtype[Any] = np.dtype(kind)
    shape, chunks = _sizes(found["shape"], found["chunks"])
    separator = _separator(found.get("dimension_separator", "."))
    decode = decoders_of_2(
        found.get("compressor"), found.get("filters"), found.get("order", "C"), dtype, chunks
    )
    fill = _fill(found.get("fill_value"), dtype)
    return ArrayMetadata(
        shape, chunks, dtype, fill, decode, lambda at: separator.join(map(str, at))
    )


def _version_3(found: Mapping[str, Any]) -> ArrayMetadata:
    if found.get("node_type") != "array":
        raise FormatError(f"expected an array, found a {str(found.get('node_type'))[:20]}")
    if str(found["data_type"]) not in _TYPES:
        raise FormatError(
            f"expected plain numbers, found data_type {str(found['data_type'])[:40]}"
        )
    dtype: np.dtype[Any] = np.dtype(_TYPES[found["data_type"]])
    grid = found["chunk_grid"]
    if grid["name"] != "regular":
        raise FormatError(f"expected a regular grid of chunks, found {str(grid['name'])[:40]}")
    shape, chunks = _sizes(found["shape"], grid["configuration"]["chunk_shape"])
    fill = _fill(found["fill_value"], dtype)
    decode, dtype = decoders_of_3(found["codecs"], dtype, chunks, fill)
    name = _named_3(found["chunk_key_encoding"])
    return ArrayMetadata(shape, chunks, dtype, fill, decode, name)


def _named_3(encoding: Any) -> Callable[[Sequence[int]], str]:
    kind = encoding["name"]
    settings = encoding.get("configuration") or {}
    if kind == "default":
        separator = _separator(settings.get("separator", "/"))
        return lambda at: separator.join(["c", *map(str, at)])
    if kind == "v2":
        separator = _separator(settings.get("separator", "."))
        return lambda at: separator.join(map(str, at))
    raise FormatError(f"expected chunks named as default or v2, found {str(kind)[:40]}")


def _separator(value: Any) -> str:
    if value not in (".", "/"):
        raise FormatError(
            f"expected . or / between the numbers of a chunk, found {value!r:.20}"
        )
    return str(value)


def _sizes(shape: Any, chunks: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for sizes, least in ((shape, 0), (chunks, 1)):
        if not isinstance(sizes, list) or not all(
            type(n) is int and least <= n <= MOST_ROWS for n in sizes
        ):
            raise FormatError(f"expected a list of sizes, found {str(sizes)[:60]}")
    if len(shape) != len(chunks) or not 0 < len(shape) <= _MOST_DIMENSIONS:
        raise FormatError(f"expected an array with an axis 0, found shape {str(shape)[:60]}")
    if math.prod(max(1, n) for n in shape) >= MOST_ROWS or math.prod(chunks) >= MOST_ROWS:
        raise FormatError(f"it claims an array of {str(shape)[:60]}")
    return tuple(shape), tuple(chunks)


def _fill(value: Any, dtype: np.dtype[Any]) -> Array:
    if value is None:
        return np.zeros((), dtype)
    if isinstance(value, list) and dtype.kind == "c" and len(value) == 2:
        return np.asarray(complex(_number(value[0]), _number(value[1])), dtype)
    if isinstance(value, str) and dtype.kind == "f" and value.startswith("0x"):
        bits = int(value, 16).to_bytes(dtype.itemsize, "big")
        return np.frombuffer(bits, dtype.newbyteorder(">")).reshape(())
    return np.asarray(_number(value), dtype)


def _number(value: Any) -> Any:
    if isinstance(value, str):  # NaN, Infinity, -Infinity
        return float(value)
    if not isinstance(value, bool | int | float):
        raise FormatError(f"expected a number as fill value, found {value!r:.40}")
    return value
