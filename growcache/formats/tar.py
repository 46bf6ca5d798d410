"""Tar archives in WebDataset's layout: members with the same key are one sample."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    Measure,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    bool_option,
    names_option,
    refuse_unknown_options,
    take_some,
)
from growcache.formats.compressed import UnpackLimit, compression_option, limit_where
from growcache.formats.contiguous import native_order
from growcache.formats.image import decode_image, require_pillow
from growcache.formats.items import ItemsFormat, decode_option, items_of_part
from growcache.formats.json_values import parse_json, value_of_json
from growcache.formats.npy import parse_npy_header
from growcache.formats.npy_dtypes import fields_of
from growcache.formats.tar_scan import (
    READ_WHOLE_BYTES,
    TAR_BLOCK,
    SampleOffsets,
    SampleScan,
    TarSample,
    TarSamples,
    all_samples,
    parse_tar_header,
    refuse_empty_object,
)
from growcache.schema import Array, Sample, Value
from growcache.store.contract import Entry
from growcache.usercode import UserCode

MemberConverter: TypeAlias = Callable[[bytes, Entry], Value]
_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")


def value_of_member(data: bytes, ext: str, entry: Entry, *, images: bool) -> Value:
    """Return the value of a member.

    Only the last part of ``ext`` counts: ``seg.png`` is a PNG.
    """
    kind = ext.rpartition(".")[2]
    try:
        if kind in IMAGE_EXTENSIONS and images:
            return decode_image(data, "it")
        return _CONVERTERS[kind](data, entry) if kind in _CONVERTERS else data
    except FormatError as error:
        raise FormatError(f"{ext}: {error}", code=error.code) from None


def _npy_value(data: bytes, entry: Entry) -> Value:
    header = parse_npy_header(data, replace(entry, key="it", size=len(data)))
    if header.dtype.names is not None:
        raise FormatError("expected an array of numbers, found records or text", code="GC306")
    count = math.prod(header.shape)
    flat = np.frombuffer(data, header.dtype, count, header.data)
    array = native_order(flat.reshape(header.shape, order="F" if header.fortran else "C"))
    value: Value = fields_of("it", array)["it"]
    return value


def _json_value(data: bytes, _: Entry) -> Value:
    value = parse_json(data)
    if value is None:
        raise FormatError("expected a value, found null", code="GC306")
    try:
        return value_of_json(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise FormatError(str(error)) from None


def _text_value(data: bytes, _: Entry) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"expected text in UTF-8, found an invalid byte at {error.start:,}", code="GC306"
        ) from None


def _integer_value(data: bytes, _: Entry) -> Array:
    found = _INTEGER.fullmatch(data)
    if found is None or not -(1 << 63) <= int(found[1]) < 1 << 63:
        raise FormatError(f"expected a 64-bit integer, found {data[:40]!r}", code="GC306")
    return np.array(int(found[1]), "<i8")


_CONVERTERS: dict[str, MemberConverter] = {
    "npy": _npy_value,
    "json": _json_value,
    **dict.fromkeys(("txt", "text", "transcript"), _text_value),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _integer_value),
}


KEY_FIELD = "__key__"
_OPTIONS = ("fields", "decode", "index", "compression")
_SPOT_BYTES = 1 << 19  # read at the start and in the middle to measure an object
_MOST_RANDOM_RANGES = 64


class TarFormat(ItemsFormat):
    visit_bytes = 1 << 20

    def __init__(
        self,
        compression: str,
        fields: tuple[str, ...] | None,
        decode: str,
        code: UserCode | None,
        *,
        index: bool,
    ) -> None:
        super().__init__(code, compression)
        self._fields = fields
        self._decode = decode
        self._samples: SampleScan | SampleOffsets = SampleOffsets() if index else SampleScan()

    def unpack_limit(self, _: Entry) -> UnpackLimit:
        return limit_where(lambda head: parse_tar_header(head[:TAR_BLOCK]) is not None)

    async def measure(self, reader: ObjectReader) -> Measure:
        refuse_empty_object(reader)
        entry, size = reader.entry, reader.entry.size
        if not self.ranged:
            found = await all_samples(await self.unpacked(reader))
            return self.measure_of(entry, len(_samples_or_raise(found)))
        if isinstance(self._samples, SampleOffsets):
            return self.measure_of(entry, len(await self._samples.offsets(reader)))
        if size <= READ_WHOLE_BYTES:
            found = await self._samples.samples_in(reader, 0, size)
            count = len(_samples_or_raise(found))
            return self.measure_of(entry, count, size / max(1, count))
        stride = await self._stride(self._samples, reader)
        return self.measure_of(entry, max(1, round(size / stride)), stride)

    async def _stride(self, scan: SampleScan, reader: ObjectReader) -> float:
        half = reader.entry.size // 2
        spot = min(half, _SPOT_BYTES)
        found = _samples_or_raise(await scan.samples_in(reader, 0, spot))
        found += (await scan.samples_in(reader, half, half + spot)).samples
        if not found:
            raise FormatError(
                f"{reader.entry.key}: expected members with an extension, such as 0001.jpg, "
                "found none"
            )
        return sum(sample.stop - sample.start for sample in found) / len(found)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        refuse_empty_object(reader)
        key = reader.entry.key
        errors: list[FormatError] = []

        def noted(found: TarSamples) -> list[TarSample]:
            errors.extend([found.error] if found.error else [])
            return found.samples

        async def samples_in(start: int, stop: int) -> list[TarSample]:
            return noted(await self._samples.samples_in(reader, start, stop))

        if self.ranged:
            samples = await items_of_part(
                reader,
                visit,
                samples_in,
                range_bytes=READ_WHOLE_BYTES,
                most_ranges=_MOST_RANDOM_RANGES,
                least_bytes=2 * READ_WHOLE_BYTES,
            )
        else:
            whole = noted(await all_samples(await self.unpacked(reader)))
            samples = take_some(whole, visit, key)
        return await self.samples_of(
            key,
            samples,
            partial(self._sample, reader),
            lambda stored: f"{stored.key} at byte {stored.start:,}",
            errors[:1],
        )

    def _sample(self, reader: ObjectReader, packed: TarSample) -> Sample | None:
        contents = _member_contents(packed, self._fields)
        if self._code is not None:
            key = reader.entry.key
            return self.by_user(key, {KEY_FIELD: packed.key, **contents}, key)
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


def _member_contents(packed: TarSample, fields: tuple[str, ...] | None) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for member, content in zip(packed.members, packed.contents, strict=True):
        if fields is not None and member.ext not in fields:
            continue
        if member.error:
            raise FormatError(f"{member.ext}: {member.error}")
        if member.ext in found:
            raise FormatError(f"it has two members {member.ext}", code="GC303")
        if len(content) < member.size:
            raise FormatError(
                f"{member.ext}: expected {member.size:,} bytes, found {len(content):,}",
                code="GC302",
            )
        found[member.ext] = bytes(content)
    for name in fields or ():
        if name != KEY_FIELD and name not in found:
            has = ", ".join(member.ext for member in packed.members)
            raise FormatError(f"expected a member {name}, found {has[:160]}", code="GC303")
    return found


def _samples_or_raise(found: TarSamples) -> list[TarSample]:
    if found.error is not None and not found.samples:
        raise found.error
    return found.samples


def open_tar(options: Mapping[str, Any]) -> TarFormat:
    refuse_unknown_options("tar", options, _OPTIONS)
    index = bool_option(options, "index")
    decode, code = decode_option(options, ("extension", "images", "none"))
    if decode == "images":
        require_pillow()
    fields = _fields_option(options.get("fields"))
    return TarFormat(compression_option(options, ()), fields, decode, code, index=index)


def _fields_option(value: object) -> tuple[str, ...] | None:
    if isinstance(value, list | tuple):
        value = [_extension(name) for name in value]
    fields = names_option("fields", value, "extensions, such as [jpg, cls]")
    if fields == (KEY_FIELD,):
        raise ConfigError(
            f"source.options.fields: expected an extension in addition to {KEY_FIELD}"
        )
    return fields


def _extension(name: object) -> object:
    return name.removeprefix(".").lower() if isinstance(name, str) else name
