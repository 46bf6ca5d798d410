"""The metadata of Zarr arrays, in versions 2 and 3, and the keys of their chunks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from growcache.errors import FormatError, ObjectMissingError
from growcache.formats.base import ObjectReader
from growcache.formats.chunk_codecs import ChunkDecoder, zarr2_decoder, zarr3_decoder
from growcache.formats.chunks import MOST_ROWS, ChunkPlace
from growcache.formats.scales import zarr_attributes
from growcache.schema import Array

if TYPE_CHECKING:
    from typing_extensions import Buffer


METADATA_FILES = ("zarr.json", ".zarray")
MOST_METADATA_BYTES = 1 << 24  # bytes of metadata
_MOST_DIMENSIONS = 32
_NUMBER_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c(8|16))")
_TYPES = {
    "bool": "|b1", "int8": "|i1", "uint8": "|u1", "complex64": "<c8", "complex128": "<c16",
    **{f"{name}{8 * size}": f"<{name[0]}{size}" for name in ("int", "uint") for size in (2, 4, 8)},
    "float16": "<f2", "float32": "<f4", "float64": "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ZarrMetadata:
    shape: tuple[int, ...]
    chunks: tuple[int, ...]  # shape of a chunk, which is one object
    dtype: np.dtype[Any]  # of a decoded value
    fill: Array  # value of unwritten chunks
    decode: ChunkDecoder
    name: Callable[[Sequence[int]], str]  # name of a chunk's object in the array, by its place
    version: int
    says_fill: bool  # whether the array sets a fill value
    attributes: Any  # in version 3; those of version 2 are in another object


def zarr_metadata(found: Any, version: int) -> ZarrMetadata:
    try:
        if not isinstance(found, dict):
            raise FormatError("expected a JSON object")
        return _version_3(found) if version == 3 else _version_2(found)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        said = " ".join(str(error).split())[:100]
        raise FormatError(
            f"is not the metadata of an array: {type(error).__name__}: {said}"
        ) from None


def _version_2(found: Mapping[str, Any]) -> ZarrMetadata:
    kind = found["dtype"]
    if not isinstance(kind, str) or not _NUMBER_DTYPE.fullmatch(kind):
        what = "Python objects, which are not unpickled" if "O" in str(kind) else str(kind)[:40]
        raise FormatError(f"expected plain numbers, found dtype {what}", code="GC306")
    dtype: np.dtype[Any] = np.dtype(kind)
    shape, chunks = _sizes(found["shape"], found["chunks"])
    separator = _separator(found.get("dimension_separator", "."))
    decode = zarr2_decoder(
        found.get("compressor"), found.get("filters"), found.get("order", "C"), dtype, chunks
    )
    fill = _fill(found.get("fill_value"), dtype)
    return ZarrMetadata(
        shape,
        chunks,
        dtype,
        fill,
        decode,
        lambda at: separator.join(map(str, at)),
        version=2,
        says_fill=found.get("fill_value") is not None,
        attributes={},
    )


def _version_3(found: Mapping[str, Any]) -> ZarrMetadata:
    if found.get("node_type") != "array":
        raise FormatError(f"expected an array, found a {str(found.get('node_type'))[:20]}")
    if str(found["data_type"]) not in _TYPES:
        raise FormatError(
            f"expected plain numbers, found data_type {str(found['data_type'])[:40]}",
            code="GC306",
        )
    dtype: np.dtype[Any] = np.dtype(_TYPES[found["data_type"]])
    grid = found["chunk_grid"]
    if grid["name"] != "regular":
        raise FormatError(
            f"expected a regular grid of chunks, found {str(grid['name'])[:40]}", code="GC304"
        )
    shape, chunks = _sizes(found["shape"], grid["configuration"]["chunk_shape"])
    fill = _fill(found["fill_value"], dtype)
    decode, dtype = zarr3_decoder(found["codecs"], dtype, chunks, fill)
    name = _chunk_namer_3(found["chunk_key_encoding"])
    return ZarrMetadata(
        shape,
        chunks,
        dtype,
        fill,
        decode,
        name,
        version=3,
        says_fill=True,
        attributes=found.get("attributes"),
    )


def _chunk_namer_3(encoding: Any) -> Callable[[Sequence[int]], str]:
    kind = encoding["name"]
    settings = encoding.get("configuration") or {}
    if kind == "default":
        separator = _separator(settings.get("separator", "/"))
        return lambda at: separator.join(["c", *map(str, at)])
    if kind == "v2":
        separator = _separator(settings.get("separator", "."))
        return lambda at: separator.join(map(str, at))
    raise FormatError(
        f"expected chunks named as default or v2, found {str(kind)[:40]}", code="GC304"
    )


def _separator(value: Any) -> str:
    if value not in (".", "/"):
        raise FormatError(
            f"expected . or / between the numbers of a chunk, found {value!r:.20}", code="GC306"
        )
    return str(value)


def _sizes(shape: Any, chunks: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for sizes, least in ((shape, 0), (chunks, 1)):
        if not isinstance(sizes, list) or not all(
            type(n) is int and least <= n <= MOST_ROWS for n in sizes
        ):
            raise FormatError(f"expected a list of sizes, found {str(sizes)[:60]}")
    if len(shape) != len(chunks) or not 0 < len(shape) <= _MOST_DIMENSIONS:
        raise FormatError(
            f"expected an array with an axis 0, found shape {str(shape)[:60]}", code="GC303"
        )
    if math.prod(max(1, n) for n in shape) >= MOST_ROWS or math.prod(chunks) >= MOST_ROWS:
        raise FormatError(f"it claims an array of {str(shape)[:60]}", code="GC302")
    return tuple(shape), tuple(chunks)


def _fill(value: Any, dtype: np.dtype[Any]) -> Array:
    if value is None:
        return np.zeros((), dtype)
    if isinstance(value, list) and dtype.kind == "c" and len(value) == 2:
        return np.asarray(complex(_fill_number(value[0]), _fill_number(value[1])), dtype)
    if isinstance(value, str) and dtype.kind == "f" and value.startswith("0x"):
        bits = int(value, 16).to_bytes(dtype.itemsize, "big")
        return np.frombuffer(bits, dtype.newbyteorder(">")).reshape(())
    return np.asarray(_fill_number(value), dtype)


def _fill_number(value: Any) -> Any:
    if isinstance(value, str):  # NaN, Infinity, -Infinity
        return float(value)
    if not isinstance(value, bool | int | float):
        raise FormatError(f"expected a number as fill value, found {value!r:.40}")
    return value


# End of a chunk's key: c/3/0 or c.3.0 in version 3, and 3.0 or 3/0 in version 2.
_DOTTED_PLACE = re.compile(r"(?:^|/)(?:c\.)?([0-9]{1,18}(?:\.[0-9]{1,18})*)$")
_SLASHED_PLACE = re.compile(r"(?:^|/)(c/)?([0-9]{1,18}(?:/[0-9]{1,18})*)$")


async def metadata_or_error(
    reader: ObjectReader, root: str
) -> tuple[ZarrMetadata | FormatError, int]:
    try:
        return await _fetch_metadata(reader, root), 1
    except FormatError as error:
        return error, 1


async def _fetch_metadata(reader: ObjectReader, root: str) -> ZarrMetadata:
    for file in _likely_files(reader.entry.key, root):
        try:
            found = await reader.find(root + file)
        except ObjectMissingError:
            continue
        document = await read_json(found)
        try:
            return zarr_metadata(document, 3 if file == "zarr.json" else 2)
        except FormatError as error:
            raise FormatError(f"{root}{file}: {error}", code=error.code) from None
    raise FormatError(f"{reader.entry.key}: no {' or '.join(METADATA_FILES)} at {root or '/'}")


def _likely_files(key: str, root: str) -> Sequence[str]:
    """Return the files that may contain metadata, likelier ones first.

    Chunks of version 3 start with c.
    """
    place = key.removeprefix(root)
    is_version_2 = place != key and not place.startswith(("c/", "c."))
    return METADATA_FILES[::-1] if is_version_2 else METADATA_FILES


async def read_attributes(
    reader: ObjectReader, root: str, metadata: ZarrMetadata
) -> dict[str, Any]:
    found = metadata.attributes
    if metadata.version == 2:
        try:
            found = await read_json(await reader.find(f"{root}.zattrs"))
        except ObjectMissingError:
            found = {}
    fill = metadata.fill[()] if metadata.says_fill else None
    return zarr_attributes(found, metadata.dtype, metadata.version, fill)


async def read_json(found: ObjectReader) -> Any:
    key = found.entry.key
    if found.entry.size > MOST_METADATA_BYTES:
        raise FormatError(f"{key}: metadata of {found.entry.size:,} bytes")
    try:
        return _loaded_json(await found.read())
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{key}: is not the metadata of an array: {str(error)[:100]}"
        ) from None


def _loaded_json(data: Buffer) -> Any:
    """Parse JSON, in which Zarr's own library writes NaN and Infinity."""
    text = bytes(memoryview(data))
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def possible_places(key: str) -> list[tuple[str, ChunkPlace]]:
    """Return the arrays of which a key may be a chunk, and its place in each.

    >>> possible_places("a.zarr/x/c/3/0")[0], possible_places("a.zarr/x/3.0")
    (('a.zarr/x/', (3, 0)), [('a.zarr/x/', (3, 0))])
    """
    if (found := _DOTTED_PLACE.search(key)) and "." in found[0]:
        return [(_folder(key, found.start()), tuple(map(int, found[1].split("."))))]
    if not (found := _SLASHED_PLACE.search(key)):
        return []
    numbers = found[2].split("/")
    if found[1]:
        return [(_folder(key, found.start()), tuple(map(int, numbers)))]
    ends = range(1, len(numbers) + 1)  # folders may be numbers, too
    return [
        (key[: len(key) - len("/".join(numbers[-end:]))], tuple(map(int, numbers[-end:])))
        for end in reversed(ends)
    ]


def folder_of_chunk(key: str) -> str:
    """Return the folder of the array of which a key looks like a chunk, or "".

    >>> folder_of_chunk("a.zarr/x/c/3/0"), folder_of_chunk("a.zarr/x/zarr.json")
    ('a.zarr/x/', '')
    """
    return next((root for root, _ in possible_places(key)), "")


def _folder(key: str, end: int) -> str:
    return key[: end + 1] if key[end : end + 1] == "/" else key[:end]
