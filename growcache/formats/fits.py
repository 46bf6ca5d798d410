"""FITS by astropy: images, or rows of binary tables, by byte range."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    names_option,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.byte_ranges import read_ranges
from growcache.formats.contiguous import ArrayLayout, ContiguousFormat, native_order
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, AxisGrid, grid_option
from growcache.formats.memory import refuse_large_sample
from growcache.formats.whole_arrays import WholeArrayFormat, refuse_large_array
from growcache.schema import DTYPE_KINDS, Array, Sample
from growcache.store.contract import Entry

_OPTIONS = (*GRID_OPTIONS, "hdu", "table", "columns")
_BLOCK = 2880  # bytes; headers and values fill whole blocks
_CARD = 80
_END = b"END".ljust(_CARD)
_PROBE_BYTES = 4 * _BLOCK
_MOST_HEADER_BYTES = 512 * _BLOCK
_MOST_HDUS = 1000
_KEPT_BYTES = 1 << 24
_DTYPES = {8: "u1", 16: ">i2", 32: ">i4", 64: ">i8", -32: ">f4", -64: ">f8"}  # by BITPIX
_SCALES = ("BSCALE", "BZERO", "BLANK")

HduName: TypeAlias = int | str | None


@dataclass(frozen=True, slots=True)
class FitsLayout(ArrayLayout):
    """Values of an image, or bytes of a table: [rows, bytes of a row]."""

    cards: str = ""  # from which astropy decodes stored values
    key: str = ""  # of the object

    @property
    def nheld(self) -> int:
        return 400 + len(self.cards)


async def find_hdu(reader: ObjectReader, wanted: HduName, *, is_table: bool) -> tuple[Any, int]:
    """Return the header of an HDU and the first byte of its values.

    By default the first that fits.
    """
    at = 0
    names: list[str] = []
    while at < reader.entry.size and len(names) < _MOST_HDUS:
        header, data = await _read_header(reader, at)
        name, number = str(_card(header, "EXTNAME", "")).strip(), len(names)
        names.append(name or str(number))
        if wanted is None:
            is_wanted = _is_table(header) if is_table else _is_image(header)
        elif isinstance(wanted, int):
            is_wanted = number == wanted
        else:
            is_wanted = name.upper() == wanted.upper()
        if is_wanted:
            if not (_is_table(header) if is_table else _is_image(header)):
                raise _other_kind_error(header, names[-1], reader.entry, is_table=is_table)
            return header, data
        at = data + -(-_values_bytes(header, reader.entry) // _BLOCK) * _BLOCK
    kind = "a binary table" if is_table else "an image"
    named = "" if wanted is None else f" {wanted!r}"
    raise FormatError(
        f"{reader.entry.key}: expected {kind}{named}, found {', '.join(names)[:160]}",
        code="GC303",
    )


def _is_image(header: Any) -> bool:
    first = str(_card(header, "XTENSION", "IMAGE")).strip()
    return first == "IMAGE" and _card(header, "NAXIS", 0) != 0


def _is_table(header: Any) -> bool:
    first = str(_card(header, "XTENSION", "")).strip()
    return first == "BINTABLE" and not _card(header, "ZIMAGE", False)


def _card(header: Any, name: str, default: Any) -> Any:
    """Return a card's value, or None if the card has no valid value."""
    from astropy.io import fits

    try:
        return header.get(name, default)
    except (ValueError, fits.VerifyError):
        return None


def _other_kind_error(header: Any, name: str, entry: Entry, *, is_table: bool) -> FormatError:
    if _card(header, "ZIMAGE", False):
        return FormatError(
            f"{entry.key}: HDU {name} is a compressed image, which is not read by range; unpack it "
            "with funpack",
            code="GC304",
        )
    kind = "a binary table" if is_table else "an image with values"
    found = _card(header, "XTENSION", "a header without values")
    return FormatError(f"{entry.key}: HDU {name}: expected {kind}, found {found}", code="GC303")


async def _read_header(reader: ObjectReader, at: int) -> tuple[Any, int]:
    entry, length = reader.entry, _PROBE_BYTES
    while True:
        head = bytes(memoryview(await reader.read(at, min(at + length, entry.size))))
        first = b"XTENSION=" if at else b"SIMPLE  ="
        if not head.startswith(first):
            raise FormatError(f"{entry.key}: expected a FITS header, found {head[:16]!r}")
        if (end := _header_end(head)) is not None:
            return _parsed(head[:end], entry), at + end
        if at + length >= entry.size or length >= _MOST_HEADER_BYTES:
            raise FormatError(f"{entry.key}: a FITS header in it has no end", code="GC302")
        length *= 4


def _header_end(head: bytes) -> int | None:
    """Return the end of a header's blocks, or None if the header continues."""
    for card in range(0, len(head) - _CARD + 1, _CARD):
        if head[card : card + _CARD] == _END:
            return min(-(-(card + _CARD) // _BLOCK) * _BLOCK, len(head))
    return None


def _parsed(head: bytes, entry: Entry) -> Any:
    from astropy.io import fits

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            header = fits.Header.fromstring(head)
            header.get("NAXIS")
            return header
    except (ValueError, TypeError, KeyError, fits.VerifyError) as error:
        raise _damaged_error(entry, error) from None


def _damaged_error(entry: Entry, error: Exception) -> FormatError:
    return FormatError(
        f"{entry.key}: its FITS header is damaged: {' '.join(str(error).split())}", code="GC302"
    )


def _values_bytes(header: Any, entry: Entry) -> int:
    return math.prod(_shape(header, entry)) * abs(_whole(header, "BITPIX", entry)) // 8 + (
        _whole(header, "PCOUNT", entry, 0)
    )


def _shape(header: Any, entry: Entry) -> tuple[int, ...]:
    """Return the sizes of the axes, slowest first."""
    count = _whole(header, "NAXIS", entry)
    if count == 0:
        return (0,)
    if count > 32:
        raise FormatError(f"{entry.key}: a FITS header in it claims {count} axes", code="GC302")
    return tuple(_whole(header, f"NAXIS{n}", entry) for n in range(count, 0, -1))


def _whole(header: Any, name: str, entry: Entry, default: int | None = None) -> int:
    value = _card(header, name, default)
    if type(value) is not int or (value < 0 and name != "BITPIX"):
        raise FormatError(
            f"{entry.key}: expected a number {name} in its header, found {value!r}"
        )
    return value


async def image_layout(reader: ObjectReader, wanted: HduName) -> FitsLayout:
    header, data = await find_hdu(reader, wanted, is_table=False)
    bits, shape = _whole(header, "BITPIX", reader.entry), _shape(header, reader.entry)
    if bits not in _DTYPES or _whole(header, "GCOUNT", reader.entry, 1) != 1:
        raise FormatError(f"{reader.entry.key}: expected an image, found BITPIX {bits}")
    cards = {name: _card(header, name, None) for name in _SCALES if name in header}
    for name, value in cards.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise FormatError(
                f"{reader.entry.key}: expected a number {name} in its header, found {value!r}"
            )
    is_plain = cards.get("BSCALE", 1) == 1 and cards.get("BZERO", 0) == 0
    if is_plain and ("BLANK" not in cards or bits < 0):
        cards = {}
    return _checked(
        FitsLayout(data, shape, np.dtype(_DTYPES[bits]), False, _text(cards)), reader
    )


async def table_layout(reader: ObjectReader, wanted: HduName) -> FitsLayout:
    header, data = await find_hdu(reader, wanted, is_table=True)
    shape = _shape(header, reader.entry)
    if len(shape) != 2:
        raise FormatError(
            f"{reader.entry.key}: expected a table, found {len(shape)} axes", code="GC303"
        )
    return _checked(
        FitsLayout(
            data, shape, np.dtype("u1"), False, _as_text(header, reader.entry), reader.entry.key
        ),
        reader,
    )


def _as_text(header: Any, entry: Entry) -> str:
    from astropy.io import fits

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # astropy corrects what it can
            return str(header.tostring())
    except (ValueError, fits.VerifyError) as error:
        raise _damaged_error(entry, error) from None


def _checked(layout: FitsLayout, reader: ObjectReader) -> FitsLayout:
    if not layout.nbytes or layout.offset + layout.nbytes > reader.entry.size:
        raise FormatError(
            f"{reader.entry.key}: its header promises {layout.nbytes:,} bytes of values at byte "
            f"{layout.offset:,}, the object has {reader.entry.size:,}",
            code="GC302",
        )
    return layout


def _text(cards: Mapping[str, Any]) -> str:
    from astropy.io import fits

    return fits.Header(list(cards.items())).tostring() if cards else ""


def scaled(values: Array, cards: str) -> Array:
    """Return the values that astropy decodes from stored ones."""
    if not cards:
        return values
    from astropy.io import fits

    bits = next(bits for bits, dtype in _DTYPES.items() if np.dtype(dtype) == values.dtype)
    header = fits.Header([("SIMPLE", True), ("BITPIX", bits), ("NAXIS", values.ndim)])
    for number, size in enumerate(reversed(values.shape), 1):
        header[f"NAXIS{number}"] = size
    header.extend(fits.Header.fromstring(cards), strip=False)
    image = fits.PrimaryHDU.fromstring(header.tostring().encode() + values.tobytes())
    return np.asarray(image.data)


class FitsImageFormat(ContiguousFormat):
    def __init__(self, grid: ArrayGrid, hdu: HduName) -> None:
        super().__init__(grid, _KEPT_BYTES)
        self._hdu = hdu

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, ArrayLayout], int]:
        found = await image_layout(reader, self._hdu)
        return {"x": found}, found.nheld

    def meant(
        self, found: SamplesWithOrigins, layouts: Mapping[str, ArrayLayout]
    ) -> SamplesWithOrigins:
        layout = layouts["x"]
        assert isinstance(layout, FitsLayout)
        if not layout.cards or not found:
            return found
        stored = np.stack([sample["x"] for sample, *_ in found]).astype(layout.dtype)
        values = native_order(scaled(stored, layout.cards))
        return [({"x": values[n]}, start, stop) for n, (_, start, stop) in enumerate(found)]


class FitsWholeFormat(WholeArrayFormat):
    def __init__(self, hdu: HduName) -> None:
        super().__init__(None)
        self._hdu = hdu

    async def load(self, reader: ObjectReader) -> tuple[ArrayLayout, Array]:
        layout = await image_layout(reader, self._hdu)
        refuse_large_array(layout.nbytes, reader.entry)
        refuse_large_sample(layout.nbytes, reader.entry.key)
        ((data),) = await read_ranges(reader, [(layout.offset, layout.offset + layout.nbytes)])
        return layout, np.frombuffer(data, layout.dtype).reshape(layout.shape)

    def meant(self, values: Array, layout: ArrayLayout) -> Array:
        assert isinstance(layout, FitsLayout)
        return scaled(values, layout.cards)


class FitsTableFormat(ContiguousFormat):
    def __init__(self, table: HduName, columns: tuple[str, ...] | None) -> None:
        super().__init__(ArrayGrid(((0, AxisGrid()),)), _KEPT_BYTES)
        self._table, self._columns = table, columns

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, ArrayLayout], int]:
        found = await table_layout(reader, self._table)
        return {"x": found}, found.nheld

    def meant(
        self, found: SamplesWithOrigins, layouts: Mapping[str, ArrayLayout]
    ) -> SamplesWithOrigins:
        layout = layouts["x"]
        assert isinstance(layout, FitsLayout)
        if not found:
            return found
        stored = np.stack([sample["x"] for sample, *_ in found])
        columns = table_columns(stored, layout, self._columns)
        return [(_row(columns, n), start, stop) for n, (_, start, stop) in enumerate(found)]


def table_columns(
    stored: Array, layout: FitsLayout, names: tuple[str, ...] | None
) -> dict[str, Array]:
    """Return the columns that astropy decodes from the bytes of rows."""
    from astropy.io import fits

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            header = fits.Header.fromstring(layout.cards)
            header["NAXIS2"], header["PCOUNT"] = len(stored), 0
            table = fits.BinTableHDU.fromstring(header.tostring().encode() + stored.tobytes())
            return _checked_columns(table, names, layout.key)
    except (ValueError, TypeError, KeyError, IndexError, OSError, fits.VerifyError) as error:
        raise FormatError(
            f"{layout.key}: its table is damaged: {' '.join(str(error).split())}", code="GC302"
        ) from None


def _checked_columns(table: Any, names: tuple[str, ...] | None, key: str) -> dict[str, Array]:
    known = list(table.columns.names)
    for name in names or ():
        if name not in known:
            raise FormatError(
                f"{key}: expected a column {name!r}, found {', '.join(known)[:160]}",
                code="GC303",
            )
    found = {}
    for name in names or known:
        values = np.asarray(table.data[name])
        if values.dtype.kind not in (*DTYPE_KINDS, "U", "S"):
            raise FormatError(
                f"{key}: column {name!r} has values of varying length; leave it out of "
                "source.options.columns",
                code="GC303",
            )
        found[name] = values if values.dtype.kind in "US" else native_order(values)
    return found


def _row(columns: Mapping[str, Array], number: int) -> Sample:
    return {
        name: str(values[number]) if values.dtype.kind in "US" else np.asarray(values[number])
        for name, values in columns.items()
    }


def open_fits(options: Mapping[str, Any]) -> ObjectFormat:
    refuse_unknown_options("fits", options, _OPTIONS)
    require_library("source.format: fits", "astropy", "fits")
    hdu, table = _hdu_option(options, "hdu"), _hdu_option(options, "table")
    columns = names_option("columns", options.get("columns"), "names of columns")
    grid = grid_option(options)
    if table is None:
        if columns is not None:
            raise ConfigError(
                "source.options.columns: needs table, as in table: 1", code="GC103"
            )
        return FitsWholeFormat(hdu) if grid is None else FitsImageFormat(grid, hdu)
    if grid is not None or hdu is not None:
        raise ConfigError(
            "source.options.table: its rows are the samples; drop hdu and window", code="GC103"
        )
    return FitsTableFormat(table, columns)


def _hdu_option(options: Mapping[str, Any], name: str) -> HduName:
    value = options.get(name)
    if value is None or (type(value) is int and value >= 0) or (type(value) is str and value):
        return value
    raise ConfigError(
        f"source.options.{name}: expected the number or name of an HDU, found {value!r}"
    )
