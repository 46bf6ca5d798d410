"""Parse ``tf.train.Example`` and ``tf.train.SequenceExample`` in bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import FormatError
from growcache.schema import Array

MOST_FEATURES = 10_000
# The fields of a large record are counted before parsing, because protobuf allocates about 100
# bytes for a feature of seven.
_COUNTED_BYTES = 1 << 20
_MOST_FIELDS = 1 << 18
# Path to each bytes value, as field numbers: features, entry, feature, bytes_list; and
# feature_lists, entry, feature_list, feature, bytes_list.
_COUNTED: Mapping[int, Any] = {1: {1: {2: {1: {}}}}, 2: {1: {2: {1: {1: {}}}}}}
_MESSAGES = """
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
message_type { name: "FeatureList"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".Feature" } }
message_type { name: "FeatureLists"
  field { name: "feature_list" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".FeatureLists.FeatureListEntry" }
  nested_type { name: "FeatureListEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".FeatureList" } } }
message_type { name: "SequenceExample"
  field { name: "context" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Features" }
  field { name: "feature_lists" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".FeatureLists" } }
"""

Feature: TypeAlias = list[bytes] | Array


@dataclass(frozen=True, slots=True)
class FeatureList:
    """A feature per step of a sequence."""

    steps: tuple[Feature, ...]


Features: TypeAlias = dict[str, Feature | FeatureList]


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
            raise ValueError("a field that is invalid, or reaches too far")
        content = data[at : at + size]
        at += size
        yield key >> 3, content


def _count_fields(data: memoryview, inside: Mapping[int, Any]) -> int:
    count = 0
    for number, content in _message_fields(data):
        count += 1
        if number in inside and isinstance(content, memoryview):
            count += _count_fields(content, inside[number])
        if count > _MOST_FIELDS:
            raise ValueError(f"more than {_MOST_FIELDS:,} fields")
    return count


@functools.cache
def _sequence_example_class() -> Any:
    """Return a message class that parses both SequenceExample and Example.

    The features of an Example have the field number of the context. The class has its own
    descriptor pool, because TensorFlow has these names in the default one.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("SequenceExample"))


def parse_example(data: memoryview, decode: str = "auto") -> Features:
    """Return features by name. Features of a sequence are lists.

    Args:
        data: A record.
        decode: ``"example"`` refuses a SequenceExample, whose lists would be lost.
    """
    from google.protobuf.message import DecodeError

    what = "tf.train.SequenceExample" if decode == "sequence_example" else "tf.train.Example"
    try:
        if data.nbytes > _COUNTED_BYTES:
            _count_fields(data, _COUNTED)
        found = _sequence_example_class().FromString(bytes(data))
    except (ValueError, IndexError, DecodeError) as error:
        raise FormatError(f"expected a {what}: {error}") from None
    context, lists = found.context.feature, found.feature_lists.feature_list
    if len(context) + len(lists) > MOST_FEATURES:
        raise FormatError(
            f"expected a {what} of at most {MOST_FEATURES:,} features", code="GC305"
        )
    if lists and decode == "example":
        raise FormatError(
            f"expected a {what}, found a SequenceExample with the list {min(lists)!r:.40}; "
            "leave decode out, or set decode: sequence_example",
            code="GC303",
        )
    if not context and not lists:
        raise FormatError(
            f"expected a {what}, found no feature; decode: none keeps it", code="GC303"
        )
    return _named_features(context, lists)


def _named_features(context: Any, lists: Any) -> Features:
    both = [name for name in lists if name in context]
    if both:
        raise FormatError(
            f"{min(both)!r:.40} names a feature of the context and a list of features; decode: "
            '"package.module:function" can give them two names',
            code="GC303",
        )
    found: Features = {name: _feature_values(context[name]) for name in context}
    for name in lists:
        found[name] = FeatureList(tuple(map(_feature_values, lists[name].feature)))
    return {name: found[name] for name in sorted(found)}


def _feature_values(feature: Any) -> Feature:
    match feature.WhichOneof("kind"):
        case "float_list":
            return np.array(feature.float_list.value, "<f4")
        case "int64_list":
            return np.array(feature.int64_list.value, "<i8")
        case _:
            return list(feature.bytes_list.value)
