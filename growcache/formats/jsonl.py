"""JSON lines: each line is a sample, and a part owns the lines that start in its byte range."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    Measure,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    bool_option,
    named_specs_option,
    read_whole,
    refuse_unknown_options,
    take_some,
)
from growcache.formats.byte_ranges import ReadAhead
from growcache.formats.compressed import (
    UnpackLimit,
    compression_option,
    limit_where,
    refuse_compressed,
)
from growcache.formats.items import RANDOM_RANGE_BYTES, ItemsFormat, items_of_part
from growcache.formats.json_values import (
    CONVERTERS,
    DTYPES,
    parse_json,
    sample_of_record,
    value_of_json,
)
from growcache.schema import Sample, Value
from growcache.store.contract import Entry

LONGEST_LINE = 1 << 25  # Python's objects of a line can take thirty times as many
MEASURED_WHOLE_BYTES = 1 << 18  # an object of at most this size is measured as a whole


MOST_RANDOM_RANGES = 256  # of a part; if these have too few lines, its lines are too long
_SPOTS, _SPOT_BYTES = 4, 1 << 16  # places at which a large object is measured
# Bytes that are read until a long line ends, and the factor by which they grow.
_LEAST_MORE, _MORE, _MOST_MORE, _GROWTH = 1 << 12, 1 << 16, 1 << 23, 4
_MOST_READ_AHEAD = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line that is not blank, without its line end."""

    start: int
    data: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


def split_lines(data: bytes, at: int) -> list[TextLine]:
    r"""Return the lines of bytes that start with a line, at position ``at`` of the object.

    >>> [(line.start, line.data) for line in split_lines(b"a\r\n\nbc", 100)]
    [(100, b'a'), (104, b'bc')]
    """
    lines = []
    if at == 0 and data.startswith(_BOM):
        data, at = data[len(_BOM) :], len(_BOM)
    for line in data.split(b"\n"):
        if line and not line.isspace():
            lines.append(TextLine(at, line[:-1] if line.endswith(b"\r") else line))
        at += len(line) + 1
    return lines


class LineReader:
    def __init__(self) -> None:
        self._ahead = ReadAhead(4096, 64, _MOST_READ_AHEAD)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[TextLine]:
        return await items_of_part(
            reader,
            visit,
            partial(self.lines_in, reader),
            range_bytes=RANDOM_RANGE_BYTES,
            most_ranges=MOST_RANDOM_RANGES,
            least_bytes=-1,
        )

    async def lines_in(self, reader: ObjectReader, start: int, stop: int) -> list[TextLine]:
        if start >= stop:
            return []
        first = max(0, start - 1)  # the byte before ``start`` shows whether a line starts there
        data = await _read_bytes(reader, first, stop + self._ahead.nbytes)
        begin = data.find(b"\n", 0, stop - 1 - first) + 1 if start else 0
        if start and not begin:
            return []
        data = await self._to_the_end(reader, data, first, stop - 1 - first)
        lines = split_lines(data[begin:], first + begin)
        self._ahead.learn([len(line.data) for line in lines])
        return lines

    async def _to_the_end(
        self, reader: ObjectReader, data: bytes, first: int, within: int
    ) -> bytes:
        pieces, length = [data], len(data)
        more = self._ahead.step(_LEAST_MORE, _MORE)
        end = data.find(b"\n", within)
        line = first + data.rfind(b"\n", 0, within) + 1
        while end < 0 and first + length < reader.entry.size:
            if first + length - line > LONGEST_LINE:
                raise FormatError(
                    f"{reader.entry.key}: a line may have at most {LONGEST_LINE:,} bytes, but "
                    f"the one at byte {line:,} has more; is it a file of lines?",
                    code="GC305",
                )
            piece = await _read_bytes(reader, first + length, first + length + more)
            found = piece.find(b"\n")
            end = length + found if found >= 0 else -1
            pieces.append(piece)
            length, more = length + len(piece), min(_MOST_MORE, _GROWTH * more)
        whole = b"".join(pieces) if len(pieces) > 1 else data
        return whole if end < 0 else whole[:end]

    async def measure(self, reader: ObjectReader) -> tuple[int, float]:
        """Return the number of lines and their stride in bytes, estimated for a large object."""
        size = reader.entry.size
        if size <= MEASURED_WHOLE_BYTES:
            lines = split_lines(bytes(memoryview(await read_whole(reader))), 0)
            return len(lines), size / max(1, len(lines))
        spots = [i * (size - _SPOT_BYTES) // (_SPOTS - 1) for i in range(_SPOTS)]
        looked = [await self.lines_in(reader, at, at + _SPOT_BYTES) for at in spots]
        found = [line for lines in looked for line in lines]
        if not found:  # all spots are within lines
            found = await self.lines_in(reader, 0, 1)
        # The spots show the stride of short lines, and the mean length that of long ones.
        stride = max(_SPOTS * _SPOT_BYTES / max(1, len(found)), _mean_bytes(found))
        return max(1, int(size / stride)), stride


def _mean_bytes(lines: list[TextLine]) -> float:
    return sum(len(line.data) + 1 for line in lines) / max(1, len(lines))


async def _read_bytes(reader: ObjectReader, start: int, stop: int) -> bytes:
    return bytes(memoryview(await reader.read(start, min(stop, reader.entry.size))))


_SPEC_KEYS = ("path", "dtype", "default")
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class FieldSpec:
    name: str
    path: tuple[str, ...]  # keys that lead to the value
    dtype: str | None  # one of `DTYPES`; None: as found
    default: Any = _MISSING  # for a missing value or null; `_MISSING`: no default

    def value_in(self, record: Mapping[str, Any]) -> Value:
        found: Any = record
        for key in self.path:
            found = found.get(key, _MISSING) if isinstance(found, dict) else _MISSING
        empty = found is _MISSING or (found is None and self.dtype != "json")
        if empty and self.default is not _MISSING:
            found = self.default
        elif empty:
            what = "null" if found is None else "no such key"
            raise FormatError(
                f"expected a value for {'.'.join(self.path)!r}, found {what}; give it a default "
                "in source.options.fields",
                code="GC303",
            )
        try:
            return value_of_json(found) if self.dtype is None else CONVERTERS[self.dtype](found)
        except (ValueError, OverflowError, TypeError) as error:
            raise FormatError(
                f"{'.'.join(self.path)}: expected {self.dtype or 'a value'}: {error}",
                code="GC306",
            ) from None


def fields_option(value: object) -> tuple[FieldSpec, ...] | None:
    return named_specs_option("fields", value, "{x: float32, label: meta.label}", _field_spec)


def _field_spec(name: str, what: Any) -> FieldSpec:
    where = f"source.options.fields.{name}"
    if what is None:
        return FieldSpec(name, _path(name, where), None)
    if isinstance(what, str):
        if what in DTYPES:
            return FieldSpec(name, _path(name, where), what)
        if (close := _close_match(what, DTYPES)) is not None:
            raise ConfigError(
                f"{where}: no dtype {what!r}; did you mean {close}? (a key of this name is "
                f"{{path: {what}}})"
            )
        return FieldSpec(name, _path(what, where), None)
    if not isinstance(what, Mapping):
        raise ConfigError(
            f"{where}: expected a dtype, a path, or {{path: …, dtype: …, default: …}}, found "
            f"{what!r}"
        )
    for key in what:
        if key not in _SPEC_KEYS:
            close = _close_match(str(key), _SPEC_KEYS)
            hint = f"did you mean {close}?" if close else f"known are {', '.join(_SPEC_KEYS)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}", code="GC102")
    return _checked_spec(FieldSpec(
        name, _path(what.get("path", name), where), what.get("dtype"),
        what.get("default", _MISSING),
    ), where)  # fmt: skip


def _checked_spec(wanted: FieldSpec, where: str) -> FieldSpec:
    if wanted.dtype is not None and wanted.dtype not in DTYPES:
        close = _close_match(str(wanted.dtype), DTYPES)
        hint = f"did you mean {close}?" if close else f"known are {', '.join(DTYPES)}"
        raise ConfigError(f"{where}.dtype: unknown dtype {wanted.dtype!r}; {hint}")
    if wanted.default is not _MISSING:
        try:
            wanted.value_in({})
        except FormatError as error:
            raise ConfigError(f"{where}.default: {error}") from None
    return wanted


def _path(value: object, where: str) -> tuple[str, ...]:
    """Return the keys of ``a.b``, or of a list for keys with dots."""
    keys: Sequence[Any] = value.split(".") if isinstance(value, str) else value  # type: ignore[assignment]
    if isinstance(keys, list | tuple) and keys and all(isinstance(k, str) and k for k in keys):
        return tuple(keys)
    raise ConfigError(f"{where}: expected a path such as meta.label, found {value!r}")


def _close_match(word: str, known: Sequence[str]) -> str | None:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return found[0] if found else None


_OPTIONS = ("fields", "raw", "compression")


class JsonlFormat(ItemsFormat):
    visit_bytes = 1 << 17
    visit_most_bytes = 1 << 24
    inline_bytes = 1 << 18

    def __init__(
        self, compression: str, wanted: tuple[FieldSpec, ...] | None, *, raw: bool
    ) -> None:
        super().__init__(None, compression)
        self._wanted = wanted
        self._raw = raw
        self._lines = LineReader()

    def unpack_limit(self, _: Entry) -> UnpackLimit:
        return limit_where(lambda head: b"\n" in head.lstrip())

    async def measure(self, reader: ObjectReader) -> Measure:
        if not self.ranged:
            return self.measure_of(reader.entry, len(await self._all(reader)))
        return self.measure_of(reader.entry, *await self._lines.measure(reader))

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        if self.ranged:
            lines = await self._lines.read(reader, visit)
            if lines and not lines[0].start:
                refuse_compressed(reader.entry, lines[0].data)
        else:
            lines = take_some(await self._all(reader), visit, reader.entry.key)
        return await self.samples_of(
            reader.entry.key,
            lines,
            self._sample,
            lambda line: f"the line at byte {line.start:,}",
        )

    async def _all(self, reader: ObjectReader) -> list[TextLine]:
        data = await (await self.unpacked(reader)).read()
        return await asyncio.to_thread(split_lines, bytes(data), 0)

    def _sample(self, line: TextLine) -> Sample:
        if len(line.data) > LONGEST_LINE:
            raise FormatError(
                f"expected at most {LONGEST_LINE:,} bytes, found {len(line.data):,}",
                code="GC305",
            )
        if self._raw:
            return {"data": line.data}
        record = parse_json(line.data)
        if not isinstance(record, dict) or not record:
            raise FormatError(
                f"expected a JSON object with keys, found {line.data[:40]!r}; raw: true takes "
                "lines as they are",
                code="GC303",
            )
        if self._wanted is None:
            return sample_of_record(record)
        return {wanted.name: wanted.value_in(record) for wanted in self._wanted}


def open_jsonl(options: Mapping[str, Any]) -> JsonlFormat:
    refuse_unknown_options("jsonl", options, _OPTIONS)
    raw = bool_option(options, "raw")
    wanted = fields_option(options.get("fields"))
    if raw and wanted is not None:
        raise ConfigError(
            "source.options.fields: raw: true keeps whole lines; set one of them", code="GC103"
        )
    return JsonlFormat(compression_option(options, ()), wanted, raw=raw)
