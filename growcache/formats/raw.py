"""Objects without a header: format ``bytes`` (one sample) and format ``raw`` (rows of numbers)."""

from __future__ import annotations

from collections.abc import Mapping
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
    integer_option,
    read_whole,
    refuse_unknown_options,
)
from growcache.formats.items import ItemsFormat, decode_option
from growcache.formats.rows import RowLayout, SampleGrid, read_samples, window_option
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


_RAW_OPTIONS = (
    "dtype", "shape", "offset", "channels", "window", "stride", "edge", "phase",
)  # fmt: skip


class RawFormat(ObjectFormat):
    """An incomplete last row is left out."""

    ranged = True

    def __init__(
        self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int, grid: SampleGrid
    ) -> None:
        self._dtype = dtype
        self._shape = shape
        self._offset = offset
        self._grid = grid

    async def measure(self, reader: ObjectReader) -> Measure:
        return self._grid.measure(self._rows(reader.entry), reader.entry.size)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        return await read_samples(reader, self._rows(reader.entry), self._grid, visit)

    def _rows(self, entry: Entry) -> RowLayout:
        if entry.size < self._offset:
            raise FormatError(
                f"{entry.key}: expected rows behind an offset of {self._offset} bytes, found "
                f"{entry.size} bytes"
            )
        row = RowLayout(self._offset, 0, self._shape, self._dtype)
        count = (entry.size - self._offset) // row.row_bytes
        return RowLayout(self._offset, count, self._shape, self._dtype)


def open_raw(options: Mapping[str, Any]) -> RawFormat:
    refuse_unknown_options("raw", options, _RAW_OPTIONS)
    shape = _shape_option(options.get("shape", ()))
    grid = replace(
        window_option(options, "random"),
        channels=_channels_option(options.get("channels"), shape),
    )
    return RawFormat(
        _dtype_option(options), shape, integer_option(options, "offset", 0) or 0, grid
    )


def _dtype_option(options: Mapping[str, Any]) -> np.dtype[np.generic]:
    if "dtype" not in options:
        raise ConfigError("source.options: format raw needs dtype, as in dtype: <i2")
    try:
        dtype: np.dtype[np.generic] = np.dtype(options["dtype"])
    except (TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"source.options.dtype: {error}") from None
    if dtype.kind not in DTYPE_KINDS or dtype.itemsize == 0 or dtype.subdtype is not None:
        raise ConfigError(f"source.options.dtype: expected a number, found {dtype}")
    return dtype


def _shape_option(value: object) -> tuple[int, ...]:
    numbers = [value] if isinstance(value, int) else value
    if isinstance(numbers, list | tuple) and all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers
    ):
        return tuple(numbers)
    raise ConfigError(f"source.options.shape: expected positive integers, found {value!r}")


def _channels_option(value: object, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not shape:
        raise ConfigError("source.options.channels: rows of a single value have no channels")
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(c, int) and 0 <= c < shape[0] for c in value)
    ):
        return tuple(value)
    raise ConfigError(
        f"source.options.channels: expected numbers from 0 to {shape[0] - 1}, found {value!r}"
    )
