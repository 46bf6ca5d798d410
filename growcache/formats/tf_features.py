"""Turn the features of an Example or a SequenceExample into fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import named_specs_option
from growcache.formats.tf_example import Feature, FeatureList
from growcache.schema import Array, Sample, Value

STEPS_SUFFIX = "_steps"  # of the field with the number of values per step
_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    name: str  # of the feature and the field
    dtype: str | None = None  # NumPy's name, ``bytes`` or ``str``; None: as found
    # At most one None, or (None, None) for a list whose steps differ in length; None: as found.
    shape: tuple[int | None, ...] | None = None

    def fields_in(self, features: Mapping[str, Feature | FeatureList]) -> Sample:
        if self.name not in features:
            known = ", ".join(sorted(features)[:10])
            raise FormatError(f"expected a feature {self.name!r}, found {known}", code="GC303")
        feature = features[self.name]
        try:
            if isinstance(feature, FeatureList):
                return self._list_fields(feature.steps)
            return {self.name: self._value(feature)}
        except (ValueError, OverflowError) as error:
            raise FormatError(f"feature {self.name!r}: {error}") from None

    def _value(self, feature: Feature) -> Value:
        if self.dtype is None:
            return _value_of_feature(feature)
        if self.dtype in ("bytes", "str"):
            data = _single_bytes(feature)
            return data if self.dtype == "bytes" else data.decode()
        if self._uneven:
            raise ValueError("is not a list of features, so at most one size may be null")
        values = _numbers(feature, np.dtype(self.dtype).newbyteorder("<"))
        if self.shape is None:
            return values[0] if len(values) == 1 else values
        return self._shaped(values, self.shape)

    @property
    def _uneven(self) -> bool:
        return self.shape is not None and self.shape.count(None) > 1

    def _list_fields(self, steps: Sequence[Feature]) -> Sample:
        if self.dtype == "str":
            texts = [_single_bytes(step).decode() for step in steps]
            return {self.name: orjson.dumps(texts).decode()}
        values = [self._step_values(step) for step in _of_one_kind(steps, self.dtype)]
        lengths = np.array([len(step) for step in values], "<i8")
        flat = np.concatenate(values) if values else np.empty(0, self._item_dtype())
        even = len(set(lengths.tolist())) <= 1
        if self.shape is not None and not self._uneven:
            return {self.name: self._shaped_steps(flat, lengths, self.shape)}
        if self._uneven or not even or self._keeps_bytes(steps):
            return {self.name: flat, self.name + STEPS_SUFFIX: lengths}
        size = int(lengths[0]) if len(lengths) else 1
        return {self.name: flat if size == 1 else flat.reshape(len(lengths), size)}

    def _keeps_bytes(self, steps: Sequence[Feature]) -> bool:
        # Encoded images of one sample may have equal lengths by chance.
        if self.dtype is None:
            return any(isinstance(step, list) for step in steps)
        return self.dtype == "bytes"

    def _item_dtype(self) -> np.dtype[Any]:
        return np.dtype("|u1" if self.dtype == "bytes" else self.dtype).newbyteorder("<")

    def _step_values(self, step: Feature) -> Array:
        if self.dtype == "bytes":
            return np.frombuffer(_single_bytes(step), np.uint8)
        if self.dtype is not None:
            return _numbers(step, self._item_dtype())
        return np.frombuffer(_single_bytes(step), np.uint8) if isinstance(step, list) else step

    def _shaped_steps(
        self, flat: Array, lengths: Array, shape: tuple[int | None, ...]
    ) -> Array:
        if len(set(lengths.tolist())) > 1:
            raise ValueError(
                f"expected steps of one length, found {lengths.min()} to {lengths.max()} values; "
                f"[{self.dtype}, null, null] gives all of them and their lengths"
            )
        found = self._shaped(flat, shape)
        if len(found) != len(lengths):
            raise ValueError(f"expected {list(shape)}, found {len(lengths)} steps")
        return found

    def _shaped(self, values: Array, shape: tuple[int | None, ...]) -> Array:
        return values.reshape([-1 if size is None else size for size in shape])


def _of_one_kind(steps: Sequence[Feature], dtype: str | None) -> list[Feature]:
    """Give steps without values the kind of the others, because the file has none for them."""
    kinds = {_kind(step) for step in steps if len(step)}
    if len(kinds) > 1:
        raise ValueError(f"expected steps of one kind, found {' and '.join(sorted(kinds))}")
    if not kinds and dtype is None:
        raise ValueError("is a list without values; say its dtype in source.options.features")
    if kinds == {"bytes"} or dtype == "bytes":
        return list(steps)
    nothing = next((step for step in steps if len(step)), np.empty(0, dtype))[:0]
    return [step if len(step) else nothing for step in steps]


def _kind(feature: Feature) -> str:
    return "bytes" if isinstance(feature, list) else feature.dtype.name


def _single_bytes(feature: Feature) -> bytes:
    if not isinstance(feature, list):
        raise ValueError("expected bytes, found numbers")
    if len(feature) != 1:
        raise ValueError(f"expected one value of bytes, found {len(feature)}")
    return feature[0]


def _numbers(feature: Feature, wanted: np.dtype[Any]) -> Array:
    if isinstance(feature, list):
        return np.frombuffer(_single_bytes(feature), wanted)
    return _cast(feature, wanted)


def _cast(values: Array, wanted: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.astype(wanted)
    if wanted.kind in "iub" and not np.array_equal(found, values):
        raise ValueError(f"expected {wanted.name}, found other numbers")
    return found


def _value_of_feature(feature: Feature) -> Value:
    if isinstance(feature, list):
        return _single_bytes(feature)
    return feature[0:1].reshape(()) if len(feature) == 1 else feature


def sample_of_features(
    features: Mapping[str, Feature | FeatureList], wishes: Sequence[FeatureSpec] | None
) -> Sample:
    sample: Sample = {}
    for wish in [FeatureSpec(name) for name in features] if wishes is None else wishes:
        fields = wish.fields_in(features)
        if taken := fields.keys() & sample.keys():
            raise FormatError(
                f"two fields would be named {min(taken)!r}; name others in source.options.features",
                code="GC303",
            )
        sample |= fields
    return sample


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
    one_null = sizes.count(None) <= 1 or sizes == [None, None]
    if not fine or not one_null or (sizes and dtype in ("bytes", "str")):
        raise ConfigError(
            f"{where}: expected a dtype and sizes, at most one of them null, such as "
            f"[float32, null, 64], or [float32, null, null] of lists of any lengths, found {what!r}"
        )
    listed = isinstance(what, list | tuple) and len(what) > 1
    return FeatureSpec(name, str(dtype), tuple(sizes) if listed else None)
