"""Parquet: each row is a sample. The wanted columns are read by row group."""

from __future__ import annotations

import asyncio
import difflib
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import (
    MOST_VISIT_SAMPLES,
    Measure,
    ObjectFormat,
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
from growcache.formats.byte_ranges import FetchedRanges, NotFetchedError, read_ranges
from growcache.formats.chunks import choose_ordinals
from growcache.formats.memory import SingleFlightCache, reserve_decoded
from growcache.schema import Array, sample_bytes
from growcache.store.contract import Entry

_MAGIC = b"PAR1"
_TAIL_BYTES, _LEAST_TAIL_BYTES = 1 << 16, 1 << 12  # which hold the whole footer of most files
_SHARED_BYTES = 1 << 21  # of a column, decoded; most dictionaries have half of that at most
_BATCH_ROWS = 1 << 16  # rows decoded at once,
_VARIABLE_BATCH_ROWS, _LEAST_BATCH_ROWS = 1 << 8, 1 << 5  # and where they may be of any size,
_BATCH_BYTES = 1 << 28  # so that they are counted in time
_MOST_FOOTER_BYTES = 1 << 26  # bytes
_KNOWN_BYTES = 1 << 24  # of footers that are kept, as stored
_KNOWN_FOOTERS = 4096
_OLD_WRITER_BYTES = 100  # bytes that writers of old left out of a chunk's size
_COPIED_BYTES = 1 << 22  # of the rows of a batch, that each may have of its own


@dataclass(frozen=True, slots=True)
class ParquetFooter:
    metadata: Any  # of pyarrow
    starts: list[int]  # first row of each row group, and the number of all rows
    columns: tuple[str, ...]  # the wanted ones
    column_numbers: tuple[int, ...]  # the numbers of their stored columns
    variable: bool  # whether a value can have any length
    checked_groups: set[int] = field(default_factory=set)  # row groups that were checked

    def group_of(self, row: int) -> int:
        return bisect_right(self.starts, row) - 1

    def rows_of_group(self, row: int) -> range:
        group = self.group_of(row)
        return range(self.starts[group], self.starts[group + 1])

    def check(self, group: int, entry: Entry) -> None:
        """Raise where the description of a row group is damaged.

        Arrow would end the process if its metadata were asked for a column. Beginning to read a
        column checks the same and raises; the read itself may fail, because nothing is fetched.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if group in self.checked_groups:
            return
        with parquet_errors(entry):
            nothing = pa.PythonFile(FetchedRanges(entry.size, {}), mode="r")
            with pq.ParquetFile(nothing, metadata=self.metadata, pre_buffer=False) as file:
                for name in self.columns:
                    with suppress(NotFetchedError, StopIteration):
                        next(file.iter_batches(1, [group], columns=[name], use_threads=False))
        self.checked_groups.add(group)

    def decoded_bytes(self, group: int, entry: Entry) -> int:
        """Return the decoded size, in which a dictionary's value counts once."""
        metadata = self.metadata.row_group(group)
        nbytes = sum(
            metadata.column(leaf).total_uncompressed_size for leaf in self.column_numbers
        )
        if nbytes > (most := most_decoded_bytes(entry)):
            raise FormatError(
                f"{entry.key}: one visit may yield {most:,} bytes, and row group {group} has "
                f"{nbytes:,}; write smaller row groups"
            )
        return max(0, int(nbytes))

    def dictionary_columns(self, group: int) -> list[str]:
        """Return the columns to be read as a dictionary and indices.

        Many rows may share one long value, which would otherwise be copied for each. Columns of
        many bytes are left out, because Arrow would take long to look for equal values.
        """
        metadata = self.metadata.row_group(group)
        columns = [metadata.column(leaf) for leaf in self.column_numbers]
        return [
            column.path_in_schema
            for column in columns
            if column.physical_type == "BYTE_ARRAY"
            and column.has_dictionary_page
            and column.total_uncompressed_size <= _SHARED_BYTES
            and column.path_in_schema in self.columns
        ]

    def batch_rows(self, group: int) -> int:
        """Return few rows where each may have one long value."""
        if not self.variable:
            return _BATCH_ROWS
        metadata = self.metadata.row_group(group)
        largest = max(
            (metadata.column(n).total_uncompressed_size for n in self.column_numbers), default=0
        )
        return max(
            _LEAST_BATCH_ROWS, min(_VARIABLE_BATCH_ROWS, _BATCH_BYTES // max(1, largest))
        )

    def ranges(self, group: int, entry: Entry) -> list[tuple[int, int]]:
        metadata = self.metadata.row_group(group)
        slack = (
            _OLD_WRITER_BYTES if str(self.metadata.created_by).startswith("parquet-mr") else 0
        )
        found = []
        for leaf in self.column_numbers:
            column = metadata.column(leaf)
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < (column.dictionary_page_offset or 0) < start:
                start = column.dictionary_page_offset
            stop = start + column.total_compressed_size
            if column.file_path:
                raise FormatError(
                    f"{entry.key}: a column is in another file, which is never opened"
                )
            if not 0 <= start <= stop <= entry.size:
                raise FormatError(f"{entry.key}: a column ends beyond the object")
            found.append((start, min(entry.size, stop + slack)))
        if sum(stop - start for start, stop in found) > (most := most_decoded_bytes(entry)):
            raise FormatError(f"{entry.key}: one visit may read {most:,} bytes of a row group")
        return found


class FooterCache:
    def __init__(self, columns: tuple[str, ...] | None) -> None:
        self._columns = columns
        self._known: SingleFlightCache[Entry, ParquetFooter] = SingleFlightCache(_KNOWN_BYTES)
        self._tail = _TAIL_BYTES  # what the footers before needed, and some more

    async def get(self, reader: ObjectReader) -> ParquetFooter:
        async def ask() -> tuple[ParquetFooter, int]:
            data = await self.footer_bytes(reader)
            footer = await asyncio.to_thread(_parse_footer, data, self._columns, reader.entry)
            return footer, len(data) + _KNOWN_BYTES // _KNOWN_FOOTERS

        return await self._known.get(reader.entry, ask)

    async def footer_bytes(self, reader: ObjectReader) -> bytes:
        size, key = reader.entry.size, reader.entry.key
        first = max(0, size - self._tail)
        tail = bytes(memoryview(await reader.read(first, size)))
        if size < 12 or tail[-4:] != _MAGIC:
            raise FormatError(f"{key}: expected a Parquet file, found {tail[-8:]!r} at its end")
        needed = int.from_bytes(tail[-8:-4], "little") + 8
        if needed + 4 > size or needed > _MOST_FOOTER_BYTES:
            raise FormatError(f"{key}: its footer claims {needed - 8:,} bytes")
        if needed > len(tail):
            tail = bytes(memoryview(await reader.read(size - needed, first))) + tail
        self._tail = max(_LEAST_TAIL_BYTES, needed * 5 // 4, min(self._tail, _TAIL_BYTES) // 2)
        return tail[len(tail) - needed :]


def _parse_footer(data: bytes, wanted: tuple[str, ...] | None, entry: Entry) -> ParquetFooter:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with parquet_errors(entry):
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + data))
        schema = metadata.schema.to_arrow_schema()
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if any(count < 0 for count in rows) or sum(rows) != metadata.num_rows:
        raise FormatError(f"{entry.key}: its row groups have not the rows that its footer says")
    columns = _chosen_columns(schema, wanted, entry)
    for name in columns:
        try:
            check_column_type(name, schema.field(name).type)
        except FormatError as error:
            raise FormatError(f"{entry.key}: {error}") from None
    return ParquetFooter(
        metadata,
        [0, *itertools.accumulate(rows)],
        columns,
        _leaves(schema, columns, metadata.num_columns, entry),
        any(is_variable(schema.field(name).type) for name in columns),
    )


def _chosen_columns(
    schema: Any, wanted: tuple[str, ...] | None, entry: Entry
) -> tuple[str, ...]:
    names = schema.names
    for name in wanted or names:
        if names.count(name) != 1:
            close = difflib.get_close_matches(name, names, n=1)
            shown = ", ".join(f"{one!r:.40}" for one in names[:8])
            hint = (
                f"did you mean {close[0]!r:.40}?" if close else f"there are {shown or 'none'}"
            )
            raise FormatError(f"{entry.key}: expected one column {name!r:.40}; {hint}")
    if not names:
        raise FormatError(f"{entry.key}: a table without columns")
    return wanted or tuple(names)


def _leaves(schema: Any, columns: Sequence[str], count: int, entry: Entry) -> tuple[int, ...]:
    """Return the numbers of the stored columns, several for a struct."""
    found: list[int] = []
    at = 0
    for one in schema:
        width = _width(one.type)
        if one.name in columns:
            found += range(at, at + width)
        at += width
    if at != count:
        raise FormatError(f"{entry.key}: its columns are not those of its schema")
    return tuple(found)


def _width(type_: Any) -> int:
    return sum(_width(type_.field(i).type) for i in range(type_.num_fields)) or 1


@contextmanager
def parquet_errors(entry: Entry) -> Iterator[None]:
    try:
        yield
    except FormatError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise FormatError(f"{entry.key}: cannot be read as Parquet: {said[:200]}") from error


def check_column_type(name: str, type_: Any) -> None:
    if column_kind(type_) is None:
        raise FormatError(
            f"column {name!r:.40} has type {str(type_)[:60]}; numbers, bool, times, strings, "
            "binary and lists of numbers can be read: leave it out of source.options.columns"
        )


def is_variable(type_: Any) -> bool:
    """Whether a few bytes of the object can stand for a value of any length."""
    return column_kind(type_) in ("text", "binary", "list", "dictionary")


def column_kind(type_: Any) -> str | None:
    from pyarrow import types

    if types.is_dictionary(type_):
        return (
            "dictionary"
            if column_kind(type_.value_type) in ("text", "binary", "number")
            else None
        )
    if types.is_string(type_) or types.is_large_string(type_):
        return "text"
    if types.is_binary(type_) or types.is_large_binary(type_):
        return "binary"
    if types.is_fixed_size_binary(type_) and not types.is_decimal(type_):
        return "binary"
    if types.is_temporal(type_) and not types.is_interval(type_):
        return "time"
    if types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_):
        return "number"
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        inner = type_.value_type
        fixed = types.is_fixed_size_list(inner) and column_kind(inner) == "list"
        return "list" if fixed or column_kind(inner) in ("number", "time") else None
    return None


ColumnValues = tuple[Sequence[Any] | Array, Array]
"""A value per row, and which rows have none."""


def column_bytes(array: Any) -> int:
    """Return the bytes of rows, without those that all rows of a file may share."""
    import pyarrow as pa

    return int((array.indices if pa.types.is_dictionary(array.type) else array).nbytes)


def column_values(name: str, array: Any) -> ColumnValues:
    """Null is NaN among floats; elsewhere such rows are marked as without value."""
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
    """Return the values of all lists, and which rows of them are null."""
    values, missing = column_values(name, array)
    assert isinstance(values, np.ndarray)
    return values, missing


_OPTIONS = ("columns", "nulls")
_COPIES = 2  # of what is decoded, in memory together
_ROW_BYTES = 64  # of a row, in addition to its values


class ParquetFormat(ObjectFormat):
    ranged = says_ordinals = True

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
        with parquet_errors(reader.entry):
            ranges = footer.ranges(group, reader.entry)
        data = await read_ranges(reader, ranges)
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
    refuse_unknown_options("parquet", options, _OPTIONS)
    columns = options.get("columns")
    columns = names_option("columns", [columns] if isinstance(columns, str) else columns)
    drop = choice_option(options, "nulls", ("error", "drop"), "error") == "drop"
    require_library("source.format: parquet", "pyarrow", "parquet")
    return ParquetFormat(columns, drop_nulls=drop)
