"""TFRecord files: each record is a sample, mostly a ``tf.train.Example``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    Measure,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    bool_option,
    named_specs_option,
    refuse_unknown_options,
    take_some,
)
from growcache.formats.compressed import compression_option
from growcache.formats.items import (
    RANDOM_RANGE_BYTES,
    ItemsFormat,
    decode_option,
    items_of_part,
)
from growcache.formats.tfrecord_scan import READ_WHOLE_BYTES, Record, RecordOffsets, RecordScan
from growcache.schema import Array, Sample, Value
from growcache.usercode import UserCode

MOST_FEATURES = 10_000
# The fields of a large record are counted before it is parsed, because protobuf allocates some
# 100 bytes for a feature of seven.
_COUNTED_BYTES = 1 << 20
_MOST_FIELDS = 1 << 18
_EXAMPLE_FILE = """
name: "example.proto" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Features" } }
"""
_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip

Feature = list[bytes] | Array


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise ValueError("an integer of more than ten bytes")


def _message_fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    at, end = 0, data.nbytes
    while at < end:
        key, at = _varint(data, at)
        kind, content = key & 7, None
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(data, at)
        if size is None or at + size > end:
            raise ValueError("a field that is none, or reaches too far")
        content = data[at : at + size]
        at += size
        yield key >> 3, content


def _count_fields(data: memoryview, path: Sequence[int]) -> int:
    count = 0
    for number, content in _message_fields(data):
        count += 1
        if path and number == path[0] and isinstance(content, memoryview):
            count += _count_fields(content, path[1:])
        if count > _MOST_FIELDS:
            raise ValueError(f"more than {_MOST_FIELDS:,} fields")
    return count


@functools.cache
def _example_class() -> Any:
    """Uses its own descriptor pool, because TensorFlow has these names in the default one."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = text_format.Parse(_EXAMPLE_FILE, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def parse_example(data: memoryview) -> dict[str, Feature]:
    from google.protobuf.message import DecodeError

    try:
        if data.nbytes > _COUNTED_BYTES:
            _count_fields(data, (1, 1, 2, 1))  # features, feature, its value, bytes_list
        found = _example_class().FromString(bytes(data)).features.feature
    except (ValueError, IndexError, DecodeError) as error:
        raise FormatError(f"expected a tf.train.Example: {error}") from None
    if len(found) > MOST_FEATURES:
        raise FormatError(f"expected a tf.train.Example of at most {MOST_FEATURES:,} features")
    if not found:
        raise FormatError(
            "expected a tf.train.Example, found no feature; decode: none keeps it"
        )
    return {name: _feature_values(found[name]) for name in sorted(found)}


def _feature_values(feature: Any) -> Feature:
    match feature.WhichOneof("kind"):
        case "float_list":
            return np.array(feature.float_list.value, "<f4")
        case "int64_list":
            return np.array(feature.int64_list.value, "<i8")
        case _:
            return list(feature.bytes_list.value)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    name: str  # of the feature and the field
    dtype: str | None = None  # of NumPy, ``bytes`` or ``str``; None: as found
    shape: tuple[int | None, ...] | None = None  # with at most one None; None: as found

    def value_in(self, features: Mapping[str, Feature]) -> Value:
        if self.name not in features:
            known = ", ".join(sorted(features)[:10])
            raise FormatError(f"expected a feature {self.name!r}, found {known}")
        feature = features[self.name]
        try:
            return self._value(feature)
        except (ValueError, OverflowError) as error:
            raise FormatError(f"feature {self.name!r}: {error}") from None

    def _value(self, feature: Feature) -> Value:
        if self.dtype is None:
            return value_of_feature(feature)
        if self.dtype in ("bytes", "str"):
            data = _single_bytes(feature)
            return data if self.dtype == "bytes" else data.decode()
        wanted = np.dtype(self.dtype).newbyteorder("<")
        if isinstance(feature, list):
            values = np.frombuffer(_single_bytes(feature), wanted)
        else:
            values = _cast(feature, wanted)
        if self.shape is None:
            return values[0] if len(values) == 1 else values
        return values.reshape([-1 if size is None else size for size in self.shape])


def _single_bytes(feature: Feature) -> bytes:
    if not isinstance(feature, list):
        raise ValueError("expected bytes, found numbers")
    if len(feature) != 1:
        raise ValueError(f"expected one value of bytes, found {len(feature)}")
    return feature[0]


def _cast(values: Array, wanted: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.astype(wanted)
    if wanted.kind in "iub" and not np.array_equal(found, values):
        raise ValueError(f"expected {wanted.name}, found other numbers")
    return found


def value_of_feature(feature: Feature) -> Value:
    if isinstance(feature, list):
        return _single_bytes(feature)
    return feature[0:1].reshape(()) if len(feature) == 1 else feature


def sample_of_features(
    features: Mapping[str, Feature], wishes: Sequence[FeatureSpec] | None
) -> Sample:
    if wishes is None:
        wishes = [FeatureSpec(name) for name in features]
    return {wish.name: wish.value_in(features) for wish in wishes}


def features_option(value: object) -> tuple[FeatureSpec, ...] | None:
    such_as = "{x: [float32, 64, 64], y: int64}"
    return named_specs_option("features", value, such_as, _feature_spec)


def _feature_spec(name: str, what: Any) -> FeatureSpec:
    where = f"source.options.features.{name}"
    if what is None:
        return FeatureSpec(name)
    dtype, *sizes = what if isinstance(what, list | tuple) and what else [what]
    if dtype not in (*_NUMBERS, "bytes", "str"):
        raise ConfigError(
            f"{where}: expected bytes, str or a dtype such as float32, found {dtype!r}"
        )
    fine = all(size is None or (type(size) is int and size >= 0) for size in sizes)
    if not fine or sizes.count(None) > 1 or (sizes and dtype in ("bytes", "str")):
        raise ConfigError(
            f"{where}: expected a dtype and sizes, at most one of them null, such as "
            f"[float32, null, 64], found {what!r}"
        )
    listed = isinstance(what, list | tuple) and len(what) > 1
    return FeatureSpec(name, str(dtype), tuple(sizes) if listed else None)


_OPTIONS = ("decode", "features", "index", "compression")
_SPOT_BYTES = 1 << 18  # bytes, at the start and in the middle, by which an object is measured
_MOST_RANDOM_RANGES = 64


class TFRecordFormat(ItemsFormat):
    visit_bytes = 1 << 19

    def __init__(
        self,
        compression: str,
        wishes: tuple[FeatureSpec, ...] | None,
        code: UserCode | None,
        *,
        examples: bool,
        index: bool,
    ) -> None:
        super().__init__(code, compression)
        self._wishes = wishes
        self._examples = examples
        self._records: RecordScan | RecordOffsets = RecordOffsets() if index else RecordScan()

    async def measure(self, reader: ObjectReader) -> Measure:
        size = reader.entry.size
        if not self.ranged:
            return self.measure_of(reader.entry, len(await self._all(reader)))
        if isinstance(self._records, RecordOffsets):
            offsets = await self._records.offsets(reader)
            return self.measure_of(reader.entry, len(offsets) - 1)
        if size <= READ_WHOLE_BYTES:
            count = len(await self._records.records_in(reader, 0, size))
            stride = size / max(1, count)
        else:
            stride = await self._stride(self._records, reader)
            count = max(1, round(size / stride))
        return self.measure_of(reader.entry, count, stride)

    async def _stride(self, records: RecordScan, reader: ObjectReader) -> float:
        half = reader.entry.size // 2
        found = await records.records_in(reader, 0, min(half, _SPOT_BYTES))
        found += await records.records_in(
            reader, half, min(reader.entry.size, half + _SPOT_BYTES)
        )
        return sum(record.stop - record.start for record in found) / len(found)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        if not self.ranged:
            records = take_some(await self._all(reader), visit, reader.entry.key)
        else:
            records = await items_of_part(
                reader,
                visit,
                partial(self._records.records_in, reader),
                range_bytes=RANDOM_RANGE_BYTES,
                most_ranges=_MOST_RANDOM_RANGES,
                least_bytes=4 * RANDOM_RANGE_BYTES,
            )
        key = reader.entry.key
        return await self.samples_of(
            key,
            records,
            partial(self._sample, key),
            lambda record: f"the record at byte {record.start:,}",
        )

    async def _all(self, reader: ObjectReader) -> list[Record]:
        unpacked = await self.unpacked(reader)
        return await RecordScan().records_in(unpacked, 0, unpacked.entry.size)

    def _sample(self, key: str, record: Record) -> Sample | None:
        if record.data is None:
            raise FormatError("its checksum is wrong")
        if self._examples:
            return sample_of_features(parse_example(record.data), self._wishes)
        data = bytes(record.data)
        return {"data": data} if self._code is None else self.by_user(key, data, key)


def open_tfrecord(options: Mapping[str, Any]) -> TFRecordFormat:
    refuse_unknown_options("tfrecord", options, _OPTIONS)
    index = bool_option(options, "index")
    wishes = features_option(options.get("features"))
    decode, code = decode_option(options, ("example", "none"))
    if wishes is not None and decode != "example":
        raise ConfigError("source.options.features: needs decode: example")
    compression = compression_option(options, ())
    return TFRecordFormat(compression, wishes, code, examples=decode == "example", index=index)
