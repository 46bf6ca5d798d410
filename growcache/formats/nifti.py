"""NIfTI volumes by nibabel: ``.nii`` by byte range, and ``.nii.gz`` whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import (
    ObjectReader,
    SamplesWithOrigins,
    choice_option,
    read_whole,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.compressed import (
    UnpackLimit,
    compression_option,
    read_unpacked,
    refuse_compressed,
)
from growcache.formats.contiguous import ArrayLayout, ContiguousFormat
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, grid_option
from growcache.formats.memory import refuse_large_sample, reserve_decoded
from growcache.formats.whole_arrays import WholeArrayFormat, refuse_large_array
from growcache.schema import DTYPE_KINDS, Array
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OPTIONS = (*GRID_OPTIONS, "dtype", "compression")
_DTYPES = ("auto", "stored", "float32", "float64")
_HEADER_BYTES = {348: (344, b"n+1\0"), 540: (4, b"n+2\0")}  # place of the magic, by header size
_LONGEST_HEADER = 540
_KEPT_BYTES, _LAYOUT_BYTES = 1 << 22, 400  # of all kept layouts, and of one
_MOST_VALUES = 1 << 58
_SCALED_BYTES = 8  # of a value
_TRAILING_BYTES = 1 << 20  # that may follow the values


@dataclass(frozen=True, slots=True)
class NiftiLayout(ArrayLayout):
    slope: float = 1.0
    inter: float = 0.0

    def scaled(self, values: Array, dtype: str) -> Array:
        """Return the values that nibabel computes from stored ones."""
        from nibabel.volumeutils import apply_read_scaling

        if dtype == "stored":
            return values
        native = values.astype(values.dtype.newbyteorder("="), copy=False)
        scale = (np.asanyarray(self.slope), np.asanyarray(self.inter))
        found: Array = apply_read_scaling(native, *scale)
        return found if dtype == "auto" else found.astype(dtype, copy=False)


def parse_nifti_header(data: Buffer, entry: Entry) -> NiftiLayout:
    head = bytes(memoryview(data)[:_LONGEST_HEADER])
    refuse_compressed(entry, head)
    size = next(
        (n for order in ("little", "big") if (n := _size(head, order)) in _HEADER_BYTES), 0
    )
    at, magic = _HEADER_BYTES.get(size, (0, b"?"))
    if len(head) < size or head[at : at + 4] != magic:
        raise FormatError(
            f"{entry.key}: expected a NIfTI file of header and values (.nii), found {head[:8]!r}"
        )
    layout = _layout(head[:size], entry)
    if layout.offset + layout.nbytes > entry.size:
        raise FormatError(
            f"{entry.key}: its header promises {layout.offset + layout.nbytes:,} bytes, the object "
            f"has {entry.size:,}",
            code="GC302",
        )
    return layout


def _size(head: bytes, order: Any) -> int:
    return int.from_bytes(head[:4], order)


def _layout(head: bytes, entry: Entry) -> NiftiLayout:
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header
    from nibabel.spatialimages import HeaderDataError

    kind = Nifti1Header if len(head) == 348 else Nifti2Header
    try:
        header = kind(head, check=False)
        shape = tuple(map(int, header.get_data_shape()))
        dtype, offset = header.get_data_dtype(), int(header.get_data_offset())
        slope, inter = header.get_slope_inter()
    except (HeaderDataError, ValueError, OverflowError, KeyError) as error:
        raise FormatError(
            f"{entry.key}: its NIfTI header is damaged: {error}", code="GC302"
        ) from None
    if not shape or min(shape) < 1 or math.prod(shape) > _MOST_VALUES or offset < len(head):
        raise FormatError(
            f"{entry.key}: its NIfTI header claims an array of {list(shape)} at byte {offset:,}",
            code="GC302",
        )
    if dtype.kind not in DTYPE_KINDS:
        raise FormatError(
            f"{entry.key}: expected an array of plain numbers, found {dtype}", code="GC306"
        )
    scale = (1.0, 0.0) if slope is None or inter is None else (slope, inter)
    return NiftiLayout(offset, shape, dtype, True, *scale)


class NiftiWindowsFormat(ContiguousFormat):
    def __init__(self, grid: ArrayGrid, dtype: str) -> None:
        super().__init__(grid, _KEPT_BYTES)
        self._dtype = dtype

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, ArrayLayout], int]:
        head = await reader.read(0, _LONGEST_HEADER)
        return {"x": parse_nifti_header(head, reader.entry)}, _LAYOUT_BYTES

    def meant(
        self, found: SamplesWithOrigins, layouts: Mapping[str, ArrayLayout]
    ) -> SamplesWithOrigins:
        return [
            ({"x": _meant(sample["x"], layouts["x"], self._dtype)}, start, stop)
            for sample, start, stop in found
        ]


class NiftiWholeFormat(WholeArrayFormat):
    def __init__(self, grid: ArrayGrid | None, dtype: str, compression: str) -> None:
        super().__init__(grid)
        self._dtype, self._compression = dtype, compression

    async def load(self, reader: ObjectReader) -> tuple[ArrayLayout, Array]:
        if self._compression == "none":
            data = await read_whole(reader)
        else:
            data = await read_unpacked(
                reader, self._compression, self.unpack_limit(reader.entry)
            )
        size = memoryview(data).nbytes
        layout = parse_nifti_header(data, replace(reader.entry, size=size))
        values = math.prod(layout.shape)
        if self._grid is None and self._dtype != "stored":
            refuse_large_array(_SCALED_BYTES * values, reader.entry)
            await reserve_decoded(_SCALED_BYTES * values)
        stored = np.frombuffer(memoryview(data), layout.dtype, values, layout.offset)
        return layout, stored.reshape(layout.shape, order="F")

    def unpack_limit(self, entry: Entry) -> UnpackLimit:
        """Return the size that the header announces, and some more."""
        promised = 0

        def limit(head: bytes, _: int) -> int:
            nonlocal promised
            if not promised and len(head) >= _LONGEST_HEADER:
                layout = parse_nifti_header(head, replace(entry, size=_MOST_VALUES))
                if self._grid is None:
                    refuse_large_sample(layout.nbytes, entry.key)
                promised = layout.offset + layout.nbytes + _TRAILING_BYTES
            return promised or _LONGEST_HEADER

        return limit

    def meant(self, values: Array, layout: ArrayLayout) -> Array:
        return _meant(values, layout, self._dtype)


def _meant(values: Any, layout: ArrayLayout, dtype: str) -> Array:
    assert isinstance(layout, NiftiLayout)
    return layout.scaled(values, dtype)


def open_nifti(options: Mapping[str, Any]) -> NiftiWindowsFormat | NiftiWholeFormat:
    refuse_unknown_options("nifti", options, _OPTIONS)
    require_library("source.format: nifti", "nibabel", "nifti")
    dtype = choice_option(options, "dtype", _DTYPES, "auto")
    compression = compression_option(options, ())
    grid = grid_option(options)
    if grid is None or compression != "none":
        return NiftiWholeFormat(grid, dtype, compression)
    return NiftiWindowsFormat(grid, dtype)
