"""Headerless rows of numbers, as recorders write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.objects import (
    Measure,
    Reader,
    Visit,
    one_of,
    refuse_unknown,
    whole_number,
)
from growcache.remote.formats.rows import Grid, Rows, read_samples
from growcache.remote.store import Entry
from growcache.schema import KINDS, Sample

_OPTIONS = (
    "dtype", "shape", "offset", "channels", "window", "stride", "edge", "phase",
)  # fmt: skip


class RawFormat:
    """Rows of one dtype and shape behind ``offset`` bytes; what fills no row at the end is left out."""

    ranged = True
    listed = True
    code_digest = None

    def __init__(
        self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int, grid: Grid
    ) -> None:
        self._dtype = dtype
        self._shape = shape
        self._offset = offset
        self._grid = grid

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        return self._grid.measure(self._rows(reader.entry), reader.entry.size)

    async def read(self, reader: Reader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """See `ObjectFormat.read`."""
        return await read_samples(reader, self._rows(reader.entry), self._grid, visit)

    def _rows(self, entry: Entry) -> Rows:
        if entry.size < self._offset:
            raise FormatError(
                f"{entry.key}: expected rows behind an offset of {self._offset} bytes, found "
                f"{entry.size} bytes"
            )
        row = Rows(self._offset, 0, self._shape, self._dtype)
        count = (entry.size - self._offset) // row.row_bytes
        return Rows(self._offset, count, self._shape, self._dtype)


def open_raw(options: Mapping[str, Any]) -> RawFormat:
    """Return the format.

    Options:
        dtype: with byte order, as in ``<i2``; ``=`` and no order mean little-endian.
        shape: of one row; a number, or a list of them. Default: a single value.
        offset: bytes before the first row.
        channels: which elements of the row's first axis to keep.
        window: rows of one sample; without it each row is a sample.
        stride: rows from one window to the next; the window by default.
        edge: ``drop`` or ``pad`` (with zeros) windows that reach past the end.
        phase: ``random``: the grid of windows starts elsewhere in each pass; ``zero``.

    Raises:
        ConfigError: an unknown option, or a value that cannot be meant.
    """
    refuse_unknown("raw", options, _OPTIONS)
    window = whole_number(options, "window", 1)
    stride = whole_number(options, "stride", 1) or window or 1
    shape = _shape(options.get("shape", ()))
    grid = Grid(
        window,
        stride,
        pad=one_of(options, "edge", ("drop", "pad"), "drop") == "pad",
        random_phase=one_of(options, "phase", ("random", "zero"), "random") == "random",
        channels=_channels(options.get("channels"), shape),
    )
    return RawFormat(_dtype(options), shape, whole_number(options, "offset", 0) or 0, grid)


def _dtype(options: Mapping[str, Any]) -> np.dtype[np.generic]:
    if "dtype" not in options:
        raise ConfigError("source.options: format raw needs dtype, as in dtype: <i2")
    try:
        dtype: np.dtype[np.generic] = np.dtype(options["dtype"])
    except (TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"source.options.dtype: {error}") from None
    if dtype.kind not in KINDS or dtype.itemsize == 0 or dtype.subdtype is not None:
        raise ConfigError(f"source.options.dtype: expected a number, found {dtype}")
    return dtype


def _shape(value: object) -> tuple[int, ...]:
    numbers = [value] if isinstance(value, int) else value
    if isinstance(numbers, list | tuple) and all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers
    ):
        return tuple(numbers)
    raise ConfigError(f"source.options.shape: expected positive integers, found {value!r}")


def _channels(value: object, shape: tuple[int, ...]) -> tuple[int, ...] | None:
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
