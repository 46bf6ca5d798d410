"""Reading a table's file: CSV and TSV (UTF-8, a line of names first), JSON lines, Parquet."""

from __future__ import annotations

import asyncio
import csv
import difflib
import gzip
import importlib.util
import io
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import orjson

from growcache.config import SourceConfig, table_kind
from growcache.errors import ConfigError, FormatError, StoreError
from growcache.remote.store import Entry, Store, open_store
from growcache.remote.tables import Growing, Table
from growcache.remote.urls import LOCAL, parse_url, redact

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_BYTES = 1_000_000_000  # of a table, unpacked
PIECE = 1 << 22  # bytes that are read at a time, where a rate is to be kept
ROWS = 1 << 14  # that are objects of Python at once

Columns: TypeAlias = dict[str, Growing]


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be read of a store, and who counts it.

    Attributes:
        most_bytes: of a table; None: any.
        piece_bytes: so many at a time; None: all at once.
        spent: called after each piece with its bytes; returns when the next one may be read.
    """

    most_bytes: int | None = None
    piece_bytes: int | None = None
    spent: Callable[[int], Awaitable[None]] | None = None


UNBOUNDED = Budget()


def require_reader(url: str) -> None:
    """Refuse a table that nothing installed here can read.

    Raises:
        ConfigError: says what to install.
    """
    if table_kind(url) == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "source.labels: a table in Parquet needs pyarrow; pip install 'growcache[parquet]'"
        )


def fetch(
    url: str, source: SourceConfig, timeout_seconds: float, budget: Budget = UNBOUNDED
) -> Buffer:
    """Return the bytes of the one object that a URL names. Blocks.

    Args:
        url: of the table; read with the client and the credentials of the source, where it
            is no local path.
        source: as configured.
        timeout_seconds: without progress for so long it is given up.
        budget: of what is read; a local table costs nothing.

    Raises:
        ConfigError: not one object, or too large a one.
        StoreError: it cannot be read.
    """
    local = parse_url(url).scheme in LOCAL
    own = {"url": (url,), "client": "auto" if local else source.client}
    store = open_store(source.model_copy(update=own), timeout_seconds=timeout_seconds)
    listed = [entry for page in store.pages() for entry in page]

    async def read(entry: Entry) -> Buffer:
        try:
            return await _read(store, entry, UNBOUNDED if local else budget)
        finally:
            await store.close()

    if len(listed) != 1:
        raise ConfigError(f"expected one table at {redact(url)}, found {len(listed)}")
    if listed[0].size > MOST_BYTES:
        _refuse_size(f"{listed[0].size:,}")
    if not local and budget.most_bytes is not None and listed[0].size >= budget.most_bytes:
        raise ConfigError(
            f"reading it takes {listed[0].size:,} bytes, and sampling.max_egress lets a run read "
            f"{budget.most_bytes:,}; raise that, or make the table smaller"
        )
    return asyncio.run(read(listed[0]))


async def _read(store: Store, entry: Entry, budget: Budget) -> Buffer:
    piece = budget.piece_bytes or max(1, entry.size)
    pieces: list[Buffer] = []
    for start in range(0, entry.size, piece):
        pieces.append(await store.read(entry, start, min(entry.size, start + piece)))
        if budget.spent is not None:
            await budget.spent(memoryview(pieces[-1]).nbytes)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_table(
    url: str,
    key: str,
    columns: Sequence[str],
    source: SourceConfig,
    timeout_seconds: float,
    budget: Budget = UNBOUNDED,
) -> Table:
    """Return a table. Blocks, for some seconds where it has a million rows.

    Args:
        url: see `fetch`.
        key: the column that tells rows apart.
        columns: the others that are wanted.
        source: see `fetch`.
        timeout_seconds: see `fetch`.
        budget: see `fetch`.

    Raises:
        ConfigError: it is not one, or lacks a column; says what is wrong, and where.
        StoreError: it cannot be read.
    """
    shown = redact(url)
    try:
        data = fetch(url, source, timeout_seconds, budget)
        return parse_table(data, table_kind(url), key, columns)
    except StoreError as error:
        told = type(error)(f"source.labels: {error}")
        told.exit_code = error.exit_code
        raise told from None
    except (ConfigError, FormatError) as error:
        raise ConfigError(f"source.labels {shown}: {error}") from None


def parse_table(data: Buffer, kind: str, key: str, columns: Sequence[str]) -> Table:
    """Return the table that these bytes are.

    Args:
        data: of the file.
        kind: as `table_kind` names it.
        key: the column that tells rows apart.
        columns: the others that are wanted.

    Raises:
        FormatError: they are not such a table, or it lacks a column.
    """
    growing = {name: Growing() for name in dict.fromkeys((key, *columns))}
    form = kind.removesuffix(".gz")
    stream: IO[bytes] = io.BytesIO(data)
    if form != kind:
        stream = io.BufferedReader(_Bounded(gzip.GzipFile(fileobj=stream)))
    try:
        with closing(stream):
            _READERS[form](stream, growing, key)
    except UnicodeDecodeError as error:
        raise FormatError(f"expected UTF-8, {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"its .gz is damaged: {error}") from None
    keys = growing[key]
    return Table(keys, {name: growing[name] for name in columns})


class _Bounded(io.RawIOBase):
    """What is unpacked, up to a bound: a few kB can claim to be any number of GB."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = MOST_BYTES

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
        f"expected a table of at most {MOST_BYTES:,} bytes, found {found}; leave out columns "
        "that are not needed"
    )


def _require(names: Sequence[object], wanted: Sequence[str], form: str) -> None:
    """Refuse a table without the columns that are wanted."""
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


def _delimited(delimiter: str) -> Callable[[IO[bytes], Columns, str], None]:
    def read(stream: IO[bytes], columns: Columns, key: str) -> None:
        # Excel puts a mark of byte order in front.
        text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        rows = csv.reader(text, delimiter=delimiter)
        try:
            _read_rows(rows, columns, key)
        except csv.Error as error:
            raise FormatError(f"line {rows.line_num}: {error}") from None

    return read


def _read_rows(rows: Any, columns: Columns, key: str) -> None:
    names: list[str] = next(rows, [])
    _require(names, list(columns), "csv")
    places = {name: names.index(name) for name in columns}
    whole = _whole_rows(rows, len(names), places[key])
    while chunk := list(islice(whole, ROWS)):
        for name, place in places.items():
            columns[name].add_texts([row[place] for row in chunk])


def _whole_rows(rows: Any, width: int, key: int) -> Iterator[list[str]]:
    for row in rows:
        if not any(row):  # a blank line, or what a spreadsheet leaves below its data
            continue
        if len(row) != width:
            raise FormatError(
                f"line {rows.line_num}: expected {width} cells, as in the first line, found "
                f"{len(row)}"
            )
        if not row[key]:
            raise FormatError(f"line {rows.line_num}: its key is empty")
        yield row


def _json_lines(stream: IO[bytes], columns: Columns, key: str) -> None:
    seen: dict[str, None] = {}
    lines = enumerate(stream, 1)
    while chunk := list(islice(_objects(lines, key), ROWS)):
        for row in chunk:
            seen |= dict.fromkeys(row)
        for name, column in columns.items():
            _add_values(column, name, [row.get(name) for row in chunk])
    if seen:
        _require(list(seen), list(columns), "jsonl")


def _objects(lines: Iterator[tuple[int, bytes]], key: str) -> Iterator[dict[str, Any]]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"line {number}: expected JSON, {error}") from None
        if not isinstance(row, dict):
            raise FormatError(f"line {number}: expected an object, found {line[:40]!r}")
        if row.get(key) in (None, ""):
            raise FormatError(f"line {number}: it has no {key!r}")
        yield row


def _add_values(column: Growing, name: str, cells: Sequence[object]) -> None:
    try:
        column.add_values(cells)
    except FormatError as error:
        raise FormatError(f"column {name!r}: {error}") from None


def _parquet(stream: IO[bytes], columns: Columns, key: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
        _require(file.schema_arrow.names, list(columns), "parquet")
        _refuse_large(file.metadata, columns)
        for batch in file.iter_batches(ROWS, columns=list(columns)):
            for name, column in columns.items():
                cells = batch.column(name).to_pylist()
                if name == key and any(cell in (None, "") for cell in cells):
                    raise FormatError(f"row {len(column) + 1:,} or a later one has no {key!r}")
                _add_values(column, name, cells)
    except pa.ArrowException as error:
        raise FormatError(f"expected Parquet: {error}") from None


def _refuse_large(metadata: Any, columns: Columns) -> None:
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    parts = [group.column(n) for group in groups for n in range(group.num_columns)]
    wanted = [part for part in parts if part.path_in_schema in columns]
    if (nbytes := sum(part.total_uncompressed_size for part in wanted)) > MOST_BYTES:
        _refuse_size(f"{nbytes:,}")


_READERS: dict[str, Callable[[IO[bytes], Columns, str], None]] = {
    "csv": _delimited(","),
    "jsonl": _json_lines,
    "parquet": _parquet,
    "tsv": _delimited("\t"),
}
