"""NumPy's ``.npy``: an object is one sample, or its rows or windows of rows are samples."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import (
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    choice_option,
    names_option,
    read_whole,
    refuse_unknown_options,
)
from growcache.formats.contiguous import ArrayLayout, ContiguousFormat, native_order
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, grid_option
from growcache.formats.npy_dtypes import (
    MINIFLOATS,
    fields_of,
    has_meaning,
    parse_descr,
    widened,
)
from growcache.formats.signatures import SIGNATURE_BYTES, advice_on
from growcache.schema import Array, Sample
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer


_MAGIC = b"\x93NUMPY"
_PROBE = 512  # NumPy pads headers to 64, and nearly all end before 128
_LEAST_PROBE = 128  # the shortest header that NumPy writes now
_MOST_EMPTY_ROWS = 1 << 16  # they take no byte of the object, but memory of its reader
_LONGEST_HEADER = 10_000  # NumPy's own limit against hostile headers
_KNOWN, _KNOWN_BYTES = 400, 8192 * 400  # bytes of a kept header, and of all of them
_NAMES = {"descr", "fortran_order", "shape"}
_ITEM = re.compile(
    r"""\s*(?P<quote>['"])(?P<name>descr|fortran_order|shape)(?P=quote)\s*:\s*"""
    r"""(?P<value>'[^'\\]*'|"[^"\\]*"|\[[^{}]*\]|\([^(){}]*\)|True|False)\s*(?:,\s*|\Z|(?=\}))"""
)
_SIZE = re.compile(r"[0-9]{1,19}")  # Python 2's L is removed before
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 58  # as NumPy counts, which ignores empty dimensions


@dataclass(frozen=True, slots=True)
class NpyHeader:
    data: int  # first byte of the values
    dtype: np.dtype[np.generic]  # byte order included
    shape: tuple[int, ...]
    fortran: bool  # whether the first axis varies fastest

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ValueOptions:
    dtype: str | None = None  # one of `MINIFLOATS`, if NumPy wrote void
    fields: tuple[str, ...] | None = None  # of records; None: all

    def changes(self, dtype: np.dtype[Any]) -> bool:
        return self.dtype is not None or has_meaning(dtype)

    def sample_of(self, values: Array) -> Sample:
        if self.dtype is not None:
            return {"x": widened(values, self.dtype)}
        if values.dtype.names is None or self.fields is None:
            return fields_of("x", values)
        return fields_of("x", _chosen_fields(values, self.fields))


def _chosen_fields(values: Array, fields: tuple[str, ...]) -> Array:
    names = values.dtype.names or ()
    for name in fields:
        if name not in names:
            raise FormatError(
                f"expected a field {name!r:.40}, found {', '.join(names)[:160]}", code="GC303"
            )
    return values[list(fields)]


class NpyWholeFormat(ObjectFormat):
    def __init__(self, meaning: ValueOptions) -> None:
        self._meaning = meaning

    async def measure(self, reader: ObjectReader) -> Measure:
        header = await read_npy_header(reader, dtype=self._meaning.dtype)
        return Measure(float(header.nbytes), reader.entry.size - header.nbytes, 1)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        data = await read_whole(reader)
        header = parse_npy_header(data, reader.entry, self._meaning.dtype)
        shape = header.shape
        flat = np.frombuffer(memoryview(data), header.dtype, math.prod(shape), header.data)
        values = native_order(flat.reshape(shape, order="F" if header.fortran else "C"))
        sample: Sample = {"x": values}
        if self._meaning.changes(values.dtype):
            with named_errors(reader.entry.key):
                sample = self._meaning.sample_of(values)
        return [(sample, 0, shape[0] if shape else reader.entry.size)]


class NpyWindowsFormat(ContiguousFormat):
    def __init__(self, grid: ArrayGrid, meaning: ValueOptions) -> None:
        super().__init__(grid, _KNOWN_BYTES)
        self._meaning = meaning
        self._probe = _PROBE

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, ArrayLayout], int]:
        header = await read_npy_header(reader, self._probe, self._meaning.dtype)
        self._probe = max(header.data, _LEAST_PROBE)  # the next header is probably as long
        return {"x": array_layout(header, reader.entry)}, _KNOWN

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        found = await super().read(reader, visit)
        if not found or not self._meaning.changes(found[0][0]["x"].dtype):
            return found
        with named_errors(reader.entry.key):
            return [
                (self._meaning.sample_of(one["x"]), start, stop) for one, start, stop in found
            ]


@contextmanager
def named_errors(key: str) -> Iterator[None]:
    """Add the object's name to errors about its values."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{key}: {error}", code=error.code) from None


async def read_npy_header(
    reader: ObjectReader, probe: int = _PROBE, dtype: str | None = None
) -> NpyHeader:
    head = await reader.read(0, probe)
    if (end := npy_header_end(head, reader.entry)) > memoryview(head).nbytes:
        head = await reader.read(0, end)
    return parse_npy_header(head, reader.entry, dtype)


def parse_npy_header(data: Buffer, entry: Entry, dtype: str | None = None) -> NpyHeader:
    """Parse a header. Nothing is executed or unpickled."""
    view = memoryview(data)
    end = npy_header_end(view, entry)
    try:
        header = _parse_dict(bytes(view[:end]), dtype)
    except FormatError as error:
        raise FormatError(f"{entry.key}: {error}", code=error.code) from None
    needed = end + header.nbytes
    if needed > entry.size:
        raise FormatError(
            f"{entry.key}: its header promises {needed} bytes, the object has {entry.size}",
            code="GC302",
        )
    return header


def npy_header_end(data: Buffer, entry: Entry) -> int:
    view = memoryview(data)
    if view.nbytes < 12 or view[:6] != _MAGIC or view[6] not in (1, 2, 3):
        advice = advice_on(bytes(view[:SIGNATURE_BYTES]))
        raise FormatError(
            f"{entry.key}: expected an .npy file, found {bytes(view[:8])!r}{advice}"
        )
    start = 10 if view[6] == 1 else 12
    length = int.from_bytes(view[8:start], "little")
    if length > _LONGEST_HEADER or start + length > entry.size:
        raise FormatError(
            f"{entry.key}: its .npy header claims {length} bytes, of at most "
            f"{min(_LONGEST_HEADER, entry.size)}",
            code="GC305",
        )
    return start + length


@functools.lru_cache(maxsize=64)  # most objects of a source share one header
def _parse_dict(head: bytes, dtype: str | None) -> NpyHeader:
    start = 10 if head[6] == 1 else 12
    fields = _header_items(head[start:], "utf-8" if head[6] == 3 else "latin-1")
    header = NpyHeader(len(head), parse_descr(fields["descr"], dtype), *_shape(fields))
    if math.prod(max(1, size) for size in header.shape) >= _MOST_ELEMENTS:
        raise FormatError(f"its header claims an array of {list(header.shape)}", code="GC302")
    return header


def _header_items(text: bytes, encoding: str) -> dict[str, str]:
    found = _parsed(text, encoding)
    if found is None:
        raise FormatError(f"its .npy header cannot be read: {text[:80]!r}")
    return found


def _parsed(text: bytes, encoding: str) -> dict[str, str] | None:
    # Not by ast.literal_eval, because it runs Python's compiler on untrusted text.
    try:
        words = text.decode(encoding).strip()
    except UnicodeDecodeError:
        return None
    if not (words.startswith("{") and words.endswith("}")):
        return None
    found: dict[str, str] = {}
    at, end = 1, len(words) - 1
    while (item := _ITEM.match(words, at, end)) is not None:
        if item["name"] in found:
            return None
        found[item["name"]] = item["value"]
        at = item.end()
    return found if at == end and set(found) == _NAMES else None


def _shape(fields: dict[str, str]) -> tuple[tuple[int, ...], bool]:
    inside = fields["shape"][1:-1].strip().removesuffix(",")
    sizes = [size.strip().removesuffix("L") for size in inside.split(",")] if inside else []
    if len(sizes) <= _MOST_DIMENSIONS and all(map(_SIZE.fullmatch, sizes)):
        return tuple(map(int, sizes)), fields["fortran_order"] == "True"
    raise FormatError(f"its .npy header has shape {fields['shape'][:80]}", code="GC302")


def array_layout(header: NpyHeader, entry: Entry) -> ArrayLayout:
    if (
        not header.nbytes
        and math.prod(max(1, size) for size in header.shape) > _MOST_EMPTY_ROWS
    ):
        raise FormatError(
            f"{entry.key}: its header claims an array without values of shape {list(header.shape)}",
            code="GC302",
        )
    return ArrayLayout(header.data, header.shape, header.dtype, header.fortran)


def open_npy(options: Mapping[str, Any]) -> NpyWholeFormat | NpyWindowsFormat:
    refuse_unknown_options("npy", options, (*GRID_OPTIONS, "dtype", "fields"))
    grid = grid_option(options)
    dtype = options.get("dtype")
    if dtype is not None:
        dtype = choice_option(options, "dtype", MINIFLOATS, "")
    meaning = ValueOptions(dtype, names_option("fields", options.get("fields")))
    return NpyWholeFormat(meaning) if grid is None else NpyWindowsFormat(grid, meaning)
