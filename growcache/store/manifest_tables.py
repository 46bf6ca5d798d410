"""The rows of a manifest, piece by piece: CSV, TSV, JSON lines, text or Parquet."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, TypeAlias, cast
from urllib.parse import unquote_plus

import orjson

from growcache.config_source import ManifestConfig
from growcache.errors import ConfigError, FormatError
from growcache.store.parquet_texts import table_batches
from growcache.store.table_rows import json_rows

LONGEST_LINE = 1 << 20  # bytes
ROWS_AT_ONCE = 1 << 14  # of Parquet that are Python objects at the same time
MOST_GROUP_BYTES = 1_000_000_000  # of the wanted columns of a row group, unpacked
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Excel writes it at the start
_KEYS = ("key", "path", "url", "object", "name")
_SIZES = ("size", "bytes", "length")
_ETAGS = ("etag",)
_BUCKETS = ("bucket",)
_LATEST, _MARKERS = ("islatest",), ("isdeletemarker",)


class ManifestRow(NamedTuple):
    name: str
    size: int | None
    etag: str | None
    of_bucket: bool  # whether the name is a key of the bucket, rather than relative to a folder


Raw: TypeAlias = Mapping[str, Any]


def manifest_rows(
    stream: IO[bytes], kind: str, wanted: ManifestConfig
) -> Iterator[ManifestRow]:
    """Yield the rows of a file.

    Raises:
        FormatError: The file cannot be read.
        ConfigError: The settings do not fit the file.
    """
    form = kind.removesuffix(".gz")
    if form != kind:
        stream = cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    try:
        if form == "txt":
            yield from (ManifestRow(name, None, None, False) for name in _texts(stream))
            return
        names, rows = _READERS[form](stream, wanted)
        yield from _meant(rows, _Columns(names, wanted), wanted)
    except UnicodeDecodeError as error:
        raise FormatError(f"expected UTF-8, {error}") from None
    except csv.Error as error:
        raise FormatError(f"expected CSV: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"its .gz is damaged: {error}") from None


class _Columns:
    """The names of the relevant columns."""

    def __init__(self, names: Sequence[str], wanted: ManifestConfig) -> None:
        self._names = names
        self.key = self._column("key", wanted.key, _KEYS) or ""
        if not self.key:
            known = ", ".join(map(repr, names[:10]))
            raise ConfigError(
                f"it has no column key, Key, path or url, but {known}; name the one with the "
                "keys, as in manifest: {url: …, key: COLUMN}, or name all with columns: "
                "[bucket, key, size] if the file has no header",
                code="GC219",
            )
        self.size = self._column("size", wanted.size, _SIZES)
        self.etag = self._column("etag", wanted.etag, _ETAGS)
        self.bucket = self._column("bucket", None, _BUCKETS)
        self.latest = self._column("latest", None, _LATEST)
        self.marker = self._column("marker", None, _MARKERS)

    def _column(self, role: str, named: str | None, known: Sequence[str]) -> str | None:
        if named is not None:
            if named not in self._names:
                raise ConfigError(f"{role}: it has no column {named!r}", code="GC219")
            return named
        plain = {_plain(name): name for name in reversed(self._names)}
        return next((plain[name] for name in known if name in plain), None)

    @property
    def wanted(self) -> list[str]:
        roles = (self.key, self.size, self.etag, self.bucket, self.latest, self.marker)
        return [name for name in roles if name]


def _plain(name: str) -> str:
    """Return a column's name in the form that all formats of an inventory share.

    >>> _plain("e_tag"), _plain("ETag"), _plain(" IsLatest")
    ('etag', 'etag', 'islatest')
    """
    return name.strip().lower().replace("_", "").replace("-", "")


def _meant(
    rows: Iterator[Raw], columns: _Columns, wanted: ManifestConfig
) -> Iterator[ManifestRow]:
    """Yield the rows of existing objects.

    An inventory also lists old versions and deletions.
    """
    for row in rows:
        name = row.get(columns.key)
        if not isinstance(name, str) or not name:
            raise FormatError(f"a row has no {columns.key!r}: {str(dict(row))[:80]}")
        if _says(row, columns.latest, "false") or _says(row, columns.marker, "true"):
            continue
        size = _to_size(row.get(columns.size), name) if columns.size else None
        etag = row.get(columns.etag) if columns.etag else None
        yield ManifestRow(
            unquote_plus(name) if wanted.url_encoded else name,
            size,
            str(etag) if etag else None,
            columns.bucket is not None,
        )


def _says(row: Raw, column: str | None, word: str) -> bool:
    return column is not None and str(row.get(column)).lower() == word


def _to_size(value: object, name: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        return int(str(value))
    except ValueError:
        raise FormatError(f"{name}: expected its size in bytes, found {value!r:.40}") from None


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    mark = _BYTE_ORDER_MARK
    while line := stream.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise FormatError(f"expected lines of at most {LONGEST_LINE:,} bytes")
        yield line.removeprefix(mark)
        mark = b""


def _texts(stream: IO[bytes]) -> Iterator[str]:
    for line in _lines(stream):
        if name := line.decode().rstrip("\r\n"):
            yield name


def _read_delimited(
    delimiter: str,
) -> Callable[[IO[bytes], ManifestConfig], tuple[Sequence[str], Iterator[Raw]]]:
    def read(stream: IO[bytes], wanted: ManifestConfig) -> tuple[Sequence[str], Iterator[Raw]]:
        texts = (line.decode() for line in _lines(stream))
        rows = csv.reader(texts, delimiter=delimiter)
        names = wanted.columns or next(rows, [])
        return names, (dict(zip(names, row, strict=False)) for row in rows if row)

    return read


def _read_json_lines(
    stream: IO[bytes], wanted: ManifestConfig
) -> tuple[Sequence[str], Iterator[Raw]]:
    rows = (row for _, row in json_rows(_lines(stream)))
    first = next(rows, {})

    def all_rows() -> Iterator[Raw]:
        if first:
            yield first
        yield from rows

    return list(first), all_rows()


def _read_parquet(
    stream: IO[bytes], wanted: ManifestConfig
) -> tuple[Sequence[str], Iterator[Raw]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "Parquet needs pyarrow; pip install 'growcache[parquet]'", code="GC801"
        )
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
        names = file.schema_arrow.names
        columns = _Columns(names, wanted).wanted
        _refuse_large(file.metadata, columns)
    except pa.ArrowException as error:
        raise FormatError(f"expected Parquet: {error}") from None

    def rows() -> Iterator[Raw]:
        try:
            for batch in table_batches(stream, file.metadata, columns, ROWS_AT_ONCE):
                yield from batch.to_pylist()
        except pa.ArrowException as error:
            raise FormatError(f"expected Parquet: {error}") from None

    return names, rows()


def _refuse_large(metadata: Any, columns: Sequence[str]) -> None:
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = (group.column(n) for n in range(group.num_columns))
        wanted = (part for part in parts if part.path_in_schema in columns)
        if (nbytes := sum(part.total_uncompressed_size for part in wanted)) > MOST_GROUP_BYTES:
            raise FormatError(
                f"expected row groups of at most {MOST_GROUP_BYTES:,} bytes, found {nbytes:,}"
            )


_READERS: dict[
    str, Callable[[IO[bytes], ManifestConfig], tuple[Sequence[str], Iterator[Raw]]]
] = {
    "csv": _read_delimited(","),
    "tsv": _read_delimited("\t"),
    "jsonl": _read_json_lines,
    "parquet": _read_parquet,
}


class InventoryFile(NamedTuple):
    key: str
    kind: str
    wanted: ManifestConfig


def inventory_files(data: bytes, wanted: ManifestConfig) -> list[InventoryFile]:
    """Return the files that the manifest.json of an S3 Inventory names."""
    try:
        values = orjson.loads(data)
        form, files = values["fileFormat"], [one["key"] for one in values["files"]]
        names = tuple(name.strip() for name in str(values["fileSchema"]).split(","))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise FormatError(f"expected the manifest.json of an S3 Inventory: {error}") from None
    if form not in ("CSV", "Parquet") or not all(isinstance(key, str) for key in files):
        raise FormatError(
            f"expected an S3 Inventory in CSV or Parquet, found {form!r:.40}; ORC is not read"
        )
    if form == "Parquet":
        return [InventoryFile(key, "parquet", wanted) for key in files]
    # Only CSV has URL-encoded keys.
    told = wanted.model_copy(update={"columns": names, "url_encoded": True})
    return [InventoryFile(key, "csv.gz", told) for key in files]


def read_all(stream: IO[bytes], most: int) -> bytes:
    data = stream.read(most + 1)
    if len(data) > most:
        raise FormatError(f"expected at most {most:,} bytes")
    return data


def buffered(raw: io.RawIOBase) -> IO[bytes]:
    return io.BufferedReader(raw, 1 << 22)
