"""Parquet: a row is a sample; the columns that are wanted are read by row group."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from growcache.errors import FormatError
from growcache.remote.formats.chunks import fetch
from growcache.remote.formats.decoding import decodes
from growcache.remote.formats.named import different_names
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
from growcache.remote.formats.parquet_footer import Footer, Footers, Pieces, broken
from growcache.remote.formats.parquet_values import nbytes_of, values_of
from growcache.remote.formats.rows import MOST_SAMPLES
from growcache.remote.formats.units import chosen
from growcache.remote.store import Entry
from growcache.schema import sample_bytes

_OPTIONS = ("columns", "nulls")
_COPIES = 2  # of what is decoded, in memory together
_ROW_BYTES = 64  # that a row takes beside its values


class TableRows:
    """An object is a table, each of whose rows is a sample."""

    ranged = True
    listed = True
    code_digest = None

    def __init__(self, columns: tuple[str, ...] | None, *, drop_nulls: bool) -> None:
        self._footers = Footers(columns)
        self._drop_nulls = drop_nulls

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        footer = await self._footers.of(reader)
        rows, groups = footer.starts[-1], len(footer.starts) - 1
        stride = reader.entry.size / max(1, rows)
        return Measure(stride, 0, rows, max(1, -(-rows // max(1, groups))))

    async def read(self, reader: Reader, visit: Visit) -> Found:
        """See `ObjectFormat.read`."""
        footer = await self._footers.of(reader)
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

    async def ordinals(self, reader: Reader, visit: Visit) -> Sequence[int]:
        """See `Chunked.ordinals`."""
        footer = await self._footers.of(reader)
        return chosen(footer.starts[-1], visit, reader.entry.key, footer.unit_of)

    async def _read_group(
        self, reader: Reader, footer: Footer, group: int, rows: Sequence[int]
    ) -> tuple[Found, str]:
        await asyncio.to_thread(footer.check, group, reader.entry)
        ranges = footer.ranges(group, reader.entry)
        data = await fetch(reader, ranges)
        image = Pieces(reader.entry.size, dict(zip(ranges, data, strict=True)))
        await decodes(_COPIES * footer.decoded_bytes(group, reader.entry))
        return await asyncio.to_thread(self._decoded, image, footer, group, rows, reader.entry)

    def _decoded(
        self, image: Pieces, footer: Footer, group: int, rows: Sequence[int], entry: Entry
    ) -> tuple[Found, str]:
        """Return the rows, and why some are left out."""
        try:
            return self._rows(image, footer, group, rows, entry)
        except FormatError as error:
            raise FormatError(f"{entry.key}: {error}") from None
        except Exception as error:  # Arrow raises what a broken file makes it raise
            raise broken(entry, error) from error

    def _rows(
        self, image: Pieces, footer: Footer, group: int, rows: Sequence[int], entry: Entry
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
                held += sum(map(nbytes_of, few.columns)) + _ROW_BYTES * len(samples)
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


def _batches(image: Pieces, footer: Footer, group: int) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(
        pa.PythonFile(image, mode="r"),
        metadata=footer.metadata,
        pre_buffer=False,
        read_dictionary=footer.shared(group),
    ) as file:
        yield from file.iter_batches(
            footer.batch_rows(group), [group], columns=list(footer.columns), use_threads=False
        )


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
    columns = different_names("columns", [columns] if isinstance(columns, str) else columns)
    drop = one_of(options, "nulls", ("error", "drop"), "error") == "drop"
    need_library("parquet", "pyarrow")
    return TableRows(columns, drop_nulls=drop)
