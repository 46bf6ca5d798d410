"""EDF and BDF recordings: windows of chosen signals in physical units, read by byte range.

A file has a text header, and records of equal duration. A record has the samples of each signal
in turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    MOST_VISIT_BYTES,
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    choice_option,
    is_fetched_whole,
    names_option,
    refuse_unknown_options,
)
from growcache.formats.byte_ranges import MOST_GAP_BYTES, FetchedObject, read_ranges
from growcache.formats.contiguous import (
    ArrayLayout,
    measure_samples,
    native_order,
    wanted_ordinals,
)
from growcache.formats.durations import TimeGrid
from growcache.formats.grids import Samples, hulls_of
from growcache.formats.memory import SingleFlightCache
from growcache.schema import Array
from growcache.store.contract import Entry
from growcache.usercode import printable

_OPTIONS = ("channels", "window", "stride", "edge", "phase", "dtype")
_DTYPES = ("float32", "float64", "stored")
_FIXED_BYTES = _SIGNAL_BYTES = 256  # of a header: its fixed part, and the part per signal
_PROBE_BYTES = 1 << 14  # enough for the header of 63 signals
_MOST_SIGNALS = 1 << 14
_MOST_RECORD_BYTES = 1 << 28
_MOST_RANGES = 1 << 16  # of a visit
_READ_ALONG_BYTES = 1 << 18  # between windows
_KEPT_BYTES = 1 << 24
_TIME_AXIS = 1
# Widths in characters of the header's fields, each of which is stored for all signals in turn.
_SIGNAL_FIELDS = {
    "label": 16, "transducer": 80, "unit": 8, "physical_min": 8, "physical_max": 8,
    "digital_min": 8, "digital_max": 8, "filters": 80, "samples": 8, "reserved": 32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signal:
    label: str
    start: int  # first byte in a record
    samples: int  # number in a record
    gain: float
    offset: float  # physical = (stored + offset) * gain


@dataclass(frozen=True, slots=True)
class Recording:
    data: int  # first byte of the records
    records: int
    record_bytes: int
    width: int  # bytes of a sample: 2, or 3 in BDF
    signals: tuple[Signal, ...]  # chosen signals, all of one rate
    seconds: float  # duration of a record

    @property
    def per_record(self) -> int:
        return self.signals[0].samples

    @property
    def rate(self) -> float:
        """Return the sampling rate in samples per second."""
        return self.per_record / self.seconds if self.seconds > 0 else 0

    @property
    def layout(self) -> ArrayLayout:
        """Return the layout of the recording as an array."""
        shape = (len(self.signals), self.records * self.per_record)
        return ArrayLayout(self.data, shape, np.dtype("<i2" if self.width == 2 else "<i4"))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the byte ranges of a record to fetch. Small gaps are read, too."""
        found: list[tuple[int, int]] = []
        nbytes = self.width * self.per_record
        for start in sorted(one.start for one in self.signals):
            if found and start - found[-1][1] <= MOST_GAP_BYTES:
                found[-1] = (found[-1][0], start + nbytes)
            else:
                found.append((start, start + nbytes))
        return found


def parse_recording(head: bytes, channels: tuple[str, ...] | None, entry: Entry) -> Recording:
    """Return the recording that a complete header describes."""
    try:
        return _parsed(head, channels, entry)
    except FormatError:
        raise
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise FormatError(
            f"{entry.key}: its EDF header is damaged: {error}", code="GC302"
        ) from None


def header_bytes(head: bytes, entry: Entry) -> int:
    is_edf, is_bdf = head.startswith(b"0       "), head.startswith(b"\xffBIOSEMI")
    count = head[252:256].strip()
    if not (is_edf or is_bdf) or not count.isdigit():
        raise FormatError(f"{entry.key}: expected an EDF or BDF file, found {head[:8]!r}")
    nbytes = _FIXED_BYTES + _SIGNAL_BYTES * int(count)
    if not 0 < int(count) <= _MOST_SIGNALS or nbytes > entry.size:
        raise FormatError(
            f"{entry.key}: its header claims {int(count):,} signals in {entry.size:,} bytes",
            code="GC302",
        )
    if head[192:197] in (b"EDF+D", b"BDF+D"):
        raise FormatError(
            f"{entry.key}: expected records without gaps in time, found a discontinuous one "
            f"({head[192:197].decode()})",
            code="GC304",
        )
    return nbytes


def _parsed(head: bytes, channels: tuple[str, ...] | None, entry: Entry) -> Recording:
    width = 3 if head[0] == 0xFF else 2
    signals: list[Signal] = []
    at = 0
    for fields in _signal_fields(head):
        samples = int(fields["samples"])
        if samples < 0:
            raise ValueError(f"a signal of {samples} samples a record")
        if fields["label"] not in ("EDF Annotations", "BDF Annotations"):
            signals.append(_signal(fields, at, samples))
        at += samples * width
    if not 0 < at <= _MOST_RECORD_BYTES:
        raise ValueError(f"records of {at:,} bytes")
    records, room = int(head[236:244]), (entry.size - len(head)) // at
    if records > room:
        raise FormatError(
            f"{entry.key}: its header promises {records:,} records of {at:,} bytes, the object has "
            f"room for {room:,}",
            code="GC302",
        )
    records = room if records < 0 else records  # an interrupted recorder writes -1
    taken = _taken(signals, channels, entry)
    return Recording(len(head), records, at, width, taken, float(head[244:252]))


def _signal_fields(head: bytes) -> list[dict[str, str]]:
    count = int(head[252:256])
    found: list[dict[str, str]] = [{} for _ in range(count)]
    at = _FIXED_BYTES
    for name, length in _SIGNAL_FIELDS.items():
        for one in found:
            one[name] = head[at : at + length].decode("latin-1").strip(" \0")
            at += length
    return found


def _signal(fields: Mapping[str, str], start: int, samples: int) -> Signal:
    low, high, stored_low, stored_high = (
        float(fields[name])
        for name in ("physical_min", "physical_max", "digital_min", "digital_max")
    )
    gain = (high - low) / (stored_high - stored_low)
    if not math.isfinite(gain) or gain == 0:
        raise ValueError(f"signal {fields['label']!r} has no range")
    return Signal(fields["label"], start, samples, gain, high / gain - stored_high)


def _taken(
    signals: Sequence[Signal], channels: tuple[str, ...] | None, entry: Entry
) -> tuple[Signal, ...]:
    named: dict[str, Signal] = {}
    for one in signals:
        named.setdefault(one.label, one)  # the first of equal names
    for name in channels or ():
        if name not in named:
            raise FormatError(
                f"{entry.key}: expected a signal {name!r}, found {printable(', '.join(named)[:160])}",
                code="GC303",
            )
    taken = tuple(signals) if channels is None else tuple(named[name] for name in channels)
    counts = {one.samples: one.label for one in reversed(taken)}
    if len(counts) > 1:
        shown = ", ".join(f"{name}: {count}" for count, name in counts.items())
        raise FormatError(
            f"{entry.key}: expected signals of one sampling rate, found samples a record of "
            f"{printable(shown[:160])}; name some in source.options.channels",
            code="GC303",
        )
    if not taken or not taken[0].samples:
        raise FormatError(
            f"{entry.key}: expected signals, found none with samples", code="GC303"
        )
    return taken


class EdfFormat(ObjectFormat):
    ranged = header_first = True

    def __init__(self, grid: TimeGrid, channels: tuple[str, ...] | None, dtype: str) -> None:
        self._grid, self._channels, self._dtype = grid, channels, dtype
        self._kept: SingleFlightCache[Entry, Recording] = SingleFlightCache(_KEPT_BYTES)

    async def measure(self, reader: ObjectReader) -> Measure:
        found = await self._recording(reader)
        grid = self._grid.at(found.rate, reader.entry.key)
        samples = grid.on(found.layout.shape, reader.entry.key)
        nbytes = found.records * found.record_bytes
        row = found.record_bytes / found.per_record
        measure = measure_samples(samples, row, nbytes, reader.entry.size)
        stride = grid.cuts[0][1].stride
        return replace(measure, together=max(1, found.per_record // stride))

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        entry = reader.entry
        if self._kept.peek(entry) is None and is_fetched_whole(entry, visit):
            reader = FetchedObject(reader, await reader.read())
        found = await self._recording(reader)
        layout = found.layout
        grid = self._grid.at(found.rate, entry.key)
        samples = grid.on(layout.shape, entry.key, visit, entry.key)
        wanted = wanted_ordinals({"x": layout}, {"x": samples}, visit, entry.key)
        gap = _READ_ALONG_BYTES * found.per_record // found.record_bytes
        hulls = list(hulls_of(samples, wanted, layout.order, gap))
        spans = [_records_of(hull[_TIME_AXIS], found) for hull, _ in hulls]
        _refuse_large_visit(spans, found, samples, len(wanted), entry)
        rows: SamplesWithOrigins = []
        for (hull, starts), data in zip(
            hulls, await _read_records(reader, found, spans), strict=True
        ):
            first = hull[_TIME_AXIS][0] // found.per_record * found.per_record
            box = (hull[0], range(first, first + data.shape[1]))
            rows += [
                ({"x": self._meant(values, found, stop - start)}, start, stop)
                for values, start, stop in samples.cut_all(data, box, starts)
            ]
        return rows

    async def _recording(self, reader: ObjectReader) -> Recording:
        return await self._kept.get(reader.entry, lambda: self._look_up(reader))

    async def _look_up(self, reader: ObjectReader) -> tuple[Recording, int]:
        head = bytes(memoryview(await reader.read(0, min(_PROBE_BYTES, reader.entry.size))))
        nbytes = header_bytes(head, reader.entry)
        if nbytes > len(head):
            head += bytes(memoryview(await reader.read(len(head), nbytes)))
        if len(head) < nbytes:
            raise FormatError(f"{reader.entry.key}: its EDF header is cut off", code="GC302")
        found = parse_recording(head[:nbytes], self._channels, reader.entry)
        return found, 200 + 200 * len(found.signals)

    def _meant(self, values: Array, found: Recording, length: int) -> Array:
        """Return physical values. Zeros after the end remain zeros."""
        if self._dtype == "stored":
            return native_order(values)
        offset = np.array([[one.offset] for one in found.signals])
        physical = (values + offset) * np.array([[one.gain] for one in found.signals])
        physical[:, length:] = 0
        return native_order(physical.astype(self._dtype, copy=False))


def _records_of(times: Sequence[int], found: Recording) -> range:
    return range(times[0] // found.per_record, times[-1] // found.per_record + 1)


def _refuse_large_visit(
    spans: Sequence[range], found: Recording, samples: Samples, count: int, entry: Entry
) -> None:
    """Refuse a visit that is too large, also after decoding to float64."""
    nbytes = max(sum(map(len, spans)) * found.record_bytes, 8 * samples.values * count)
    ranges = sum(map(len, spans)) * len(found.spans)
    if nbytes > MOST_VISIT_BYTES or ranges > _MOST_RANGES:
        raise FormatError(
            f"{entry.key}: one visit may read at most {MOST_VISIT_BYTES:,} bytes in "
            f"{_MOST_RANGES:,} ranges, found {nbytes:,} in {ranges:,}; cut smaller windows, or "
            "lower sampling.samples_per_object",
            code="GC305",
        )


async def _read_records(
    reader: ObjectReader, found: Recording, spans: Sequence[range]
) -> list[Array]:
    """Return the stored values [signals, samples] of each range of records."""
    inner = found.spans
    first, last = inner[0][0], inner[-1][1]
    is_one = len(inner) == 1 and found.record_bytes - (last - first) <= MOST_GAP_BYTES
    ranges = [
        (
            found.data + number * found.record_bytes + start,
            found.data + until * found.record_bytes + stop,
        )
        for records in spans
        for number, until, start, stop in (
            [(records[0], records[-1], first, last)]
            if is_one
            else [(number, number, *span) for number in records for span in inner]
        )
    ]
    data = iter(await read_ranges(reader, ranges))
    arrays = []
    for records in spans:
        if is_one:
            rows = _rows_of(next(data), len(records), found.record_bytes)
        else:
            pieces = [next(data) for _ in range(len(records) * len(inner))]
            rows = np.frombuffer(b"".join(pieces), np.uint8).reshape(len(records), -1)
        arrays.append(_signals_of(rows, found, inner))
    return arrays


def _rows_of(data: memoryview, count: int, step: int) -> Array:
    """Return rows at distances of ``step`` bytes. The last one ends with the data."""
    width = len(data) - (count - 1) * step
    flat = np.frombuffer(data, np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (count, width), (step, 1), writeable=False)


def _signals_of(rows: Array, found: Recording, spans: Sequence[tuple[int, int]]) -> Array:
    nbytes, at, starts = found.width * found.per_record, 0, {}
    for start, stop in spans:
        for one in found.signals:
            if start <= one.start < stop:
                starts[one.start] = at + one.start - start
        at += stop - start
    values = np.empty((len(found.signals), len(rows), found.per_record), found.layout.dtype)
    for number, one in enumerate(found.signals):
        piece = rows[:, starts[one.start] : starts[one.start] + nbytes]
        values[number] = _integers(np.ascontiguousarray(piece), found.width)
    return values.reshape(len(found.signals), -1)


def _integers(piece: Array, width: int) -> Array:
    if width == 2:
        return piece.view("<i2")
    wide = np.zeros((len(piece), piece.shape[1] // 3, 4), np.uint8)
    wide[:, :, 1:] = piece.reshape(len(piece), -1, 3)
    shifted: Array = wide.view("<i4")[:, :, 0] >> 8
    return shifted


def open_edf(options: Mapping[str, Any]) -> EdfFormat:
    refuse_unknown_options("edf", options, _OPTIONS)
    if type(options.get("window")) not in (int, str):
        raise ConfigError(
            "source.options.window: format edf needs the length of a window, as in window: 2s, or "
            f"window: 1000 for samples, found {options.get('window')!r}",
            code="GC103",
        )
    grid = TimeGrid(options, _TIME_AXIS)
    channels = names_option("channels", options.get("channels"), "labels of signals")
    dtype = choice_option(options, "dtype", _DTYPES, "float32")
    return EdfFormat(grid, channels, dtype)
