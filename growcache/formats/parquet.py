"""Parquet: each row is a sample. The wanted columns are read by row group."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import (
    MOST_VISIT_SAMPLES,
    ChunkedFormat,
    Measure,
    ObjectReader,
    PartlyReadError,
    SamplesWithOrigins,
    Visit,
    choice_option,
    most_decoded_bytes,
    names_option,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.byte_ranges import FetchedRanges, fetch_ranges
from growcache.formats.chunks import choose_ordinals
from growcache.formats.memory import reserve_decoded
from growcache.formats.parquet_footer import (
    FooterCache,
    ParquetFooter,
    column_kind,
    parquet_errors,
)
from growcache.schema import Array, sample_bytes
from growcache.store.contract import Entry

_COPIED_BYTES = 1 << 22  # of the rows of a batch, that each may have of its own

ColumnValues = tuple[Sequence[Any] | Array, Array]
"""A value per row, and which rows have none."""


def column_bytes(array: Any) -> int:
    """Return the bytes of a column's rows, without those that all rows of a file may share."""
    import pyarrow as pa

    return int((array.indices if pa.types.is_dictionary(array.type) else array).nbytes)


def column_values(name: str, array: Any) -> ColumnValues:
    """Return the rows of a column.

    Null is NaN among floating point numbers. Elsewhere such rows are marked as without value.
    """
    import pyarrow as pa

    kind, type_ = column_kind(array.type), array.type
    if kind == "dictionary":
        if column_kind(type_.value_type) in ("text", "binary"):
            return _dictionary_values(name, array)
        return column_values(name, array.cast(type_.value_type))
    if kind in ("text", "binary"):
        try:
            found = array.to_pylist()
        except UnicodeDecodeError as error:
            raise FormatError(
                f"column {name!r:.40} has text that is no UTF-8: {error}"
            ) from None
        return found, np.fromiter((value is None for value in found), np.bool_, len(found))
    if kind == "list":
        return _list_values(name, array)
    if kind == "time":
        array = array.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    return _number_values(array)


def _dictionary_values(name: str, array: Any) -> ColumnValues:
    """Return the rows of a column of which many may have one long value."""
    absent = array.is_null().to_numpy(zero_copy_only=False)
    at = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
    if int(_lengths(array.dictionary, at).sum()) <= _COPIED_BYTES:
        return column_values(name, array.dictionary_decode())
    some, places = np.unique(at[~absent], return_inverse=True)
    values, _ = column_values(name, array.dictionary.take(some))
    found: list[Any] = [None] * len(array)
    for row, place in zip(np.flatnonzero(~absent).tolist(), places.tolist(), strict=True):
        found[row] = values[place]
    # The dictionary itself may hold a value that is none.
    return found, np.fromiter((value is None for value in found), np.bool_, len(found))


def _lengths(values: Any, at: Array) -> Array:
    import pyarrow as pa

    type_ = values.type
    if not len(values) or pa.types.is_fixed_size_binary(type_):
        return np.full(len(at), type_.byte_width if len(values) else 0, np.int64)
    large = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
    offsets = np.frombuffer(values.buffers()[1], np.int64 if large else np.int32)
    places = at.astype(np.int64) + values.offset
    lengths: Array = offsets[places + 1].astype(np.int64) - offsets[places]
    return lengths


def _number_values(array: Any) -> tuple[Array, Array]:
    import pyarrow as pa
    import pyarrow.compute as pc

    missing = np.zeros(len(array), np.bool_)
    if array.null_count:
        absent = array.is_null().to_numpy(zero_copy_only=False)
        if pa.types.is_floating(array.type):
            return array.to_numpy(zero_copy_only=False), missing
        # Without nulls, for else integers would come as floating point numbers.
        zero = pa.scalar(False if pa.types.is_boolean(array.type) else 0, array.type)
        return pc.fill_null(array, zero).to_numpy(zero_copy_only=False), absent
    return array.to_numpy(zero_copy_only=False), missing


def _list_values(name: str, array: Any) -> ColumnValues:
    import pyarrow as pa

    count, absent = len(array), np.zeros(len(array), np.bool_)
    if array.null_count:
        absent = array.is_null().to_numpy(zero_copy_only=False).copy()
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        inner, gone = _inner_values(
            name, array.values[array.offset * size : (array.offset + count) * size]
        )
        shaped = inner.reshape(count, size, *inner.shape[1:])
        return shaped, absent | gone.reshape(count, -1).any(1)
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    first = int(offsets[0]) if len(offsets) else 0
    inner, gone = _inner_values(
        name, array.values[first : int(offsets[-1]) if len(offsets) else 0]
    )
    bounds = list(
        zip((offsets[:-1] - first).tolist(), (offsets[1:] - first).tolist(), strict=True)
    )
    if gone.any():
        absent |= np.array([gone[start:stop].any() for start, stop in bounds])
    return [inner[start:stop] for start, stop in bounds], absent


def _inner_values(name: str, array: Any) -> tuple[Array, Array]:
    """Return the values of all lists as one array, and which of its first axis are null."""
    values, missing = column_values(name, array)
    assert isinstance(values, np.ndarray)
    return values, missing


_OPTIONS = ("columns", "nulls")
_COPIES = 2  # of what is decoded, in memory together
_ROW_BYTES = 64  # that a row takes beside its values


class ParquetFormat(ChunkedFormat):
    ranged = True

    def __init__(self, columns: tuple[str, ...] | None, *, drop_nulls: bool) -> None:
        self._footers = FooterCache(columns)
        self._drop_nulls = drop_nulls

    async def measure(self, reader: ObjectReader) -> Measure:
        footer = await self._footers.get(reader)
        rows, groups = footer.starts[-1], len(footer.starts) - 1
        stride = reader.entry.size / max(1, rows)
        return Measure(stride, 0, rows, max(1, -(-rows // max(1, groups))))

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        footer = await self._footers.get(reader)
        wanted = choose_ordinals(
            footer.starts[-1], visit, reader.entry.key, footer.rows_of_group
        )
        if len(wanted) > MOST_VISIT_SAMPLES:
            raise FormatError(
                f"{reader.entry.key}: one visit may yield {MOST_VISIT_SAMPLES:,} samples, found "
                f"{len(wanted):,}; set a smaller sampling.samples_per_object"
            )
        groups = itertools.groupby(wanted, footer.group_of)
        parts = [(group, list(rows)) for group, rows in groups]
        read = [self._read_group(reader, footer, group, rows) for group, rows in parts]
        done = await asyncio.gather(*read)
        found = [row for rows, _ in done for row in rows]
        if gone := next((why for _, why in done if why), ""):
            raise PartlyReadError(f"{reader.entry.key}: {gone}", found)
        return found

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        footer = await self._footers.get(reader)
        return choose_ordinals(footer.starts[-1], visit, reader.entry.key, footer.rows_of_group)

    async def _read_group(
        self, reader: ObjectReader, footer: ParquetFooter, group: int, rows: Sequence[int]
    ) -> tuple[SamplesWithOrigins, str]:
        await asyncio.to_thread(footer.check, group, reader.entry)
        ranges = footer.ranges(group, reader.entry)
        data = await fetch_ranges(reader, ranges)
        image = FetchedRanges(reader.entry.size, dict(zip(ranges, data, strict=True)))
        await reserve_decoded(_COPIES * footer.decoded_bytes(group, reader.entry))
        return await asyncio.to_thread(self._decoded, image, footer, group, rows, reader.entry)

    def _decoded(
        self,
        image: FetchedRanges,
        footer: ParquetFooter,
        group: int,
        rows: Sequence[int],
        entry: Entry,
    ) -> tuple[SamplesWithOrigins, str]:
        """Return the rows, and why some are left out."""
        with parquet_errors(entry):
            try:
                return self._rows(image, footer, group, rows, entry)
            except FormatError as error:
                raise FormatError(f"{entry.key}: {error}") from None

    def _rows(
        self,
        image: FetchedRanges,
        footer: ParquetFooter,
        group: int,
        rows: Sequence[int],
        entry: Entry,
    ) -> tuple[SamplesWithOrigins, str]:
        gone = ""
        most, held = most_decoded_bytes(entry), 0
        found: SamplesWithOrigins = []
        at, first = 0, footer.starts[group]
        for batch in _decode_batches(image, footer, group):
            if at >= len(rows):
                break
            until = at
            while until < len(rows) and rows[until] < first + len(batch):
                until += 1
            if until > at:
                low, high = rows[at] - first, rows[until - 1] + 1 - first
                few = batch.slice(low, high - low)
                samples, why = self._samples(few, first + low, rows[at:until])
                gone = gone or why
                held += sum(map(column_bytes, few.columns)) + _ROW_BYTES * len(samples)
                if footer.variable:  # many rows may share one long value
                    held += sum(sample_bytes(sample) for sample, _, _ in samples)
                found += samples
            if held > most:
                raise FormatError(f"one visit may yield {most:,} bytes, found more")
            at, first = until, first + len(batch)
        if at < len(rows):
            raise FormatError(f"row group {group} has fewer rows than it says")
        return found, gone

    def _samples(
        self, batch: Any, first: int, rows: Sequence[int]
    ) -> tuple[SamplesWithOrigins, str]:
        names = batch.schema.names
        columns = [
            column_values(name, column)
            for name, column in zip(names, batch.columns, strict=True)
        ]
        kept, why = list(rows), ""
        for name, (_, absent) in zip(names, columns, strict=True):
            gone = {row for row in kept if absent[row - first]} if absent.any() else set()
            if gone and not why and not self._drop_nulls:
                why = (
                    f"column {name!r:.40} is null in row {min(gone)}, which only floating point "
                    "numbers can be (NaN); set nulls: drop to leave such rows out"
                )
            kept = [row for row in kept if row not in gone] if gone else kept
        values = [[column[row - first] for row in kept] for column, _ in columns]
        samples = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
        found = [(sample, row, row + 1) for sample, row in zip(samples, kept, strict=True)]
        return found, why


def _decode_batches(image: FetchedRanges, footer: ParquetFooter, group: int) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(
        pa.PythonFile(image, mode="r"),
        metadata=footer.metadata,
        pre_buffer=False,
        read_dictionary=footer.dictionary_columns(group),
    ) as file:
        yield from file.iter_batches(
            footer.batch_rows(group), [group], columns=list(footer.columns), use_threads=False
        )


def open_parquet(options: Mapping[str, Any]) -> ParquetFormat:
    """Return the format.

    Options:
        columns: names of those that are fields; all by default.
        nulls: rows with a null that cannot be NaN are left out: ``error`` says so in a hole,
            ``drop`` says nothing.

    Raises:
        ConfigError: an unknown option, a value that cannot be meant, or no pyarrow.
    """
    refuse_unknown_options("parquet", options, _OPTIONS)
    columns = options.get("columns")
    columns = names_option("columns", [columns] if isinstance(columns, str) else columns)
    drop = choice_option(options, "nulls", ("error", "drop"), "error") == "drop"
    require_library("source.format: parquet", "pyarrow", "parquet")
    return ParquetFormat(columns, drop_nulls=drop)
