"""tf.train.Example: its features, out of protobuf's bytes, without protobuf or TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.named import names_and_more
from growcache.schema import Array, Sample, Value

MOST_FEATURES = 10_000
_BYTES, _FLOATS, _INTS = 1, 2, 3  # tags of Feature's alternatives
_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip

Feature = list[bytes] | Array


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the integer at a position, and the position behind it."""
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise ValueError("an integer of more than ten bytes")


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield number and content of the fields of a message."""
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


def parse_example(data: memoryview) -> dict[str, Feature]:
    """Return the features of a serialized tf.train.Example.

    Raises:
        FormatError: it is none.
    """
    found: dict[str, Feature] = {}
    try:
        for number, features in _fields(data):
            if number == 1 and isinstance(features, memoryview):
                for tag, entry in _fields(features):
                    if tag == 1 and isinstance(entry, memoryview):
                        name, feature = _entry(entry)
                        found[name] = feature
                        if len(found) > MOST_FEATURES:
                            raise ValueError(f"more than {MOST_FEATURES:,} features")
    except (ValueError, IndexError, OverflowError) as error:
        raise FormatError(f"expected a tf.train.Example: {error}") from None
    if not found:
        raise FormatError(
            "expected a tf.train.Example, found no feature; decode: none keeps it"
        )
    return found


def _entry(entry: memoryview) -> tuple[str, Feature]:
    name, feature = "", memoryview(b"")
    for number, content in _fields(entry):
        if isinstance(content, memoryview):
            if number == 1:
                name = bytes(content).decode()
            elif number == 2:
                feature = content
    found: Feature = []
    for kind, values in _fields(feature):
        if isinstance(values, memoryview):
            found = _values(kind, values)
    return name, found


def _values(kind: int, data: memoryview) -> Feature:
    items = [content for number, content in _fields(data) if number == 1]
    if kind == _BYTES:
        return [bytes(item) for item in items if isinstance(item, memoryview)]
    if kind == _FLOATS:
        packed = b"".join(item for item in items if isinstance(item, memoryview))
        return np.frombuffer(packed, "<f4")
    if kind != _INTS:
        raise ValueError(f"a feature of kind {kind}")
    arrays = [
        np.array([item], np.uint64).view(np.int64) if isinstance(item, int) else varints(item)
        for item in items
    ]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def varints(data: memoryview) -> Array:
    """Return packed integers.

    >>> varints(memoryview(bytes([5, 0xAC, 2]))).tolist()
    [5, 300]
    """
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise ValueError("an integer that is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("an integer of more than ten bytes")
    places = np.arange(len(raw)) - np.repeat(starts, lengths)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a feature shall become.

    Attributes:
        name: of the feature and the field.
        dtype: of NumPy, ``bytes`` or ``str``; None: as found.
        shape: with at most one None; None: as found.
    """

    name: str
    dtype: str | None = None
    shape: tuple[int | None, ...] | None = None

    def of(self, features: Mapping[str, Feature]) -> Value:
        """Return the value of the feature.

        Raises:
            FormatError: there is none, or it is something else.
        """
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
            return as_found(feature)
        if self.dtype in ("bytes", "str"):
            data = _single(feature)
            return data if self.dtype == "bytes" else data.decode()
        wanted = np.dtype(self.dtype).newbyteorder("<")
        if isinstance(feature, list):
            values = np.frombuffer(_single(feature), wanted)
        else:
            values = _cast(feature, wanted)
        if self.shape is None:
            return values[0] if len(values) == 1 else values
        return values.reshape([-1 if size is None else size for size in self.shape])


def _single(feature: Feature) -> bytes:
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


def as_found(feature: Feature) -> Value:
    """Return a feature as a value: one as itself, any other number of them as an array."""
    if isinstance(feature, list):
        return _single(feature)
    return feature[0:1].reshape(()) if len(feature) == 1 else feature


def to_sample(features: Mapping[str, Feature], wishes: Sequence[Wish] | None) -> Sample:
    """Return the sample that features are.

    Raises:
        FormatError: one is not what it should be.
    """
    if wishes is None:
        wishes = [Wish(name) for name in features]
    return {wish.name: wish.of(features) for wish in wishes}


def wished(value: object) -> tuple[Wish, ...] | None:
    """Return the features that the option ``features`` names; None: all that there are.

    Raises:
        ConfigError: it cannot be meant.
    """
    named = names_and_more("features", value, "{x: [float32, 64, 64], y: int64}")
    return None if named is None else tuple(_wish(name, what) for name, what in named.items())


def _wish(name: str, what: Any) -> Wish:
    where = f"source.options.features.{name}"
    if what is None:
        return Wish(name)
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
    return Wish(name, str(dtype), tuple(sizes) if listed else None)
