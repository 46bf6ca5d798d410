"""Samples out of several arrays of equal length, of which rows lie in chunks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.objects import (
    DEFLATED,
    RUN_LENGTHS,
    Measure,
    Visit,
    most_decoded,
)
from growcache.remote.formats.rows import MOST_SAMPLES, Grid, native_order
from growcache.remote.formats.units import UnitOf, chosen
from growcache.remote.store import Entry
from growcache.schema import KINDS, Array, Sample

Values: TypeAlias = Array | list[Any]  # a list holds strings
MOST_ROWS = 1 << 58


class Series(Protocol):
    """An array, as samples are cut from it along its first axis."""

    @property
    def name(self) -> str:
        """Of the field."""

    @property
    def length(self) -> int:
        """Rows."""

    @property
    def row_bytes(self) -> int:
        """Of a row in memory."""

    @property
    def unit(self) -> int:
        """Rows that can only be fetched together."""

    async def rows(self, runs: Sequence[range]) -> list[Values]:
        """Return what these runs of rows hold.

        Raises:
            FormatError: they cannot be decoded.
        """


async def read_windows(
    series: Sequence[Series], grid: Grid, visit: Visit, entry: Entry
) -> list[tuple[Sample, int, int]]:
    """Return the samples of a visit, in the order of the object.

    Raises:
        FormatError: the arrays differ in length, or the visit is too large.
    """
    starts, wanted = _wanted(series, grid, visit, entry.key)
    return await _read(series, grid, entry, [starts[i] for i in _few(wanted, entry.key)])


def ordinals(series: Sequence[Series], grid: Grid, visit: Visit, key: str) -> Sequence[int]:
    """Return which of the windows a visit yields, counted from the first.

    Raises:
        FormatError: the arrays differ in length.
    """
    return _wanted(series, grid, visit, key)[1]


def _wanted(
    series: Sequence[Series], grid: Grid, visit: Visit, key: str
) -> tuple[range, Sequence[int]]:
    """Return where all windows start, and the ordinals of those of a visit."""
    count = common_length(series, key)
    starts = grid.starts(count, grid.phase(count, visit, key))
    return starts, chosen(len(starts), visit, key, _units(starts, _unit(series)))


async def read_starts(
    series: Sequence[Series], grid: Grid, visit: Visit, entry: Entry, starts: range
) -> list[tuple[Sample, int, int]]:
    """Return the samples of a visit to an object that owns the windows that start there.

    Raises:
        FormatError: the visit is too large.
    """
    wanted = chosen(len(starts), visit, entry.key, lambda _: range(len(starts)))
    return await _read(
        series, grid, entry, [starts[i] for i in _few(wanted, entry.key)], RUN_LENGTHS
    )


async def _read(
    series: Sequence[Series],
    grid: Grid,
    entry: Entry,
    wanted: list[int],
    ratio: int = DEFLATED,
) -> list[tuple[Sample, int, int]]:
    count = series[0].length
    runs = _runs(wanted, grid, count)
    rows = sum(len(run) for run, _ in runs)
    padded = len(wanted) * grid.length if grid.pad else 0
    refuse_much(entry, max(rows, padded) * sum(one.row_bytes for one in series), ratio)
    read = await asyncio.gather(*(one.rows([run for run, _ in runs]) for one in series))
    columns = [
        {name: values for one, found in zip(series, read, strict=True)
         for name, values in flattened(one.name, found[number])}
        for number in range(len(runs))
    ]  # fmt: skip
    return [
        (_cut(fields, start - run.start, grid), start, min(start + grid.length, count))
        for fields, (run, firsts) in zip(columns, runs, strict=True)
        for start in firsts
    ]


def measure_windows(series: Sequence[Series], grid: Grid, entry: Entry) -> Measure:
    """Return the sizes of an object: rows share its bytes, evenly.

    Compressed ones have another ratio each; then parts are estimates, and samples are shared
    out among them.
    """
    rows = common_length(series, entry.key)
    row_bytes = entry.size / max(1, rows)
    return Measure(
        max(1e-6, grid.stride * row_bytes),
        math.floor(grid.lost * row_bytes),
        len(grid.starts(rows, 0)),
        max(1, _unit(series) // grid.stride),
    )


def common_length(series: Sequence[Series], key: str) -> int:
    """Return how many rows all of them have.

    Raises:
        FormatError: they differ.
    """
    lengths = {one.name: one.length for one in series}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise FormatError(f"{key}: expected arrays of one length, found {found}")
    if (rows := series[0].length) > MOST_ROWS:
        raise FormatError(f"{key}: it claims {rows} rows")
    return rows


def refuse_much(entry: Entry, nbytes: int, ratio: int = DEFLATED) -> None:
    """Refuse what a sampler cannot hold.

    Raises:
        FormatError: it is too much for one visit.
    """
    if nbytes > (most := most_decoded(entry, ratio)):
        raise FormatError(
            f"{entry.key}: one visit may yield {most:,} bytes, found {nbytes:,}; set a "
            "smaller window, or a smaller sampling.samples_per_object"
        )


def flattened(name: str, values: Values) -> list[tuple[str, Values]]:
    """Return a field, those of a record as ``name.field``, as they can be cached."""
    if isinstance(values, list):
        return [(name, values)]
    if values.dtype.names is None:
        return [(name, native_order(values))]
    return [
        pair
        for inner in values.dtype.names
        for pair in flattened(f"{name}.{inner}", values[inner])
    ]


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether values of this dtype, or all fields of this record, can be cached."""
    if dtype.subdtype is not None:
        return is_numeric(dtype.subdtype[0])
    if dtype.names is not None:
        return all(is_numeric(dtype[name]) for name in dtype.names)
    return dtype.kind in KINDS and not dtype.hasobject and dtype.itemsize > 0


def _few(wanted: Sequence[int], key: str) -> Sequence[int]:
    if len(wanted) > MOST_SAMPLES:
        raise FormatError(
            f"{key}: one visit may yield {MOST_SAMPLES:,} samples, found {len(wanted):,}"
        )
    return wanted


def _unit(series: Sequence[Series]) -> int:
    """Return the rows that lie together in the array that has the most bytes."""
    return max(series, key=lambda one: one.row_bytes).unit


def _units(starts: range, rows: int) -> UnitOf:
    def unit_of(ordinal: int) -> range:
        border = starts[ordinal] // rows * rows
        first = -(-(border - starts.start) // starts.step)
        stop = -(-(border + rows - starts.start) // starts.step)
        return range(max(0, first), min(len(starts), stop))

    return unit_of


def _runs(starts: list[int], grid: Grid, count: int) -> list[tuple[range, list[int]]]:
    """Return rows that are wanted, each run once, and the starts within them."""
    runs: list[tuple[range, list[int]]] = []
    for start in starts:
        stop = min(start + grid.length, count)
        if runs and start <= runs[-1][0].stop:
            rows, firsts = runs[-1]
            runs[-1] = range(rows.start, stop), firsts
            firsts.append(start)
        else:
            runs.append((range(start, stop), [start]))
    return runs


def _cut(fields: Mapping[str, Values], at: int, grid: Grid) -> Sample:
    if grid.window is None:
        return {name: values[at] for name, values in fields.items()}
    return {
        name: _window(np.asarray(values), at, grid.window) for name, values in fields.items()
    }


def _window(values: Array, at: int, length: int) -> Array:
    window = values[at : at + length]
    if len(window) == length:
        return window
    padded = np.zeros((length, *values.shape[1:]), values.dtype)
    padded[: len(window)] = window
    return padded


def arrays_of(options: Mapping[str, Any], option: str) -> dict[str, str] | None:
    """Return the paths of arrays by field; None where none are named.

    Raises:
        ConfigError: no list of paths and no mapping to paths, or two of one name.
    """
    value = options.get(option)
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(path, str) for path in value):
        pairs = [(path.rstrip("/").rpartition("/")[2], path) for path in value]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = []
    plain = all(isinstance(name, str) and isinstance(path, str) for name, path in pairs)
    if not pairs or not plain or not all(name and path.strip("/") for name, path in pairs):
        raise ConfigError(
            f"source.options.{option}: expected a list of paths, or field: path, found {value!r}"
        )
    if len(named := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"source.options.{option}: two are named {twice!r}; give them names of their own, "
            "as in {a: path, b: other/path}"
        )
    return named
