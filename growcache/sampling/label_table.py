"""Tables of labels from CSV, TSV, JSON lines or Parquet, indexed by key.

A million rows with a number and two short texts take about 50 MB in memory. Keys are sorted
64-bit hashes, numbers are arrays, and texts are one buffer.
"""

from __future__ import annotations

import asyncio
import csv
import difflib
import gzip
import hashlib
import importlib.util
import io
import re
import zlib
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from growcache.config_source import SourceConfig, table_kind
from growcache.errors import ConfigError, FormatError
from growcache.seeding import Uint64Array, hash64
from growcache.store.contract import Entry, Store
from growcache.store.opening import open_store
from growcache.store.parquet_texts import table_batches
from growcache.store.table_rows import errors_of_setting, json_rows
from growcache.store.urls import LOCAL_SCHEMES, parse_url, redact

if TYPE_CHECKING:
    from typing_extensions import Buffer


IntColumn: TypeAlias = npt.NDArray[np.int64]
Cell: TypeAlias = int | float | str

NO_ROW = -1  # row of a key that is in no row
EXAMPLE_KEYS = 3  # keys that are kept for messages
_TEXTS_AT_ONCE = 1 << 16  # texts that are separate objects for a moment

# Kinds of cells, from which the kind of a column follows.
_INTEGER, _NUMBER, _TEXT, _MISSING = 1, 2, 4, 8
# 007 is a name, and 19 digits may be too many.
INTEGER_CELL = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER_PATTERN = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf", re.IGNORECASE
)
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]+")
EMPTY_CELL = re.compile(r"|nan|n/?a", re.IGNORECASE)  # empty cells in pandas, R and BIDS


@dataclass(frozen=True, slots=True)
class TextColumn:
    data: bytes
    ends: IntColumn

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        return self.data[self.ends[i - 1] if i else 0 : self.ends[i]].decode()

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends.tolist():
            yield self.data[start:end].decode()
            start = end

    def taken(self, rows: IntColumn) -> TextColumn:
        starts = np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])
        data = bytearray()
        for at in range(0, len(rows), _TEXTS_AT_ONCE):
            some = rows[at : at + _TEXTS_AT_ONCE]
            places = zip(starts[some].tolist(), self.ends[some].tolist(), strict=True)
            data += b"".join([self.data[start:end] for start, end in places])
        return TextColumn(bytes(data), np.cumsum((self.ends - starts)[rows], dtype=np.int64))


Column: TypeAlias = TextColumn | IntColumn | npt.NDArray[np.float64]


class ColumnBuilder:
    def __init__(self) -> None:
        self._data = bytearray()
        self._lengths = array("q")
        self._kinds = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add_texts(self, cells: Sequence[str]) -> None:
        """Add cells of a file that contains only texts, some of which look like numbers."""
        for cell in set(cells):
            self._kinds |= _kind_of_text(cell)
        self._add(cells)

    def add_values(self, cells: Sequence[object]) -> None:
        """Add cells of a file that distinguishes numbers from texts."""
        texts = []
        for cell in cells:
            kind, text = _kind_and_text(cell)
            self._kinds |= kind
            texts.append(text)
        self._add(texts)

    def _add(self, texts: Sequence[str]) -> None:
        encoded = [text.encode() for text in texts]
        self._data += b"".join(encoded)
        self._lengths.extend(map(len, encoded))

    @property
    def texts(self) -> TextColumn:
        lengths = np.frombuffer(self._lengths, np.int64) if self._lengths else np.zeros(0, int)
        return TextColumn(bytes(self._data), np.cumsum(lengths, dtype=np.int64))

    def column(self, rows: IntColumn) -> Column:
        texts = self.texts
        if self._kinds & _TEXT or not self._kinds & (_INTEGER | _NUMBER):
            return texts.taken(rows)
        if self._kinds == _INTEGER:
            return np.fromiter(map(int, texts), np.int64, len(texts))[rows]
        numbers = map(_to_number, texts)
        return np.fromiter(numbers, np.float64, len(texts))[rows]


def _kind_of_text(cell: str) -> int:
    if INTEGER_CELL.fullmatch(cell):
        return _INTEGER
    if EMPTY_CELL.fullmatch(cell):
        return _MISSING
    if _NUMBER_PATTERN.fullmatch(cell) and not _LEADING_ZERO.fullmatch(cell):
        return _NUMBER
    return _TEXT


def _kind_and_text(cell: object) -> tuple[int, str]:
    if isinstance(cell, str):
        return _TEXT, cell
    if isinstance(cell, int):
        fits = -(1 << 63) <= cell < 1 << 63
        return _INTEGER if fits else _TEXT, str(int(cell))  # True becomes 1
    if isinstance(cell, float):
        return _NUMBER, repr(cell)
    if cell is None:
        return _MISSING, ""
    raise FormatError(f"expected numbers and texts, found {type(cell).__name__}: {cell!r:.60}")


def _to_number(text: str) -> float:
    return np.nan if EMPTY_CELL.fullmatch(text) else float(text)


class KeyedTable:
    def __init__(self, keys: ColumnBuilder, columns: Mapping[str, ColumnBuilder]) -> None:
        texts = keys.texts
        if not len(texts):
            raise FormatError("it has no rows")
        hashes = np.fromiter(map(hash64, texts), np.uint64, len(texts))
        rows = np.argsort(hashes, kind="stable")
        self._hashes: Uint64Array = hashes[rows]
        twice = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        if len(twice):
            first = np.min(rows[twice])
            raise FormatError(f"two rows have the key {texts[int(first)]!r}")
        self._columns = {name: column.column(rows) for name, column in columns.items()}
        self.examples = [texts[i] for i in range(min(EXAMPLE_KEYS, len(texts)))]

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, keys: Sequence[str]) -> IntColumn:
        """Return the row of each key, or `NO_ROW` without one."""
        hashes = np.fromiter(map(hash64, keys), np.uint64, len(keys))
        rows = np.searchsorted(self._hashes, hashes)
        found = self._hashes[np.minimum(rows, len(self) - 1)] == hashes
        return np.where(found, rows, NO_ROW)

    def column(self, name: str) -> Column:
        return self._columns[name]

    def cell(self, name: str, row: int) -> Cell:
        column = self._columns[name]
        cell: Cell = column[row] if isinstance(column, TextColumn) else column[row].item()
        return cell

    @property
    def digest(self) -> str:
        """128 bits, in hex, of keys and cells, regardless of the order of rows."""
        hasher = hashlib.blake2b(self._hashes.tobytes(), digest_size=16)
        for name, column in self._columns.items():
            kind = "str" if isinstance(column, TextColumn) else column.dtype.str
            hasher.update(orjson.dumps([name, kind]))
            for part in _column_arrays(column):
                hasher.update(part.tobytes())
        return hasher.hexdigest()

    @property
    def nbytes(self) -> int:
        columns = [part for column in self._columns.values() for part in _column_arrays(column)]
        return sum(part.nbytes for part in [self._hashes, *columns])


def _column_arrays(column: Column) -> list[npt.NDArray[Any]]:
    if isinstance(column, TextColumn):
        return [column.ends, np.frombuffer(column.data, np.uint8)]
    return [column]


MOST_TABLE_BYTES = 1_000_000_000  # of a table, unpacked
BUDGET_PIECE_BYTES = 1 << 22  # read together, if a rate must be kept
ROWS_AT_ONCE = 1 << 14  # that are Python objects at the same time

ColumnBuilders: TypeAlias = dict[str, ColumnBuilder]


@dataclass(frozen=True, slots=True)
class ReadBudget:
    most_bytes: int | None = None
    piece_bytes: int | None = None
    book: Callable[[int], Awaitable[None]] | None = None  # awaited before each piece is read


UNBOUNDED_BUDGET = ReadBudget()


def require_table_library(url: str) -> None:
    if table_kind(url) == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "source.labels: a table in Parquet needs pyarrow; pip install 'growcache[parquet]'",
            code="GC801",
        )


def fetch_table(
    url: str,
    source: SourceConfig,
    timeout_seconds: float,
    budget: ReadBudget = UNBOUNDED_BUDGET,
) -> Buffer:
    """Return the bytes of the only object that a URL names. Blocks."""
    local = parse_url(url).scheme in LOCAL_SCHEMES
    own = {"url": (url,), "client": "auto" if local else source.client}
    store = open_store(source.model_copy(update=own), timeout_seconds=timeout_seconds)
    listed = [entry for page in store.pages() for entry in page]

    async def read(entry: Entry) -> Buffer:
        try:
            return await _read_pieces(store, entry, UNBOUNDED_BUDGET if local else budget)
        finally:
            await store.close()

    if len(listed) != 1:
        raise ConfigError(
            f"expected one table at {redact(url)}, found {len(listed)}", code="GC112"
        )
    if listed[0].size > MOST_TABLE_BYTES:
        _refuse_size(f"{listed[0].size:,}")
    if not local and budget.most_bytes is not None and listed[0].size >= budget.most_bytes:
        raise ConfigError(
            f"reading it takes {listed[0].size:,} bytes, and sampling.max_egress lets a run read "
            f"{budget.most_bytes:,}; raise that, or make the table smaller",
            code="GC112",
        )
    return asyncio.run(read(listed[0]))


async def _read_pieces(store: Store, entry: Entry, budget: ReadBudget) -> Buffer:
    piece = budget.piece_bytes or max(1, entry.size)
    pieces: list[Buffer] = []
    for start in range(0, entry.size, piece):
        stop = min(entry.size, start + piece)
        if budget.book is not None:
            await budget.book(stop - start)
        pieces.append(await store.read(entry, start, stop))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_table(
    url: str,
    key: str,
    columns: Sequence[str],
    source: SourceConfig,
    timeout_seconds: float,
    budget: ReadBudget = UNBOUNDED_BUDGET,
) -> KeyedTable:
    """Read a table. Blocks, for some seconds if the table has a million rows."""
    with errors_of_setting("source.labels", url):
        data = fetch_table(url, source, timeout_seconds, budget)
        return parse_table(data, table_kind(url), key, columns)


def parse_table(data: Buffer, kind: str, key: str, columns: Sequence[str]) -> KeyedTable:
    growing = {name: ColumnBuilder() for name in dict.fromkeys((key, *columns))}
    form = kind.removesuffix(".gz")
    stream: IO[bytes] = io.BytesIO(data)
    if form != kind:
        stream = io.BufferedReader(_BoundedStream(gzip.GzipFile(fileobj=stream)))
    try:
        with closing(stream):
            _READERS[form](stream, growing, key)
    except UnicodeDecodeError as error:
        raise FormatError(f"expected UTF-8, {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"its .gz is damaged: {error}") from None
    keys = growing[key]
    return KeyedTable(keys, {name: growing[name] for name in columns})


class _BoundedStream(io.RawIOBase):
    """Unpacked bytes up to a bound, because a few kB can expand to any number of GB."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = MOST_TABLE_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count = self._stream.readinto(buffer)
        self._left -= count
        if self._left < 0:
            _refuse_size("more, unpacked")
        return count


def _refuse_size(found: str) -> None:
    raise FormatError(
        f"expected a table of at most {MOST_TABLE_BYTES:,} bytes, found {found}; leave out columns "
        "that are not needed"
    )


def _require_columns(names: Sequence[object], wanted: Sequence[str], form: str) -> None:
    for name in wanted:
        if name not in names:
            close = difflib.get_close_matches(name, list(map(str, names)), n=1)
            known = ", ".join(map(repr, list(names)[:10]))
            hint = f"did you mean {close[0]!r}?" if close else f"it has {known}"
            if form == "csv" and len(names) == 1 and ";" in str(names[0]):
                hint += "; columns are separated by commas in .csv, by tabs in .tsv"
            raise FormatError(f"it has no column {name!r}; {hint}")
        if names.count(name) > 1:
            raise FormatError(f"it has two columns {name!r}")


def _delimited_reader(delimiter: str) -> Callable[[IO[bytes], ColumnBuilders, str], None]:
    def read(stream: IO[bytes], columns: ColumnBuilders, key: str) -> None:
        # Excel writes a byte order mark at the start.
        text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        rows = csv.reader(text, delimiter=delimiter)
        try:
            _read_rows(rows, columns, key)
        except csv.Error as error:
            raise FormatError(f"line {rows.line_num}: {error}") from None

    return read


def _read_rows(rows: Any, columns: ColumnBuilders, key: str) -> None:
    names: list[str] = next(rows, [])
    _require_columns(names, list(columns), "csv")
    places = {name: names.index(name) for name in columns}
    whole = _whole_rows(rows, len(names), places[key])
    while chunk := list(islice(whole, ROWS_AT_ONCE)):
        for name, place in places.items():
            columns[name].add_texts([row[place] for row in chunk])


def _whole_rows(rows: Any, width: int, key: int) -> Iterator[list[str]]:
    for row in rows:
        if not any(row):  # a blank line, or empty rows that a spreadsheet writes below its data
            continue
        if len(row) != width:
            raise FormatError(
                f"line {rows.line_num}: expected {width} cells, as in the first line, found "
                f"{len(row)}"
            )
        if not row[key]:
            raise FormatError(f"line {rows.line_num}: its key is empty")
        yield row


def _read_json_lines(stream: IO[bytes], columns: ColumnBuilders, key: str) -> None:
    seen: dict[str, None] = {}
    rows = _rows_with_key(json_rows(stream), key)
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        for row in chunk:
            seen |= dict.fromkeys(row)
        for name, column in columns.items():
            _add_values(column, name, [row.get(name) for row in chunk])
    if seen:
        _require_columns(list(seen), list(columns), "jsonl")


def _rows_with_key(
    rows: Iterator[tuple[int, dict[str, Any]]], key: str
) -> Iterator[dict[str, Any]]:
    for number, row in rows:
        if row.get(key) in (None, ""):
            raise FormatError(f"line {number}: it has no {key!r}")
        yield row


def _add_values(column: ColumnBuilder, name: str, cells: Sequence[object]) -> None:
    try:
        column.add_values(cells)
    except FormatError as error:
        raise FormatError(f"column {name!r}: {error}", code=error.code) from None


def _read_parquet(stream: IO[bytes], columns: ColumnBuilders, key: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
        _require_columns(file.schema_arrow.names, list(columns), "parquet")
        _refuse_large(file.metadata, columns)
        for batch in table_batches(stream, file.metadata, list(columns), ROWS_AT_ONCE):
            for name, column in columns.items():
                cells = batch.column(name).to_pylist()
                if name == key and any(cell in (None, "") for cell in cells):
                    raise FormatError(f"row {len(column) + 1:,} or a later one has no {key!r}")
                _add_values(column, name, cells)
    except pa.ArrowException as error:
        raise FormatError(f"expected Parquet: {error}") from None


def _refuse_large(metadata: Any, columns: ColumnBuilders) -> None:
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    parts = [group.column(n) for group in groups for n in range(group.num_columns)]
    wanted = [part for part in parts if part.path_in_schema in columns]
    if (nbytes := sum(part.total_uncompressed_size for part in wanted)) > MOST_TABLE_BYTES:
        _refuse_size(f"{nbytes:,}")


_READERS: dict[str, Callable[[IO[bytes], ColumnBuilders, str], None]] = {
    "csv": _delimited_reader(","),
    "jsonl": _read_json_lines,
    "parquet": _read_parquet,
    "tsv": _delimited_reader("\t"),
}
