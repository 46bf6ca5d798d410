"""Audio by soundfile: WAV by byte range, and FLAC and other files of libsndfile whole."""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    ObjectReader,
    SamplesWithOrigins,
    choice_option,
    integer_option,
    read_whole,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.contiguous import ArrayLayout, ContiguousFormat
from growcache.formats.durations import TimeGrid
from growcache.formats.grids import ArrayGrid, grid_option
from growcache.formats.memory import refuse_large_sample, reserve_decoded
from growcache.formats.whole_arrays import WholeArrayFormat, refuse_large_array
from growcache.schema import Array
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OPTIONS = ("window", "stride", "edge", "phase", "dtype", "rate", "read")
_DTYPES = ("float32", "int16", "int32", "float64")
_WHOLE_SUFFIXES = (".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".caf")
_PROBE_BYTES = 1 << 12
_MOST_RATE = (1 << 31) - 1  # largest in libsndfile
_MOST_CHUNKS = 64  # before the samples
_KEPT_BYTES, _LAYOUT_BYTES = 1 << 22, 400
_CHUNK = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")  # tag, channels, rate, bytes per second and per frame, bits
_EXTENSIBLE = 0xFFFE
_UNKNOWN_SIZE = (0, 0xFFFFFFFF)  # size of streamed samples, or in a file above 4 GB
_SUBTYPES = {
    (1, 8): "PCM_U8", (1, 16): "PCM_16", (1, 24): "PCM_24", (1, 32): "PCM_32",
    (3, 32): "FLOAT", (3, 64): "DOUBLE", (6, 8): "ALAW", (7, 8): "ULAW",
}  # fmt: skip
_USE_WHOLE = "set read: whole in source.options"


@dataclass(frozen=True, slots=True)
class WavLayout(ArrayLayout):
    """Layout of a WAV file's frames: [frames, bytes of a frame]."""

    subtype: str = ""
    channels: int = 1
    rate: int = 1

    def decoded(self, frames: Array, dtype: str) -> Array:
        import soundfile

        found, _ = soundfile.read(
            io.BytesIO(frames.tobytes()),
            dtype=dtype,
            format="RAW",
            endian="LITTLE",
            subtype=self.subtype,
            channels=self.channels,
            samplerate=self.rate,
        )
        return np.asarray(found)


async def read_wav_layout(reader: ObjectReader) -> WavLayout:
    """Read chunk after chunk until the samples are found."""
    entry = reader.entry
    head, start = bytes(memoryview(await reader.read(0, _PROBE_BYTES))), 0
    if head[:4] not in (b"RIFF", b"RF64", b"BW64") or head[8:12] != b"WAVE":
        raise FormatError(
            f"{entry.key}: expected a WAV file, found {head[:12]!r}; {_USE_WHOLE} to read FLAC, Ogg, "
            "MP3 and others"
        )
    at, form = 12, b""
    for _ in range(_MOST_CHUNKS):
        if at + 64 > start + len(head) < entry.size:
            start = at
            head = bytes(memoryview(await reader.read(at, min(at + 512, entry.size))))
        if len(head) - (at - start) < _CHUNK.size:
            break
        name, size = _CHUNK.unpack_from(head, at - start)
        at += _CHUNK.size
        if name == b"data":
            return _wav_layout(form, at, size, entry)
        if name == b"fmt ":
            form = head[at - start : at - start + min(size, 40)]
        at += size + size % 2
    raise FormatError(f"{entry.key}: expected samples in a WAV file, found none in its chunks")


def _wav_layout(form: bytes, at: int, size: int, entry: Entry) -> WavLayout:
    if len(form) < _FORMAT.size:
        raise FormatError(f"{entry.key}: its WAV header does not say how samples are stored")
    tag, channels, rate, _, align, bits = _FORMAT.unpack_from(form)
    if tag == _EXTENSIBLE and len(form) >= 26:
        tag = int.from_bytes(form[24:26], "little")
    subtype = _SUBTYPES.get((tag, bits))
    if (
        subtype is None
        or not channels
        or not 0 < rate <= _MOST_RATE
        or align != channels * bits // 8
    ):
        raise FormatError(
            f"{entry.key}: expected PCM, float, A-law or µ-law, found WAV encoding {tag} of {bits} "
            f"bits, {channels} channels in {align} bytes, {rate:,} frames a second; {_USE_WHOLE}",
            code="GC304",
        )
    room = entry.size - at
    if size in _UNKNOWN_SIZE:
        size = room
    if size > room:
        raise FormatError(
            f"{entry.key}: its header promises {size:,} bytes of samples, the object has {room:,}",
            code="GC302",
        )
    return WavLayout(at, (size // align, align), np.dtype("u1"), False, subtype, channels, rate)


def refuse_rate(found: int, expected: int | None, entry: Entry) -> None:
    if expected is not None and found != expected:
        raise FormatError(
            f"{entry.key}: expected {expected:,} frames a second, as source.options.rate says, found "
            f"{found:,}",
            code="GC303",
        )


class WavWindowsFormat(ContiguousFormat):
    def __init__(self, grid: ArrayGrid, dtype: str, rate: int | None) -> None:
        super().__init__(grid, _KEPT_BYTES)
        self._dtype, self._rate = dtype, rate

    async def look_up(self, reader: ObjectReader) -> tuple[dict[str, ArrayLayout], int]:
        found = await read_wav_layout(reader)
        refuse_rate(found.rate, self._rate, reader.entry)
        if self._dtype.startswith("int") and found.subtype in ("FLOAT", "DOUBLE"):
            raise FormatError(
                f"{reader.entry.key}: its samples are floats, which dtype: {self._dtype} would cut",
                code="GC306",
            )
        return {"x": found}, _LAYOUT_BYTES

    def meant(
        self, found: SamplesWithOrigins, layouts: Mapping[str, ArrayLayout]
    ) -> SamplesWithOrigins:
        layout = layouts["x"]
        assert isinstance(layout, WavLayout)
        rows: SamplesWithOrigins = []
        for sample, start, stop in found:
            frames = sample["x"]
            assert isinstance(frames, np.ndarray)
            values = layout.decoded(frames, self._dtype)
            values[stop - start :] = 0  # zero bytes are not silence in every encoding
            rows.append(({"x": values}, start, stop))
        return rows


class AudioWholeFormat(WholeArrayFormat):
    def __init__(self, grid: ArrayGrid | None, dtype: str, rate: int | None) -> None:
        super().__init__(grid)
        self._dtype, self._rate = dtype, rate

    async def load(self, reader: ObjectReader) -> tuple[ArrayLayout, Array]:
        data, entry = await read_whole(reader), reader.entry
        nbytes, rate = await asyncio.to_thread(self._decoded_bytes, data, entry)
        refuse_rate(rate, self._rate, entry)
        refuse_large_array(nbytes, entry)
        if self._grid is None:
            refuse_large_sample(nbytes, entry.key)
        await reserve_decoded(nbytes)
        values = await asyncio.to_thread(self._decoded, data, entry)
        return ArrayLayout(0, values.shape, values.dtype), values

    def _decoded_bytes(self, data: Buffer, entry: Entry) -> tuple[int, int]:
        import soundfile

        try:
            found = soundfile.info(io.BytesIO(memoryview(data)))
        except soundfile.SoundFileError as error:
            raise _not_audio_error(entry, data, error) from None
        itemsize = np.dtype(self._dtype).itemsize
        return found.frames * found.channels * itemsize, found.samplerate

    def _decoded(self, data: Buffer, entry: Entry) -> Array:
        import soundfile

        try:
            values, _ = soundfile.read(io.BytesIO(memoryview(data)), dtype=self._dtype)
        except soundfile.SoundFileError as error:
            raise _not_audio_error(entry, data, error) from None
        if not len(values):
            raise FormatError(
                f"{entry.key}: expected audio, found no frame in it", code="GC302"
            )
        return np.asarray(values)


def _not_audio_error(entry: Entry, data: Buffer, error: Exception) -> FormatError:
    words = " ".join(str(error).split())
    return FormatError(
        f"{entry.key}: expected audio that libsndfile reads, found "
        f"{bytes(memoryview(data)[:8])!r}: {words}"
    )


def _grid_option(options: Mapping[str, Any], rate: int | None) -> ArrayGrid | None:
    window = options.get("window")
    if window is None:
        cut = {name: options[name] for name in ("stride", "edge", "phase") if name in options}
        return grid_option(cut)
    if type(window) not in (int, str):
        raise ConfigError(
            f"source.options.window: expected a number of frames, or a time, as in 2s, found "
            f"{window!r}"
        )
    grid = TimeGrid(options, 0)
    if grid.needs_rate and rate is None:
        raise ConfigError(
            "source.options.window: a time needs rate, the frames per second, as in rate: 16000",
            code="GC103",
        )
    return grid.at(rate or 1, "source.options")


def open_audio(
    options: Mapping[str, Any], urls: Sequence[str] = ()
) -> WavWindowsFormat | AudioWholeFormat:
    refuse_unknown_options("audio", options, _OPTIONS)
    require_library("source.format: audio", "soundfile", "audio")
    dtype = choice_option(options, "dtype", _DTYPES, "float32")
    rate = integer_option(options, "rate", 1)
    named = any(url.lower().endswith(_WHOLE_SUFFIXES) for url in urls)
    read = choice_option(options, "read", ("range", "whole"), "whole" if named else "range")
    grid = _grid_option(options, rate)
    if grid is None or read == "whole":
        return AudioWholeFormat(grid, dtype, rate)
    return WavWindowsFormat(grid, dtype, rate)
