"""Objects without a header: format ``bytes`` (one sample) and format ``raw`` (rows of numbers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    choice_option,
    integer_option,
    read_whole,
    refuse_unknown_options,
)
from growcache.formats.contiguous import (
    ArrayLayout,
    measure_arrays,
    ordinals_of_visit,
    read_samples,
)
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, array_grid_option
from growcache.formats.items import ItemsFormat, decode_option
from growcache.schema import DTYPE_KINDS, Sample
from growcache.store.contract import Entry
from growcache.usercode import UserCode

_BYTES_OPTIONS = ("decode",)


class BytesFormat(ItemsFormat):
    def __init__(self, code: UserCode | None) -> None:
        super().__init__(code)
        self.ranged = False

    async def measure(self, reader: ObjectReader) -> Measure:
        return self.measure_of(reader.entry, 1)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        key, data = reader.entry.key, bytes(memoryview(await read_whole(reader)))
        sample: Sample | None = {"data": data}
        if self._code is not None:
            sample = await self._threads.run(lambda _: self.by_user(key, data, key))
        return [] if sample is None else [(sample, 0, reader.entry.size)]


def open_bytes(options: Mapping[str, Any]) -> BytesFormat:
    refuse_unknown_options("bytes", options, _BYTES_OPTIONS)
    return BytesFormat(decode_option(options)[1])


_RAW_OPTIONS = (*GRID_OPTIONS, "dtype", "shape", "order", "offset", "channels")


class RawFormat(ObjectFormat):
    """Rows of numbers. An incomplete last row is left out."""

    ranged = True

    def __init__(self, layout: ArrayLayout, growing: int, grid: ArrayGrid) -> None:
        self._layout = layout  # of an object with one row
        self._growing = growing  # axis that is as long as the object allows
        self._grid = grid
        self.says_ordinals = len(grid.cuts) > 1

    async def measure(self, reader: ObjectReader) -> Measure:
        return measure_arrays({"x": self._array(reader.entry)}, self._grid, reader.entry)

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        layouts = {"x": self._array(reader.entry)}
        return ordinals_of_visit(layouts, self._grid, visit, reader.entry.key)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        return await read_samples(reader, {"x": self._array(reader.entry)}, self._grid, visit)

    def _array(self, entry: Entry) -> ArrayLayout:
        offset, shape = self._layout.offset, list(self._layout.shape)
        if entry.size < offset:
            raise FormatError(
                f"{entry.key}: expected rows behind an offset of {offset} bytes, found "
                f"{entry.size} bytes"
            )
        shape[self._growing] = (entry.size - offset) // self._layout.nbytes
        return replace(self._layout, shape=tuple(shape))


def open_raw(options: Mapping[str, Any]) -> RawFormat:
    refuse_unknown_options("raw", options, _RAW_OPTIONS)
    shape, growing = _shape_option(options.get("shape", ()))
    fortran = choice_option(options, "order", ("C", "F"), "C") == "F"
    grid = array_grid_option(options, "random")
    if "channels" in options:
        if growing:
            raise ConfigError(
                "source.options.channels: chooses values of a row; with the shape of the whole "
                "array use select",
                code="GC103",
            )
        channels = _channels_option(options["channels"], shape[1:])
        if channels is not None:
            grid = replace(grid, select=((1, channels), *grid.select))
    layout = ArrayLayout(
        integer_option(options, "offset", 0) or 0, shape, _dtype_option(options), fortran
    )
    return RawFormat(layout, growing, grid)


def _dtype_option(options: Mapping[str, Any]) -> np.dtype[np.generic]:
    if "dtype" not in options:
        raise ConfigError(
            "source.options: format raw needs dtype, as in dtype: <i2", code="GC103"
        )
    try:
        dtype: np.dtype[np.generic] = np.dtype(options["dtype"])
    except (TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"source.options.dtype: {error}") from None
    if dtype.kind not in DTYPE_KINDS or dtype.itemsize == 0 or dtype.subdtype is not None:
        raise ConfigError(f"source.options.dtype: expected a number, found {dtype}")
    return dtype


def _shape_option(value: object) -> tuple[tuple[int, ...], int]:
    """Return the shape of an object with one row, and the axis along which there are more.

    >>> _shape_option(4), _shape_option([64, None])
    (((1, 4), 0), ((64, 1), 1))
    """
    sizes = [value] if isinstance(value, int) else value
    if isinstance(sizes, list | tuple) and all(
        n is None or (type(n) is int and n > 0) for n in sizes
    ):
        if None not in sizes:
            return (1, *sizes), 0
        if sizes.count(None) == 1:
            return tuple(n or 1 for n in sizes), sizes.index(None)
    raise ConfigError(
        "source.options.shape: expected the positive sizes of one row, or of the whole array "
        f"with null for the axis along which objects grow, found {value!r}"
    )


def _channels_option(value: object, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not shape:
        raise ConfigError(
            "source.options.channels: rows of a single value have no channels", code="GC103"
        )
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(c, int) and 0 <= c < shape[0] for c in value)
    ):
        return tuple(value)
    raise ConfigError(
        f"source.options.channels: expected numbers from 0 to {shape[0] - 1}, found {value!r}"
    )
