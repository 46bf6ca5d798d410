"""Parquet: a row is a sample; the columns that are wanted are read by row group."""

from __future__ import annotations

import asyncio
import difflib
import io
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.chunks import fetch
from growcache.remote.formats.objects import (
    Found,
    Measure,
    PartlyReadError,
    Reader,
    Visit,
    most_decoded,
    need_library,
    one_of,
    refuse_unknown,
)
from growcache.remote.formats.parquet_values import check_type, is_variable, values_of
from growcache.remote.formats.rows import MOST_SAMPLES
from growcache.remote.formats.units import chosen
from growcache.remote.store import Entry
from growcache.schema import sample_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OPTIONS = ("columns", "nulls")
_MAGIC = b"PAR1"
_TAIL = 1 << 16  # bytes at the end, which hold the whole footer of most files
_MOST_FOOTER = 1 << 26  # bytes
_KNOWN_BYTES = 1 << 24  # of footers that are kept, as stored
_KNOWN_FOOTERS = 4096
_BATCH = 1 << 16  # rows decoded at once,
_VARIABLE_BATCH = 1 << 8  # and where they may be of any size, so that they are counted in time
_ROW_BYTES = 64  # that a row takes beside its values
_SLACK = 100  # bytes that writers of old left out of a chunk's size


@dataclass(frozen=True, slots=True)
class _Footer:
    """What the end of a file says.

    Attributes:
        metadata: as pyarrow has it.
        nbytes: that it takes in the file.
        starts: first row of each row group, and the number of all rows.
        columns: those that are wanted.
        leaves: the numbers of their stored columns.
        variable: whether a value of one can have any length.
    """

    metadata: Any
    nbytes: int
    starts: list[int]
    columns: tuple[str, ...]
    leaves: tuple[int, ...]
    variable: bool

    def group_of(self, row: int) -> int:
        return bisect_right(self.starts, row) - 1

    def unit_of(self, row: int) -> range:
        group = self.group_of(row)
        return range(self.starts[group], self.starts[group + 1])


class TableRows:
    """An object is a table, each of whose rows is a sample."""

    ranged = True
    listed = True
    code_digest = None

    def __init__(self, columns: tuple[str, ...] | None, *, drop_nulls: bool) -> None:
        self._columns = columns
        self._drop_nulls = drop_nulls
        self._known: OrderedDict[Entry, _Footer] = OrderedDict()
        self._known_bytes = 0

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        footer = await self._footer(reader)
        rows, groups = footer.starts[-1], len(footer.starts) - 1
        stride = reader.entry.size / max(1, rows)
        return Measure(stride, 0, rows, max(1, -(-rows // max(1, groups))))

    async def read(self, reader: Reader, visit: Visit) -> Found:
        """See `ObjectFormat.read`."""
        footer = await self._footer(reader)
        wanted = chosen(footer.starts[-1], visit, reader.entry.key, footer.unit_of)
        if len(wanted) > MOST_SAMPLES:
            raise FormatError(
                f"{reader.entry.key}: one visit may yield {MOST_SAMPLES:,} samples, found "
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

    async def _footer(self, reader: Reader) -> _Footer:
        entry = reader.entry
        if (known := self._known.get(entry)) is not None:
            self._known.move_to_end(entry)
            return known
        data = await _footer_bytes(reader)
        footer = await asyncio.to_thread(_parsed, data, self._columns, entry)
        if entry not in self._known:
            self._known_bytes += footer.nbytes
        self._known[entry] = footer
        while len(self._known) > 1 and (
            len(self._known) > _KNOWN_FOOTERS or self._known_bytes > _KNOWN_BYTES
        ):
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= oldest.nbytes
        return footer

    async def _read_group(
        self, reader: Reader, footer: _Footer, group: int, rows: Sequence[int]
    ) -> tuple[Found, str]:
        ranges = _ranges(footer, group, reader.entry)
        data = await fetch(reader, ranges)
        image = _Pieces(reader.entry.size, dict(zip(ranges, data, strict=True)))
        return await asyncio.to_thread(self._decoded, image, footer, group, rows, reader.entry)

    def _decoded(
        self, image: _Pieces, footer: _Footer, group: int, rows: Sequence[int], entry: Entry
    ) -> tuple[Found, str]:
        """Return the rows, and why some are left out."""
        try:
            return self._rows(image, footer, group, rows, entry)
        except FormatError as error:
            raise FormatError(f"{entry.key}: {error}") from None
        except Exception as error:  # Arrow raises what a broken file makes it raise
            raise _broken(entry, error) from error

    def _rows(
        self, image: _Pieces, footer: _Footer, group: int, rows: Sequence[int], entry: Entry
    ) -> tuple[Found, str]:
        gone = ""
        most, held = most_decoded(entry), 0
        found: Found = []
        at, first = 0, footer.starts[group]
        for batch in _batches(image, footer, group):
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
                held += few.nbytes + _ROW_BYTES * len(samples)
                if footer.variable:  # many rows may share one long value
                    held += sum(sample_bytes(sample) for sample, _, _ in samples)
                found += samples
            if held > most:
                raise FormatError(f"one visit may yield {most:,} bytes, found more")
            at, first = until, first + len(batch)
        if at < len(rows):
            raise FormatError(f"row group {group} has fewer rows than it says")
        return found, gone

    def _samples(self, batch: Any, first: int, rows: Sequence[int]) -> tuple[Found, str]:
        names = batch.schema.names
        columns = [
            values_of(name, column) for name, column in zip(names, batch.columns, strict=True)
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


class _Pieces(io.RawIOBase):
    """The ranges of a file that were fetched, as a file."""

    def __init__(self, size: int, pieces: Mapping[tuple[int, int], memoryview]) -> None:
        super().__init__()
        self._size = size
        self._pieces = pieces
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer).cast("B")
        stop = self._at + len(into)
        for (first, last), data in self._pieces.items():
            if first <= self._at and stop <= last:
                into[:] = data[self._at - first : stop - first]
                self._at = stop
                return len(into)
        raise OSError(f"bytes {self._at} to {stop} are none of the columns'")


async def _footer_bytes(reader: Reader) -> memoryview:
    """Return the end of a file, from its footer on; mostly by one read."""
    size, key = reader.entry.size, reader.entry.key
    tail = memoryview(await reader.read(max(0, size - _TAIL), size)).cast("B")
    if size < 12 or tail[-4:] != _MAGIC:
        raise FormatError(
            f"{key}: expected a Parquet file, found {bytes(tail[-8:])!r} at its end"
        )
    length = int.from_bytes(tail[-8:-4], "little")
    if length + 12 > size or length > _MOST_FOOTER:
        raise FormatError(f"{key}: its footer claims {length:,} bytes")
    if length + 8 > len(tail):
        tail = memoryview(await reader.read(size - length - 8, size)).cast("B")
    return tail[len(tail) - length - 8 :]


def _parsed(data: memoryview, wanted: tuple[str, ...] | None, entry: Entry) -> _Footer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + bytes(data)))
        schema = metadata.schema.to_arrow_schema()
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except Exception as error:  # Arrow raises what a broken file makes it raise
        raise _broken(entry, error) from error
    if any(count < 0 for count in rows) or sum(rows) != metadata.num_rows:
        raise FormatError(f"{entry.key}: its row groups have not the rows that its footer says")
    columns = _chosen_columns(schema, wanted, entry)
    for name in columns:
        try:
            check_type(name, schema.field(name).type)
        except FormatError as error:
            raise FormatError(f"{entry.key}: {error}") from None
    return _Footer(
        metadata,
        len(data),
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
    """Return which of the stored columns hold these; a list of lists is one, a struct several."""
    found: list[int] = []
    at = 0
    for field in schema:
        width = _width(field.type)
        if field.name in columns:
            found += range(at, at + width)
        at += width
    if at != count:
        raise FormatError(f"{entry.key}: its columns are not those of its schema")
    return tuple(found)


def _width(type_: Any) -> int:
    return sum(_width(type_.field(i).type) for i in range(type_.num_fields)) or 1


def _ranges(footer: _Footer, group: int, entry: Entry) -> list[tuple[int, int]]:
    """Return where the columns of a row group lie."""
    metadata = footer.metadata.row_group(group)
    slack = _SLACK if str(footer.metadata.created_by).startswith("parquet-mr") else 0
    found = []
    for leaf in footer.leaves:
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
            raise FormatError(f"{entry.key}: a column lies beyond the end of the object")
        found.append((start, min(entry.size, stop + slack)))
    if sum(stop - start for start, stop in found) > (most := most_decoded(entry)):
        raise FormatError(f"{entry.key}: one visit may read {most:,} bytes of a row group")
    return found


def _batches(image: _Pieces, footer: _Footer, group: int) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(
        pa.PythonFile(image, mode="r"), metadata=footer.metadata, pre_buffer=False
    ) as file:
        size = _VARIABLE_BATCH if footer.variable else _BATCH
        yield from file.iter_batches(
            size, [group], columns=list(footer.columns), use_threads=False
        )


def _broken(entry: Entry, error: Exception) -> FormatError:
    said = " ".join(str(error).split()) or type(error).__name__
    return FormatError(f"{entry.key}: cannot be read as Parquet: {said[:200]}")


def open_parquet(options: Mapping[str, Any]) -> TableRows:
    """Return the format.

    Options:
        columns: names of those that are fields; all by default.
        nulls: rows with a null that cannot be NaN are left out: ``error`` says so in a hole,
            ``drop`` says nothing.

    Raises:
        ConfigError: an unknown option, a value that cannot be meant, or no pyarrow.
    """
    refuse_unknown("parquet", options, _OPTIONS)
    columns = options.get("columns")
    if columns is not None:
        names = [columns] if isinstance(columns, str) else columns
        if (
            not isinstance(names, list | tuple)
            or not names
            or (
                not all(isinstance(name, str) and name for name in names)
                or len(set(names)) < len(names)
            )
        ):
            raise ConfigError(
                f"source.options.columns: expected a list of different names, found {columns!r}"
            )
        columns = tuple(names)
    drop = one_of(options, "nulls", ("error", "drop"), "error") == "drop"
    need_library("parquet", "pyarrow")
    return TableRows(columns, drop_nulls=drop)
