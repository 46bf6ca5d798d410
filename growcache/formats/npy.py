"""NumPy's ``.npy``: an object is one sample, or its rows or windows of rows are samples."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import (
    Measure,
    ObjectFormat,
    ObjectReader,
    Visit,
    read_whole,
    refuse_unknown_options,
)
from growcache.formats.contiguous import ArrayLayout, ContiguousFormat, native_order
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, grid_option
from growcache.formats.signatures import SIGNATURE_BYTES, advice_on
from growcache.schema import Sample
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer


_MAGIC = b"\x93NUMPY"
_PROBE = 512  # bytes; NumPy pads headers to 64, nearly all end before 128
_LEAST_PROBE = 128  # bytes; the shortest header that NumPy writes now
_MOST_EMPTY_ROWS = 1 << 16  # they take no byte of the object, but memory of its reader
_LONGEST_HEADER = 10_000  # bytes; NumPy's own limit against hostile ones
_KNOWN, _KNOWN_BYTES = 400, 8192 * 400  # bytes of a header that is kept, and of all of them
# Plain numbers only, checked before NumPy sees the text: it would build records of any size.
_NUMBER = re.compile(r"[<>|=]?(\?|b1|[iu][1248]|f(2|4|8|16)|c(8|16|32))")
_NAMES = {"descr", "fortran_order", "shape"}
_ITEM = re.compile(
    r"""\s*(?P<quote>['"])(?P<name>descr|fortran_order|shape)(?P=quote)\s*:\s*"""
    r"""(?P<value>'[^'\\]*'|"[^"\\]*"|\[[^{}]*\]|\([^(){}]*\)|True|False)\s*(?:,\s*|\Z|(?=\}))"""
)
_SIZE = re.compile(r"[0-9]{1,19}")  # Python 2's L is taken off before
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 58  # but for its empty dimensions, as NumPy counts


_PICKLED = (
    "it has an array of Python objects (dtype object), which is a pickle, and unpickling runs the code "
    "of whoever wrote it; save plain arrays instead, or leave it out of source.options.fields of an archive; or, if you trust whoever "
    'can write these objects, set source.format: "package.module:function" to a function of yours, '
    '`def read(object): yield {"x": ...}`, which calls numpy.load(object.open(), allow_pickle=True)'
)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    data: int  # where the values start, bytes
    dtype: np.dtype[np.generic]  # byte order included
    shape: tuple[int, ...]
    fortran: bool  # whether the first axis varies fastest

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class NpyWholeFormat(ObjectFormat):
    async def measure(self, reader: ObjectReader) -> Measure:
        header = await read_npy_header(reader)
        return Measure(float(header.nbytes), reader.entry.size - header.nbytes, 1)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        data = await read_whole(reader)
        header = parse_npy_header(data, reader.entry)
        shape = header.shape
        flat = np.frombuffer(memoryview(data), header.dtype, math.prod(shape), header.data)
        values = native_order(flat.reshape(shape, order="F" if header.fortran else "C"))
        return [({"x": values}, 0, shape[0] if shape else reader.entry.size)]


class NpyWindowsFormat(ContiguousFormat):
    def __init__(self, grid: ArrayGrid) -> None:
        super().__init__(grid, _KNOWN_BYTES)
        self._probe = _PROBE

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, ArrayLayout], int]:
        header = await read_npy_header(reader, self._probe)
        self._probe = max(header.data, _LEAST_PROBE)  # the next one is likely as long
        return {"x": array_layout(header, reader.entry)}, _KNOWN


async def read_npy_header(reader: ObjectReader, probe: int = _PROBE) -> NpyHeader:
    head = await reader.read(0, probe)
    if (end := npy_header_end(head, reader.entry)) > memoryview(head).nbytes:
        head = await reader.read(0, end)
    return parse_npy_header(head, reader.entry)


def parse_npy_header(data: Buffer, entry: Entry) -> NpyHeader:
    """Nothing is executed or unpickled."""
    view = memoryview(data)
    end = npy_header_end(view, entry)
    try:
        header = _parse_dict(bytes(view[:end]))
    except FormatError as error:
        raise FormatError(f"{entry.key}: {error}") from None
    needed = end + header.nbytes
    if needed > entry.size:
        raise FormatError(
            f"{entry.key}: its header promises {needed} bytes, the object has {entry.size}"
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
            f"{min(_LONGEST_HEADER, entry.size)}"
        )
    return start + length


@functools.lru_cache(maxsize=64)  # most objects of a source have one and the same header
def _parse_dict(head: bytes) -> NpyHeader:
    start = 10 if head[6] == 1 else 12
    fields = _header_items(head[start:], "utf-8" if head[6] == 3 else "latin-1")
    header = NpyHeader(len(head), _dtype(fields["descr"]), *_shape(fields))
    if math.prod(max(1, size) for size in header.shape) >= _MOST_ELEMENTS:
        raise FormatError(f"its header claims an array of {list(header.shape)}")
    return header


def _header_items(text: bytes, encoding: str) -> dict[str, str]:
    found = _parsed(text, encoding)
    if found is None:
        raise FormatError(f"its .npy header is not one: {text[:80]!r}")
    return found


def _parsed(text: bytes, encoding: str) -> dict[str, str] | None:
    # ast.literal_eval is not used, because it runs Python's compiler on untrusted text.
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


def _dtype(descr: str) -> np.dtype[np.generic]:
    name = descr[1:-1]
    if not descr.startswith("[") and _NUMBER.fullmatch(name):
        try:
            return np.dtype(name)
        except TypeError:  # float128 on a machine without it
            pass
    shown = descr if descr.startswith("[") else name
    if "O" in shown:
        raise FormatError(_PICKLED)
    raise FormatError(f"expected an array of plain numbers, found dtype {shown[:80]}")


def _shape(fields: dict[str, str]) -> tuple[tuple[int, ...], bool]:
    inside = fields["shape"][1:-1].strip().removesuffix(",")
    sizes = [size.strip().removesuffix("L") for size in inside.split(",")] if inside else []
    if len(sizes) <= _MOST_DIMENSIONS and all(map(_SIZE.fullmatch, sizes)):
        return tuple(map(int, sizes)), fields["fortran_order"] == "True"
    raise FormatError(f"its .npy header has shape {fields['shape'][:80]}")


def array_layout(header: NpyHeader, entry: Entry) -> ArrayLayout:
    if (
        not header.nbytes
        and math.prod(max(1, size) for size in header.shape) > _MOST_EMPTY_ROWS
    ):
        raise FormatError(
            f"{entry.key}: its header claims an array without values of shape {list(header.shape)}"
        )
    return ArrayLayout(header.data, header.shape, header.dtype, header.fortran)


def open_npy(options: Mapping[str, Any]) -> NpyWholeFormat | NpyWindowsFormat:
    refuse_unknown_options("npy", options, GRID_OPTIONS)
    grid = grid_option(options)
    return NpyWholeFormat() if grid is None else NpyWindowsFormat(grid)
