"""Parquet: each row is a sample. The chosen columns are read by row group."""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

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
from growcache.formats.hive_partitions import PartitionOption, Partitions, partitions_option
from growcache.formats.memory import SingleFlightCache, reserve_decoded
from growcache.formats.parquet_columns import (
    ColumnField,
    ColumnOptions,
    column_fields,
    stored_columns,
)
from growcache.formats.parquet_values import column_bytes, field_values
from growcache.schema import sample_bytes
from growcache.store.contract import Entry

_MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
_ENCRYPTED = (
    "it is encrypted, and growcache takes no keys of Parquet's own encryption; write the files without "
    "it and let the store encrypt them, name columns that are not encrypted in source.options.columns, or set source.format: "
    '"package.module:function" to a function of yours that gives pyarrow the keys'
)
_TAIL_BYTES, _LEAST_TAIL_BYTES = 1 << 16, 1 << 12  # contain the whole footer of most files
_SHARED_BYTES = 1 << 21  # of a column, decoded; most dictionaries have at most half of it
_BATCH_ROWS = 1 << 16  # rows that are decoded together
_VARIABLE_BATCH_ROWS, _LEAST_BATCH_ROWS = 1 << 8, 1 << 5  # the same for values of any size
_BATCH_BYTES = 1 << 28  # of a batch, so that they are counted in time
_VALUE_BYTES = {"INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
_MAP = ".key_value."  # in the path of a map's columns, whose keys are not a dictionary
_MOST_FOOTER_BYTES = 1 << 26  # bytes
_KNOWN_BYTES = 1 << 24  # of kept footers, as stored
_KNOWN_FOOTERS = 4096
_OLD_WRITER_BYTES = 100  # that old writers omitted from a chunk's size


@dataclass(frozen=True, slots=True)
class ParquetFooter:
    metadata: Any  # pyarrow's
    starts: list[int]  # first row of each row group, and the number of all rows
    fields: tuple[ColumnField, ...]
    column_numbers: tuple[int, ...]  # numbers of the stored columns of these fields
    partitions: Partitions  # columns in the key
    checked_groups: set[int] = field(default_factory=set)  # row groups that passed the check

    @property
    def columns(self) -> list[str]:
        """Names under which Arrow reads the fields."""
        return [one.stored for one in self.fields]

    @property
    def variable(self) -> bool:
        """Whether values may have any length."""
        return any(one.is_variable for one in self.fields)

    def group_of(self, row: int) -> int:
        return bisect_right(self.starts, row) - 1

    def rows_of_group(self, row: int) -> range:
        group = self.group_of(row)
        return range(self.starts[group], self.starts[group + 1])

    def check(self, group: int, entry: Entry) -> None:
        """Raise FormatError if the description of a row group is damaged.

        Arrow would end the process if its metadata were asked for a column. Starting to read a
        column makes the same checks and raises. The read itself may fail, because nothing is
        fetched.
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
        """Return the decoded size, in which each dictionary value counts once."""
        nbytes = sum(self._stored_bytes(group, leaf) for leaf in self.column_numbers)
        if nbytes > (most := most_decoded_bytes(entry)):
            raise FormatError(
                f"{entry.key}: one visit may yield at most {most:,} bytes, and row group "
                f"{group} has {nbytes:,}; write smaller row groups",
                code="GC305",
            )
        return max(0, int(nbytes))

    def _stored_bytes(self, group: int, leaf: int) -> int:
        """Return the bytes of a column.

        In lists, a few bytes can encode how often a value is repeated.
        """
        column = self.metadata.row_group(group).column(leaf)
        nbytes = int(column.total_uncompressed_size)
        if not self.metadata.schema.column(leaf).max_repetition_level:
            return nbytes
        return max(nbytes, int(column.num_values) * _VALUE_BYTES.get(column.physical_type, 1))

    def dictionary_columns(self, group: int) -> list[str]:
        """Return the columns to read as a dictionary and indices.

        Many rows may share one long value, which would otherwise be copied for each. Columns
        with many bytes are left out, because Arrow would take long to search for equal values.
        """
        metadata = self.metadata.row_group(group)
        columns = [metadata.column(leaf) for leaf in self.column_numbers]
        return [
            column.path_in_schema
            for column in columns
            if column.physical_type == "BYTE_ARRAY"
            and column.has_dictionary_page
            and column.total_uncompressed_size <= _SHARED_BYTES
            and _MAP not in column.path_in_schema
        ]

    def batch_rows(self, group: int) -> int:
        """Return the rows to decode together: few if each may have one long value."""
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
                    f"{entry.key}: a column is in another file, which is never opened",
                    code="GC304",
                )
            if not 0 <= start <= stop <= entry.size:
                raise FormatError(f"{entry.key}: a column ends beyond the object", code="GC302")
            found.append((start, min(entry.size, stop + slack)))
        if sum(stop - start for start, stop in found) > (most := most_decoded_bytes(entry)):
            raise FormatError(
                f"{entry.key}: one visit may read at most {most:,} bytes of a row group",
                code="GC305",
            )
        return found


class FooterBytes:
    def __init__(self) -> None:
        self._tail = _TAIL_BYTES  # as much as earlier footers needed, and some more

    async def of(self, reader: ObjectReader) -> bytes:
        size, key = reader.entry.size, reader.entry.key
        first = max(0, size - self._tail)
        tail = bytes(memoryview(await reader.read(first, size)))
        if tail[-4:] == _ENCRYPTED_MAGIC:
            raise FormatError(f"{key}: {_ENCRYPTED}", code="GC304")
        if size < 12 or tail[-4:] != _MAGIC:
            raise FormatError(f"{key}: expected a Parquet file, found {tail[-8:]!r} at its end")
        needed = int.from_bytes(tail[-8:-4], "little") + 8
        if needed + 4 > size or needed > _MOST_FOOTER_BYTES:
            raise FormatError(f"{key}: its footer claims {needed - 8:,} bytes", code="GC302")
        if needed > len(tail):
            tail = bytes(memoryview(await reader.read(size - needed, first))) + tail
        self._tail = max(_LEAST_TAIL_BYTES, needed * 5 // 4, min(self._tail, _TAIL_BYTES) // 2)
        return tail[len(tail) - needed :]


@dataclass(frozen=True, slots=True)
class Wanted:
    columns: ColumnOptions
    partitions: PartitionOption


class FooterCache:
    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._known: SingleFlightCache[Entry, ParquetFooter] = SingleFlightCache(_KNOWN_BYTES)
        self._bytes = FooterBytes()

    def follow_fields(self, names: Collection[str]) -> None:
        """Leave out columns of the key that a cache's samples lack, because earlier versions did."""
        self._wanted = replace(self._wanted, partitions=self._wanted.partitions.only(names))
        self._known = SingleFlightCache(_KNOWN_BYTES)

    async def get(self, reader: ObjectReader) -> ParquetFooter:
        async def ask() -> tuple[ParquetFooter, int]:
            data = await self._bytes.of(reader)
            footer = await asyncio.to_thread(_parse_footer, data, self._wanted, reader.entry)
            return footer, len(data) + _KNOWN_BYTES // _KNOWN_FOOTERS

        return await self._known.get(reader.entry, ask)


def _parse_footer(data: bytes, wanted: Wanted, entry: Entry) -> ParquetFooter:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with parquet_errors(entry):
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + data))
        schema = metadata.schema.to_arrow_schema()
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if any(count < 0 for count in rows) or sum(rows) != metadata.num_rows:
        raise FormatError(
            f"{entry.key}: its row groups do not have the rows that its footer says",
            code="GC302",
        )
    try:
        _check_widths(schema, metadata.num_columns)
        said = wanted.partitions.values_of(entry.key)
        partitions, columns = _split_partitions(schema, wanted.columns, said)
        fields = tuple(column_fields(schema, columns))
    except FormatError as error:
        raise FormatError(f"{entry.key}: {error}", code=error.code) from None
    return ParquetFooter(
        metadata,
        [0, *itertools.accumulate(rows)],
        fields,
        stored_columns(metadata, fields),
        partitions,
    )


def _split_partitions(
    schema: Any, options: ColumnOptions, said: Partitions
) -> tuple[Partitions, ColumnOptions]:
    """Separate the key's columns from the file's. A column in both comes from the file."""
    only_said = {name: value for name, value in said.items() if name not in schema.names}
    if options.columns is None:
        return only_said, options
    partitions = {name: only_said[name] for name in options.columns if name in only_said}
    rest = tuple(name for name in options.columns if name not in partitions)
    if not rest:
        raise FormatError(
            "source.options.columns names only values from the key; name a column of the "
            "table, too",
            code="GC303",
        )
    return partitions, replace(options, columns=rest)


def _check_widths(schema: Any, count: int) -> None:
    if sum(_width(one.type) for one in schema) != count:
        raise FormatError("its columns are not those of its schema", code="GC302")


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
        if "crypt" in said:
            raise FormatError(f"{entry.key}: {_ENCRYPTED}", code="GC304") from error
        raise FormatError(f"{entry.key}: cannot be read as Parquet: {said[:200]}") from error


_OPTIONS = ("columns", "nulls", "partitions", "json", "decimals")
_COPIES = 2  # of the decoded values, in memory together
_ROW_BYTES = 64  # of a row, in addition to its values


class ParquetFormat(ObjectFormat):
    ranged = says_ordinals = True

    def __init__(self, wanted: Wanted, *, drop_nulls: bool) -> None:
        self._footers = FooterCache(wanted)
        self._drop_nulls = drop_nulls

    def follow_fields(self, names: Collection[str]) -> None:
        self._footers.follow_fields(names)

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
                f"{reader.entry.key}: one visit may yield at most {MOST_VISIT_SAMPLES:,} "
                f"samples, found {len(wanted):,}; set a smaller sampling.samples_per_object",
                code="GC305",
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
        """Return the rows, and the reason if some are left out."""
        with parquet_errors(entry):
            try:
                return self._rows(image, footer, group, rows, entry)
            except FormatError as error:
                raise FormatError(f"{entry.key}: {error}", code=error.code) from None

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
                samples, why = self._samples(footer, few, first + low, rows[at:until])
                gone = gone or why
                held += sum(map(column_bytes, few.columns)) + _ROW_BYTES * len(samples)
                if footer.variable:  # several rows may share one long value
                    held += sum(sample_bytes(sample) for sample, _, _ in samples)
                found += samples
            if held > most:
                raise FormatError(
                    f"one visit may yield {most:,} bytes, found more", code="GC305"
                )
            at, first = until, first + len(batch)
        if at < len(rows):
            raise FormatError(f"row group {group} has fewer rows than it says", code="GC302")
        return found, gone

    def _samples(
        self, footer: ParquetFooter, batch: Any, first: int, rows: Sequence[int]
    ) -> tuple[SamplesWithOrigins, str]:
        if any(value is None for value in footer.partitions.values()):
            return [], "" if self._drop_nulls else _null_partition(footer.partitions)
        columns = [field_values(one, batch) for one in footer.fields]
        kept, why = list(rows), ""
        for one, column in zip(footer.fields, columns, strict=True):
            absent = column.absent
            gone = {row for row in kept if absent[row - first]} if absent.any() else set()
            if gone and not why and not self._drop_nulls:
                why = column.reason(one.name, min(gone) - first, min(gone))
            kept = [row for row in kept if row not in gone] if gone else kept
        names = [one.name for one in footer.fields]
        values = [[column.values[row - first] for row in kept] for column in columns]
        samples = [
            {**dict(zip(names, row, strict=True)), **footer.partitions}
            for row in zip(*values, strict=True)
        ]
        found = [(sample, row, row + 1) for sample, row in zip(samples, kept, strict=True)]
        return found, why


def _null_partition(partitions: Partitions) -> str:
    name = next(name for name, value in partitions.items() if value is None)
    return (
        f"its key says that {name} is null; set nulls: drop to leave such objects out, or leave "
        "it out of source.options.columns"
    )


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
            footer.batch_rows(group), [group], columns=footer.columns, use_threads=False
        )


def open_parquet(options: Mapping[str, Any]) -> ParquetFormat:
    refuse_unknown_options("parquet", options, _OPTIONS)
    columns = options.get("columns")
    columns = names_option("columns", [columns] if isinstance(columns, str) else columns)
    drop = choice_option(options, "nulls", ("error", "drop"), "error") == "drop"
    require_library("source.format: parquet", "pyarrow", "parquet")
    json = names_option("json", options.get("json")) or ()
    decimals = choice_option(options, "decimals", ("float64", "str"), "float64")
    wanted = Wanted(ColumnOptions(columns, json, decimals), partitions_option(options))
    return ParquetFormat(wanted, drop_nulls=drop)
