"""Find and read small tables next to the objects of a source, which may have labels."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from growcache.cli.propose_labels import ProposedLabels, Table, propose_labels
from growcache.config_source import SourceConfig, table_kind
from growcache.errors import GrowcacheError
from growcache.store.contract import Entry
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from growcache.store.urls import LOCAL_SCHEMES, SSH_SCHEMES, WEB_SCHEMES, Location, parse_url

LISTING_SECONDS = 1.0
MAX_TABLES = 6
MAX_TABLE_BYTES = 1 << 24
MAX_UNPACKED_BYTES = 1 << 26
MAX_ROWS = 1 << 19  # of a Parquet table
MAX_KEYS = 200_000  # objects that are looked up


def find_labels(
    source: SourceConfig,
    entries: Sequence[Entry],
    group: Sequence[Entry],
    taken: Collection[str],
    seconds: float,
) -> ProposedLabels | None:
    """Return the labels of the table that has rows for the most objects.

    ``entries`` are all listed objects. ``group`` are those that are samples, with fields
    ``taken``.
    """
    location = parse_url(source.url[0])
    if len(source.url) > 1 or location.scheme in (*WEB_SCHEMES, *SSH_SCHEMES, "chain"):
        return None
    samples = {entry.key for entry in group}
    listed = [one for one in entries if one.key not in samples]
    tables: dict[str, Table] = {}
    for url in _folders_near(location):
        near = source.model_copy(update={"url": (url,)})
        found = _tables_at(near, listed, samples.union(tables), seconds)
        tables |= found
        listed = []
    keys = [entry.key for entry in group[:MAX_KEYS]]
    proposed = (
        propose_labels(
            _url_of(source.url[0], location, key), table, keys, location.prefix, taken
        )
        for key, table in tables.items()
    )
    found_labels = [one for one in proposed if one is not None]
    return max(found_labels, key=lambda one: one.share, default=None)


def _tables_at(
    source: SourceConfig, listed: Sequence[Entry], known: Collection[str], seconds: float
) -> dict[str, Table]:
    """Return the tables of a URL and those listed before, by key."""
    store = open_store(source, concurrency=1, timeout_seconds=seconds)
    try:
        found = {one.key: one for one in [*listed, *_list_briefly(store)] if _is_table(one)}
        wanted = [one for key, one in found.items() if key not in known][:MAX_TABLES]
        return asyncio.run(_read_tables(store, wanted))
    finally:
        asyncio.run(store.close())


def _folders_near(location: Location) -> Iterator[str]:
    """Yield URLs of the contents of the folder of all objects, and of the folder above it."""
    root, prefix = location.root, location.prefix
    yield f"{root}{prefix}*"
    above, slash, _ = prefix.rstrip("/").rpartition("/")
    if prefix and (above or location.bucket):
        yield f"{root}{above}{slash}*"


def _list_briefly(store: RemoteStore) -> Iterator[Entry]:
    end = time.monotonic() + LISTING_SECONDS
    try:
        for page in store.pages():
            yield from page
            if time.monotonic() > end:
                return
    except GrowcacheError:  # a folder that must not be listed has no table
        return


def _is_table(entry: Entry) -> bool:
    try:
        table_kind(entry.key)
    except ValueError:
        return False
    return 0 < entry.size <= MAX_TABLE_BYTES


def _url_of(typed: str, location: Location, key: str) -> str:
    if location.scheme in LOCAL_SCHEMES and "://" not in typed:
        return key if Path(typed).is_absolute() else os.path.relpath(key)
    return location.root + key


async def _read_tables(store: RemoteStore, entries: Sequence[Entry]) -> dict[str, Table]:
    """Return the cells of the readable tables, by key."""
    found = {}
    for entry in entries:
        try:
            data = bytes(memoryview(await store.read(entry)))
            table = parse_cells(table_kind(entry.key), data)
        except (GrowcacheError, ValueError, RecursionError, csv.Error, zlib.error):
            continue
        if table:
            found[entry.key] = table
    return found


def parse_cells(kind: str, data: bytes) -> Table | None:
    r"""Return the cells of a table as texts, by column, or None if it is empty or unreadable.

    >>> parse_cells("csv", b"name,age\na,3\nb,4\n")
    {'name': ['a', 'b'], 'age': ['3', '4']}
    """
    if kind.endswith(".gz"):
        data = zlib.decompressobj(31).decompress(data, MAX_UNPACKED_BYTES)
    kind = kind.removesuffix(".gz")
    if kind == "parquet":
        return _parquet_cells(data)
    text = data.decode("utf-8-sig")
    if kind == "jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        names = list(rows[0]) if rows and all(isinstance(row, dict) for row in rows) else []
        return {name: [_cell(row.get(name)) for row in rows] for name in names} or None
    lines = list(csv.reader(io.StringIO(text), delimiter="\t" if kind == "tsv" else ","))
    header, whole = lines[0] if lines else [], lines[1:]
    whole = [row for row in whole if len(row) == len(header)]
    return (
        {name: [row[at] for row in whole] for at, name in enumerate(header)} if whole else None
    )


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _parquet_cells(data: bytes) -> Table | None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return None
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        nbytes = sum(group.total_byte_size for group in groups)
        if nbytes > MAX_UNPACKED_BYTES or file.metadata.num_rows > MAX_ROWS:
            return None
        texts = [one.name for one in file.schema_arrow if _is_text(pa, one.type)]
        names = [one.name for one in file.schema_arrow if pa.types.is_primitive(one.type)]
        # Rows share equal texts in memory.
        file = pq.ParquetFile(io.BytesIO(data), read_dictionary=texts)
        found = file.read(columns=[*names, *texts])
    except (pa.ArrowException, OSError, ValueError):
        return None
    return {name: _cells_of_column(found.column(name)) for name in found.column_names} or None


def _is_text(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _cells_of_column(column: Any) -> list[str]:
    cells: list[str] = []
    for chunk in column.chunks:
        if not hasattr(chunk, "dictionary"):
            cells += map(_cell, chunk.to_pylist())
            continue
        texts = list(map(_cell, chunk.dictionary.to_pylist()))
        cells += ["" if at is None else texts[at] for at in chunk.indices.to_pylist()]
    return cells
