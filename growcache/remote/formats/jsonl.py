"""JSON lines: each line an object, by byte range; or, compressed, all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.compressed import (
    compression,
    read_unpacked,
    refuse_compressed,
)
from growcache.remote.formats.jsonfields import Wanted, wanted_fields
from growcache.remote.formats.jsonvalues import all_of, parse
from growcache.remote.formats.lines import LONGEST_LINE, Line, Lines, split
from growcache.remote.formats.objects import (
    Found,
    Measure,
    PartlyReadError,
    Reader,
    Visit,
    refuse_unknown,
    true_or_false,
)
from growcache.remote.formats.pieces import block_of, picked
from growcache.remote.formats.rows import MOST_SAMPLES
from growcache.schema import Sample

_OPTIONS = ("fields", "raw", "compression")
# What a visit reads in vain is about two lines: the rest of one, and room for the last.
LEAST_BLOCK = 24
BLOCK_BYTES = 1 << 17
MOST_BLOCK_BYTES = 1 << 24
_AT_ONCE = 1 << 18  # bytes that are parsed without leaving the event loop


class JsonLines:
    """Lines of one object, as samples."""

    listed = True
    code_digest = None

    def __init__(self, packed: str, wanted: tuple[Wanted, ...] | None, *, raw: bool) -> None:
        self._packed = packed
        self._wanted = wanted
        self._raw = raw
        self._lines = Lines()
        self.ranged = packed == "none"

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        if not self.ranged:
            count = len(await self._whole(reader))
            return Measure(reader.entry.size / max(1, count), 0, count)
        count, stride = await self._lines.measure(reader)
        return Measure(
            max(1.0, stride),
            0,
            count,
            block_of(stride, LEAST_BLOCK, BLOCK_BYTES, MOST_BLOCK_BYTES),
        )

    async def read(self, reader: Reader, visit: Visit) -> Found:
        """See `ObjectFormat.read`; an origin is a range of the bytes, unpacked ones."""
        if self.ranged:
            lines = await self._lines.read(reader, visit)
            if lines and not lines[0].start:
                refuse_compressed(reader.entry, lines[0].data)
        else:
            lines = picked(await self._whole(reader), visit, reader.entry.key)
        if len(lines) > MOST_SAMPLES:
            raise FormatError(
                f"{reader.entry.key}: one visit may yield {MOST_SAMPLES:,} samples, found "
                f"{len(lines):,} lines; make smaller objects"
            )
        if lines and lines[-1].stop - lines[0].start > _AT_ONCE:
            return await asyncio.to_thread(self._samples, reader.entry.key, lines)
        return self._samples(reader.entry.key, lines)

    async def _whole(self, reader: Reader) -> list[Line]:
        data = await read_unpacked(reader, self._packed)
        return await asyncio.to_thread(split, bytes(data), 0)

    def _samples(self, key: str, lines: Sequence[Line]) -> Found:
        found: Found = []
        bad: list[str] = []
        for line in lines:
            try:
                found.append((self._sample(line), line.start, line.stop))
            except FormatError as error:
                bad.append(f"{key}: the line at byte {line.start:,}: {error}")
        if bad:
            more = f" (and {len(bad) - 1:,} lines more)" if len(bad) > 1 else ""
            raise PartlyReadError(bad[0] + more, found)
        return found

    def _sample(self, line: Line) -> Sample:
        if len(line.data) > LONGEST_LINE:
            raise FormatError(
                f"expected at most {LONGEST_LINE:,} bytes, found {len(line.data):,}"
            )
        if self._raw:
            return {"data": line.data}
        record = parse(line.data)
        if not isinstance(record, dict) or not record:
            raise FormatError(
                f"expected a JSON object with keys, found {line.data[:40]!r}; raw: true takes "
                "lines as they are"
            )
        if self._wanted is None:
            return all_of(record)
        return {wanted.name: wanted.of(record) for wanted in self._wanted}


def open_jsonl(options: Mapping[str, Any]) -> JsonLines:
    """Return the format.

    Options:
        fields: which values make a sample; a list of keys, or a mapping of names to a dtype, a
            path such as ``meta.label``, or ``{path: …, dtype: …, default: …}``. Without it all.
        raw: true: the line itself is the sample, as bytes in field ``data``.
        compression: ``auto`` (by the endings in source.url), ``none``, ``gzip``, ``zlib``, ``zstd``.

    Raises:
        ConfigError: an unknown option, a value that cannot be meant, or no zstandard.
    """
    refuse_unknown("jsonl", options, _OPTIONS)
    raw = true_or_false(options, "raw")
    wanted = wanted_fields(options.get("fields"))
    if raw and wanted is not None:
        raise ConfigError("source.options.fields: raw: true keeps whole lines; set one of them")
    return JsonLines(compression(options, ()), wanted, raw=raw)
