"""What the members of a sample become, by their extensions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from growcache.errors import FormatError
from growcache.remote.formats.image import decode_image
from growcache.remote.formats.jsonvalues import as_found, parse
from growcache.remote.formats.npy import parse_header
from growcache.remote.formats.rows import native_order
from growcache.remote.store import Entry
from growcache.schema import Array, Value

Convert: TypeAlias = Callable[[bytes, Entry], Value]
_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
IMAGES = ("jpg", "jpeg", "png", "webp")


def of_member(data: bytes, ext: str, entry: Entry, *, images: bool) -> Value:
    """Return the value of a member; what its extension says nothing of stays bytes.

    Args:
        data: its content.
        ext: its extension, of which the last part counts: ``seg.png`` is a PNG.
        entry: of the object.
        images: whether images are decoded.

    Raises:
        FormatError: it is not what its extension says.
    """
    kind = ext.rpartition(".")[2]
    try:
        if kind in IMAGES and images:
            return decode_image(data, "it")
        return _CONVERT[kind](data, entry) if kind in _CONVERT else data
    except FormatError as error:
        raise FormatError(f"{ext}: {error}") from None


def _array(data: bytes, entry: Entry) -> Array:
    header = parse_header(data, replace(entry, key="it", size=len(data)))
    count = math.prod(header.shape)
    flat = np.frombuffer(data, header.dtype, count, header.data)
    return native_order(flat.reshape(header.shape, order="F" if header.fortran else "C"))


def _json(data: bytes, _: Entry) -> Value:
    value = parse(data)
    if value is None:
        raise FormatError("expected a value, found null")
    try:
        return as_found(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise FormatError(str(error)) from None


def _text(data: bytes, _: Entry) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"expected text in UTF-8, found byte {error.start:,} that is none"
        ) from None


def _integer(data: bytes, _: Entry) -> Array:
    found = _INTEGER.fullmatch(data)
    if found is None or not -(1 << 63) <= int(found[1]) < 1 << 63:
        raise FormatError(f"expected a 64-bit integer, found {data[:40]!r}")
    return np.array(int(found[1]), "<i8")


_CONVERT: dict[str, Convert] = {
    "npy": _array,
    "json": _json,
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _integer),
}
