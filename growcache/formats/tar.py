"""Tar archives in WebDataset's layout: members with the same key are one sample."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import ConfigError, FormatError, MissingLibraryError
from growcache.formats.base import (
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    bool_option,
    names_option,
    refuse_unknown_options,
    samples_of_items,
)
from growcache.formats.byte_ranges import (
    UnpackedObject,
    items_of_part,
    samples_worth_a_visit,
)
from growcache.formats.compressed import compression_option, read_unpacked
from growcache.formats.image import decode_image
from growcache.formats.json_values import parse_json, value_of_json
from growcache.formats.npy import parse_npy_header
from growcache.formats.rows import native_order
from growcache.formats.tar_scan import (
    READ_WHOLE_BYTES,
    SampleOffsets,
    SampleScan,
    TarSample,
    all_samples,
    refuse_empty_object,
)
from growcache.formats.tar_scan import TarSamples as Unread
from growcache.formats.user_threads import UserThreads, load_decoder
from growcache.schema import Array, Sample, Value
from growcache.store.contract import Entry
from growcache.usercode import UserCode

MemberConverter: TypeAlias = Callable[[bytes, Entry], Value]
_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")


def value_of_member(data: bytes, ext: str, entry: Entry, *, images: bool) -> Value:
    """Return the value of a member by its extension: ``seg.png`` is a PNG; others are bytes."""
    kind = ext.rpartition(".")[2]
    try:
        if kind in IMAGE_EXTENSIONS and images:
            return decode_image(data, "it")
        return _CONVERTERS[kind](data, entry) if kind in _CONVERTERS else data
    except FormatError as error:
        raise FormatError(f"{ext}: {error}") from None


def _npy_value(data: bytes, entry: Entry) -> Array:
    header = parse_npy_header(data, replace(entry, key="it", size=len(data)))
    count = math.prod(header.shape)
    flat = np.frombuffer(data, header.dtype, count, header.data)
    return native_order(flat.reshape(header.shape, order="F" if header.fortran else "C"))


def _json_value(data: bytes, _: Entry) -> Value:
    value = parse_json(data)
    if value is None:
        raise FormatError("expected a value, found null")
    try:
        return value_of_json(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise FormatError(str(error)) from None


def _text_value(data: bytes, _: Entry) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"expected text in UTF-8, found byte {error.start:,} that is none"
        ) from None


def _integer_value(data: bytes, _: Entry) -> Array:
    found = _INTEGER.fullmatch(data)
    if found is None or not -(1 << 63) <= int(found[1]) < 1 << 63:
        raise FormatError(f"expected a 64-bit integer, found {data[:40]!r}")
    return np.array(int(found[1]), "<i8")


_CONVERTERS: dict[str, MemberConverter] = {
    "npy": _npy_value,
    "json": _json_value,
    **dict.fromkeys(("txt", "text", "transcript"), _text_value),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _integer_value),
}


KEY_FIELD = "__key__"
_OPTIONS = ("fields", "decode", "index", "compression")
_DECODE_CHOICES = ("extension", "images", "none")
LEAST_VISIT_SAMPLES = 24  # what a visit reads in vain is about two samples
VISIT_BYTES = 1 << 20
MOST_ARCHIVE_BYTES = 1 << 25
_SPOT_BYTES = 1 << 19  # bytes, at the start and in the middle, by which an object is measured
_MOST_RANDOM_RANGES = 64


class TarFormat(ObjectFormat):
    def __init__(
        self,
        packed: str,
        fields: tuple[str, ...] | None,
        decode: str,
        code: UserCode | None,
        *,
        index: bool,
    ) -> None:
        self._packed = packed
        self._fields = fields
        self._decode = decode
        self._code = code
        self._samples: SampleScan | SampleOffsets = SampleOffsets() if index else SampleScan()
        self._threads = UserThreads()
        self.ranged = packed == "none"
        self.code_digest = code.digest if code else None

    async def measure(self, reader: ObjectReader) -> Measure:
        refuse_empty_object(reader)
        size = reader.entry.size
        if isinstance(self._samples, SampleOffsets) and self.ranged:
            count = len(await self._samples.offsets(reader))
            return Measure(size / max(1, count), 0, count)
        if not self.ranged or size <= READ_WHOLE_BYTES:
            found = await self._between(reader, 0, size)
            count = len(_samples_or_raise(found))
            stride = size / max(1, count)
        else:
            stride = await self._spotted(reader)
            count = max(1, round(size / stride))
        return Measure(
            max(1.0, stride),
            0,
            count,
            samples_worth_a_visit(stride, LEAST_VISIT_SAMPLES, VISIT_BYTES, MOST_ARCHIVE_BYTES)
            if self.ranged
            else 1,
        )

    async def _spotted(self, reader: ObjectReader) -> float:
        half = reader.entry.size // 2
        found = _samples_or_raise(await self._between(reader, 0, min(half, _SPOT_BYTES)))
        found += (await self._between(reader, half, half + min(half, _SPOT_BYTES))).samples
        if not found:
            raise FormatError(
                f"{reader.entry.key}: expected members with an extension, such as 0001.jpg, "
                "found none"
            )
        return sum(sample.stop - sample.start for sample in found) / len(found)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        """An origin is a range of the bytes, unpacked ones."""
        refuse_empty_object(reader)
        errors: list[FormatError] = []

        async def samples_in(start: int, stop: int) -> list[TarSample]:
            found = await self._between(reader, start, stop)
            errors.extend([found.error] if found.error else [])
            return found.samples

        samples = await items_of_part(
            reader,
            visit,
            samples_in,
            range_bytes=READ_WHOLE_BYTES,
            most_ranges=_MOST_RANDOM_RANGES,
            least_bytes=2 * READ_WHOLE_BYTES if self.ranged else reader.entry.size,
        )
        key, decode = reader.entry.key, partial(self._sample, reader)
        if self._code is not None:
            return await self._threads.samples_of_items(
                key, samples, decode, _label, errors[:1]
            )
        return await asyncio.to_thread(
            samples_of_items, key, samples, decode, _label, errors=errors[:1]
        )

    async def _between(self, reader: ObjectReader, start: int, stop: int) -> Unread:
        if not self.ranged:
            return await all_samples(
                UnpackedObject(reader, await read_unpacked(reader, self._packed))
            )
        return await self._samples.samples_in(reader, start, stop)

    def _sample(self, reader: ObjectReader, packed: TarSample) -> Sample | None:
        contents = _member_contents(packed, self._fields)
        if self._code is not None:
            key = reader.entry.key
            result = self._code(key, {"data": {KEY_FIELD: packed.key, **contents}, "key": key})
            return None if result is None else self._code.sample(key, result)
        if self._decode == "none":
            sample: Sample = dict(contents)
        else:
            images = self._decode == "images"
            sample = {
                ext: value_of_member(data, ext, reader.entry, images=images)
                for ext, data in contents.items()
            }
        if self._fields is None or KEY_FIELD in self._fields:
            sample[KEY_FIELD] = packed.key
        return sample


def _label(packed: TarSample) -> str:
    return f"{packed.key} at byte {packed.start:,}"


def _member_contents(packed: TarSample, fields: tuple[str, ...] | None) -> dict[str, bytes]:
    """Return the bytes of a sample's wanted members by their extensions."""
    found: dict[str, bytes] = {}
    for member, content in zip(packed.members, packed.contents, strict=True):
        if fields is not None and member.ext not in fields:
            continue
        if member.error:
            raise FormatError(f"{member.ext}: {member.error}")
        if member.ext in found:
            raise FormatError(f"it has two members {member.ext}")
        if len(content) < member.size:
            raise FormatError(
                f"{member.ext}: expected {member.size:,} bytes, found {len(content):,}"
            )
        found[member.ext] = bytes(content)
    for name in fields or ():
        if name != KEY_FIELD and name not in found:
            has = ", ".join(member.ext for member in packed.members)
            raise FormatError(f"expected a member {name}, found {has[:160]}")
    return found


def _samples_or_raise(found: Unread) -> list[TarSample]:
    if found.error is not None and not found.samples:
        raise found.error
    return found.samples


def open_tar(options: Mapping[str, Any]) -> TarFormat:
    """Return the format.

    Options:
        fields: which members of a sample, by their extensions, and ``__key__``; all by default.
        decode: ``extension``: arrays, texts and numbers by it, images as they are; ``images``:
            these as uint8 [height, width, 3], too; ``none``: all as bytes; or
            ``package.module:function`` of ``data``, the bytes by extension with ``__key__``, and
            ``key`` of the object if it takes it, that returns the sample, None for none.
        index: true: where samples begin is found out by walking over all headers of an object
            first. For members that are tar archives, and for archives put together.
        compression: ``auto`` (by the endings in source.url), ``none``, ``gzip``, ``zlib``, ``zstd``.

    Raises:
        ConfigError: an unknown option, or a value that cannot be meant.
    """
    refuse_unknown_options("tar", options, _OPTIONS)
    index = bool_option(options, "index")
    decode = str(options.get("decode", "extension") or "none")  # YAML's null means it, too
    if decode not in _DECODE_CHOICES and ":" not in decode:
        raise ConfigError(
            f"source.options.decode: expected {', '.join(_DECODE_CHOICES)} or package.module:function, "
            f"found {decode!r}"
        )
    if decode == "images" and importlib.util.find_spec("PIL") is None:
        raise MissingLibraryError(
            "source.options.decode: needs Pillow; pip install 'growcache[image]'"
        )
    code = load_decoder(decode) if ":" in decode else None
    fields = _fields_option(options.get("fields"))
    return TarFormat(compression_option(options, ()), fields, decode, code, index=index)


def _fields_option(value: object) -> tuple[str, ...] | None:
    if isinstance(value, list | tuple):
        value = [_extension(name) for name in value]
    fields = names_option("fields", value, "extensions, such as [jpg, cls]")
    if fields == (KEY_FIELD,):
        raise ConfigError(f"source.options.fields: expected an extension beside {KEY_FIELD}")
    return fields


def _extension(name: object) -> object:
    return name.removeprefix(".").lower() if isinstance(name, str) else name
