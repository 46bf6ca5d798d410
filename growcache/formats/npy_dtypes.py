"""Dtypes of .npy headers, parsed as text, and the conversion of their values into sample values.

Texts are parsed here, because NumPy would run Python's compiler on them, and build records of
any size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.schema import Array, Sample

DType = np.dtype[Any]
MINIFLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_NUMBER = re.compile(r"[<>|=]?(\?|b1|[iu][1248]|f(2|4|8|16)|c(8|16|32))")
_TIME = re.compile(r"[<>=]?[mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_TEXT = re.compile(r"[<>|=]?[SU][0-9]{1,7}")
_VOID = re.compile(r"[<>|]?V([0-9]{1,7})")
_STORED_MINIFLOATS = {
    "bfloat16": ("V2",),
    "float8_e4m3fn": ("V1",),
    "float8_e5m2": ("V1", "f1"),
}
_TOKEN = re.compile(r"\s*('[^'\\]*'|\"[^\"\\]*\"|[0-9]{1,9}|[\[\](),])")
# Text is handled as records with this one field, because NumPy fails on invalid Unicode.
_BARE_TEXT = "\0"
_MOST_DEPTH, _MOST_FIELDS = 8, 1000
_MOST_ITEM_BYTES = 1 << 24  # bytes of one record
_PICKLED = (
    "it has an array of Python objects (dtype object), which is a pickle, and unpickling runs the code "
    "of whoever wrote it; save plain arrays instead, or leave it out of source.options.fields of an "
    "archive; or, if you trust whoever can write these objects, set source.format: "
    '"package.module:function" to a function of yours, `def read(object): yield {"x": ...}`, which calls '
    "numpy.load(object.open(), allow_pickle=True)"
)


def parse_descr(descr: str, dtype: str | None = None) -> DType:
    """Return the dtype of a header.

    ``dtype`` is one of `MINIFLOATS`, which NumPy stores as void.

    >>> parse_descr("[('a', '<f4'), ('b', [('c', '|u1')], (2,))]").names
    ('a', 'b')
    """
    if descr.startswith("["):
        if dtype is not None:
            raise FormatError(
                f"source.options.dtype is {dtype}, and the array has records", code="GC303"
            )
        return _Records(descr).parse()
    name = descr[1:-1]
    if dtype is not None:
        return _stored_minifloat(name, dtype)
    found = _plain_dtype(name)
    return np.dtype([(_BARE_TEXT, found)]) if found.kind == "U" else found


def _stored_minifloat(name: str, dtype: str) -> DType:
    if name.lstrip("<>|=") not in _STORED_MINIFLOATS[dtype]:
        raise FormatError(
            f"source.options.dtype is {dtype}, and the array has dtype {name[:40]}; expected "
            f"{' or '.join(_STORED_MINIFLOATS[dtype])}",
            code="GC303",
        )
    return np.dtype("<u2" if dtype == "bfloat16" else "|u1")


def _plain_dtype(name: str) -> DType:
    if _NUMBER.fullmatch(name) or _TIME.fullmatch(name) or _TEXT.fullmatch(name):
        try:
            found = np.dtype(name)
        except (TypeError, ValueError):  # float128 on a machine without it
            found = np.dtype(object)
        if not found.hasobject and found.itemsize <= _MOST_ITEM_BYTES:
            return found
    bare = name.lstrip("<>|=")
    if bare == "O":
        raise FormatError(_PICKLED, code="GC304")
    if bare in ("V1", "V2", "f1"):
        raise FormatError(
            f"its dtype {name} does not say what its values are, because NumPy stores bfloat16 "
            f"and float8 this way; set source.options.dtype: {' or '.join(MINIFLOATS)}",
            code="GC304",
        )
    raise FormatError(f"expected an array of numbers, found dtype {name[:80]}", code="GC306")


class _Records:
    """A parser of ``[('a', '<f4'), ('b', '<i2', (3,)), ('', '|V4')]``, as NumPy writes it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split(text)
        self._at = self._fields = 0

    def _split(self, text: str) -> list[str]:
        tokens, at = [], 0
        while at < len(text.rstrip()):
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._error()
            tokens.append(found[1])
            at = found.end()
        return tokens

    def _error(self) -> FormatError:
        return FormatError(
            f"expected an array of numbers or of records, found dtype {self._text[:80]}",
            code="GC306",
        )

    def parse(self) -> DType:
        found = self._records(0)
        if self._at != len(self._tokens):
            raise self._error()
        return found

    def _next(self, *expected: str) -> str:
        if self._at >= len(self._tokens) or (
            expected and self._tokens[self._at] not in expected
        ):
            raise self._error()
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _records(self, depth: int) -> DType:
        if depth > _MOST_DEPTH:
            raise self._error()
        self._next("[")
        names, formats, offsets, size = [], [], [], 0
        while self._peek() != "]":
            name, found = self._field(depth)
            self._fields += 1
            if self._fields > _MOST_FIELDS:
                raise self._error()
            if name:  # fields without a name are padding
                names.append(name)
                formats.append(found)
                offsets.append(size)
            size += found.itemsize
            if size > _MOST_ITEM_BYTES:
                raise FormatError(
                    f"records of {size:,} bytes or more are refused", code="GC305"
                )
            if self._peek() != "]":
                self._next(",")
        self._next("]")
        if not names or len(set(names)) < len(names):
            raise self._error()
        how = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
        return np.dtype(how)  # type: ignore[call-overload, no-any-return]

    def _field(self, depth: int) -> tuple[str, DType]:
        self._next("(")
        name = self._name()
        self._next(",")
        found = self._records(depth + 1) if self._peek() == "[" else self._leaf(name)
        if self._peek() == ",":
            self._next(",")
            found = self._array_of(found)
        self._next(")")
        return name, found

    def _name(self) -> str:
        """Return the name, if there is a title and a name."""
        if self._peek() != "(":
            return self._string()
        self._next("(")
        self._string()
        self._next(",")
        name = self._string()
        self._next(")")
        return name

    def _string(self) -> str:
        token = self._next()
        if token[0] not in "'\"":
            raise self._error()
        return token[1:-1]

    def _leaf(self, name: str) -> DType:
        text = self._string()
        if (void := _VOID.fullmatch(text)) is not None and not name:
            return np.dtype(f"V{int(void[1])}")
        return _plain_dtype(text)

    def _array_of(self, found: DType) -> DType:
        self._next("(")
        shape = []
        while self._peek() != ")":
            shape.append(int(self._next()) if self._peek().isdigit() else -1)
            if self._peek() != ")":
                self._next(",")
        self._next(")")
        if min(shape, default=0) < 0:
            raise self._error()
        if math.prod(shape) * found.itemsize > _MOST_ITEM_BYTES:
            raise FormatError(f"records with an array of {shape} are refused", code="GC305")
        return np.dtype((found, tuple(shape)))


def has_meaning(dtype: DType) -> bool:
    """Whether values of this dtype are converted, or become several fields."""
    return dtype.names is not None or dtype.kind in "mMSU"


def fields_of(name: str, values: Array, prefix: str = "") -> Sample:
    """Return the fields of an array. Records become several, with dotted names."""
    values = np.asarray(values)  # a row of records may be a scalar
    if values.dtype.names is None:
        return {name: _meant(name, values)}
    if values.dtype.names == (_BARE_TEXT,):
        return {name: _text(name, values[_BARE_TEXT])}
    found: Sample = {}
    for own, key in _named(values.dtype, prefix):
        found |= fields_of(key, values[own], f"{key}.")
    return found


def _named(dtype: DType, prefix: str) -> Iterator[tuple[str, str]]:
    for own in dtype.names or ():
        yield own, prefix + own


def _meant(name: str, values: Array) -> Any:
    if values.dtype.kind in "mM":
        counts = values.astype(values.dtype.newbyteorder("<"), order="C")
        return counts.view("<i8").reshape(values.shape)
    if values.dtype.kind in "SU":
        return _text(name, values)
    return np.asarray(values, values.dtype.newbyteorder("<"), order="C")


def _text(name: str, values: Array) -> bytes | str:
    if values.ndim:
        raise FormatError(
            f"{name} is text of shape {list(values.shape)}, and a field has one text: set axis: 0 "
            "without window, or leave it out with source.options.fields",
            code="GC303",
        )
    if values.dtype.kind == "S":
        return values.tobytes().rstrip(b"\0")
    try:
        codec = "utf-32-be" if values.dtype.byteorder == ">" else "utf-32-le"
        return values.tobytes().decode(codec).rstrip("\0")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{name} is text that is not valid Unicode: {error}", code="GC306"
        ) from None


def widened(values: Array, dtype: str) -> Array:
    """Return bfloat16 as float32 and float8 as float16, which represent all of their values.

    >>> widened(np.array([0x3FC0], "<u2"), "bfloat16").tolist()
    [1.5]
    >>> widened(np.array([0x3C, 0x01, 0x7E], "u1"), "float8_e4m3fn").tolist()
    [1.5, 0.001953125, 448.0]
    """
    if dtype == "bfloat16":
        return (values.astype("<u4") << 16).view("<f4")
    if dtype == "float8_e5m2":
        return (values.astype("<u2") << 8).view("<f2")
    return _E4M3FN[values]


def _e4m3fn() -> Array:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    found = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    found[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -found, found).astype("<f2")


_E4M3FN = _e4m3fn()
