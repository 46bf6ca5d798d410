"""Scales of stored numbers: CF conventions, as in xarray, and NWB's conversion."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import choice_option
from growcache.formats.grids import Box
from growcache.schema import Array

FILL_NAMES = ("missing_value", "_FillValue")
CF_NAMES = ("scale_factor", "add_offset", *FILL_NAMES, "_Unsigned")
NWB_NAMES = ("conversion", "offset", "unit")
SCALE_NAMES = (*CF_NAMES, *NWB_NAMES)
CHANNEL_CONVERSION = "channel_conversion"  # array next to NWB's data, with a factor per channel
CHANNEL_AXIS = 1
MOST_ATTRIBUTE_VALUES = 64  # an attribute with more values is not read


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    dtype: np.dtype[Any]  # of the decoded values
    stored_as: np.dtype[Any]  # signed or unsigned, regardless of the array's dtype
    fills: tuple[Any, ...] = ()  # stored values that become NaN
    factor: Any = None
    offset: Any = None
    channel_factors: Array | None = None  # along `CHANNEL_AXIS`
    computed_as: np.dtype[Any] | None = None  # None: dtype

    def apply(self, values: Array, box: Box) -> Array:
        """Return the decoded values of a box."""
        found = values
        if self.stored_as.kind != values.dtype.kind:
            found = found.astype(self.stored_as)
        found = np.array(found, dtype=self.computed_as or self.dtype)
        if self.fills:
            masked = np.zeros(found.shape, np.bool_)
            for fill in self.fills:
                masked |= found == fill
            found[masked] = np.nan
        if self.factor is not None:
            found *= self.factor
        if self.channel_factors is not None:
            of_box = self.channel_factors[list(box[CHANNEL_AXIS])]
            found *= of_box.reshape(-1, *[1] * (found.ndim - CHANNEL_AXIS - 1))
        if self.offset is not None:
            found += self.offset
        return found.astype(self.dtype, copy=False)


def scale_option(options: Mapping[str, Any]) -> str | None:
    """Return the option scale, or None if it is not set."""
    if options.get("scale") is None:
        return None
    return choice_option(options, "scale", ("cf", "none"), "none")


def array_scale(
    dtype: np.dtype[Any],
    attributes: Mapping[str, Any],
    channel_factors: Array | None = None,
) -> Scale | None:
    """Return an array's scale, or None if its values need no decoding."""
    if dtype.kind not in "iuf":
        return None
    if has_nwb_conversion(attributes):
        return _nwb_scale(dtype, attributes, channel_factors)
    return _cf_scale(dtype, attributes)


def has_nwb_conversion(attributes: Mapping[str, Any]) -> bool:
    is_cf = "scale_factor" in attributes or "add_offset" in attributes
    return not is_cf and "conversion" in attributes and "unit" in attributes


def scale_advice(what: str, dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> str:
    """Return advice if ``scale: cf`` would change the values, or else "".

    >>> scale_advice("t2m", np.dtype("<i2"), {"scale_factor": 0.01, "units": "K"})
    't2m has scale_factor 0.01: set scale: cf in source.options for the physical values (float64), or scale: none for the stored ones (int16)'
    """
    try:
        scale = array_scale(dtype, attributes)
    except FormatError:
        return ""
    if scale is None or _changes_nothing(scale, dtype):
        return ""
    names = NWB_NAMES[:2] if has_nwb_conversion(attributes) else CF_NAMES
    shown = [f"{name} {_shown(attributes[name])}" for name in names if name in attributes]
    return (
        f"{what} has {', '.join(shown)}: set scale: cf in source.options for the physical "
        f"values ({scale.dtype.name}), or scale: none for the stored ones ({dtype.name})"
    )


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else ", ".join(map(str, _values(value)))
    return text[:40]


def _changes_nothing(scale: Scale, dtype: np.dtype[Any]) -> bool:
    if scale.fills or scale.stored_as.kind != dtype.kind:
        return False
    return (scale.factor is None or float(scale.factor) == 1) and not scale.offset


def _nwb_scale(
    dtype: np.dtype[Any], attributes: Mapping[str, Any], channel_factors: Array | None
) -> Scale:
    """Return NWB's scale.

    Numbers of up to 16 bits become float32, which represents them all. Sums are in float64.
    """
    small = dtype.itemsize <= (4 if dtype.kind == "f" else 2)
    return Scale(
        np.dtype(np.float32 if small else np.float64),
        dtype,
        (),
        float(_number("conversion", attributes)),
        float(_number("offset", attributes)) if "offset" in attributes else None,
        channel_factors,
        np.dtype(np.float64),
    )


def _cf_scale(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> Scale | None:
    """Return the scale by the rules of xarray's CFMaskCoder and CFScaleOffsetCoder."""
    stored_as = _signedness(dtype, attributes.get("_Unsigned"))
    is_packed = "scale_factor" in attributes or "add_offset" in attributes
    fills = _fills(attributes, dtype, stored_as)
    if not is_packed and not fills:
        return None if stored_as.kind == dtype.kind else Scale(stored_as, stored_as)
    if not is_packed:
        return Scale(_promoted(stored_as), stored_as, fills)
    factor, offset = (
        _number(name, attributes) if name in attributes else None
        for name in ("scale_factor", "add_offset")
    )
    found = _packed_dtype(stored_as, factor, offset)
    if fills and found.kind != "f":
        found = np.dtype(np.float64)
    if not fills and dtype.kind == "f" and any(name in attributes for name in FILL_NAMES):
        found = dtype.newbyteorder("=")  # the fill value is already NaN
    return Scale(found, stored_as, fills, factor, offset)


def _signedness(dtype: np.dtype[Any], unsigned: Any) -> np.dtype[Any]:
    said = bytes(unsigned).decode("latin-1") if isinstance(unsigned, bytes) else unsigned
    if dtype.kind == "i" and said == "true":
        return np.dtype(f"u{dtype.itemsize}")
    if dtype.kind == "u" and said == "false":
        return np.dtype(f"i{dtype.itemsize}")
    return dtype


def _fills(
    attributes: Mapping[str, Any], dtype: np.dtype[Any], stored_as: np.dtype[Any]
) -> tuple[Any, ...]:
    found: list[Any] = []
    for name in FILL_NAMES:
        values = _values(attributes.get(name))
        numbers = [one for one in values if isinstance(one, np.number) and one == one]
        if name == "_FillValue" and stored_as.kind != dtype.kind:
            numbers = [_of_other_sign(one, stored_as) for one in numbers]
        found += [one for one in numbers if one not in found]
    return tuple(found)


def _of_other_sign(fill: Any, stored_as: np.dtype[Any]) -> Any:
    bits = int(fill) & ((1 << 8 * stored_as.itemsize) - 1)
    stored = bits.to_bytes(stored_as.itemsize, "little")
    found = np.frombuffer(stored, stored_as.newbyteorder("<"))[0]
    return int(found) if stored_as.kind == "u" else found  # compared like this in xarray


def _promoted(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind == "f":
        return dtype.newbyteorder("=")
    return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)


def _packed_dtype(dtype: np.dtype[Any], factor: Any, offset: Any) -> np.dtype[Any]:
    if factor is not None and offset is not None:
        kind = np.dtype(type(factor))
        if kind == np.dtype(type(offset)) and kind in (np.float32, np.float64):
            is_wide = dtype.kind in "iu" and dtype.itemsize == 4
            return np.dtype(np.float64) if is_wide else kind
    if offset is not None:
        return np.dtype(np.float64)
    kind = np.dtype(type(factor))
    return kind if kind.kind == "f" else np.result_type(kind, dtype)


def _number(name: str, attributes: Mapping[str, Any]) -> Any:
    values = _values(attributes[name])
    if len(values) != 1 or not isinstance(values[0], np.number):
        raise FormatError(
            f"expected one number as attribute {name}, found {str(attributes[name])[:40]!r}; set "
            "scale: none in source.options for the values as they are stored",
            code="GC303",
        )
    plain = type(attributes[name]) in (int, float)  # NumPy computes with these differently
    return attributes[name] if plain else values[0]


def _values(value: Any) -> Sequence[Any]:
    return () if value is None else list(np.ravel(np.asarray(value)))


def zarr_attributes(
    attributes: Any, dtype: np.dtype[Any], version: int, fill: Any
) -> dict[str, Any]:
    """Return the attributes of a Zarr array as xarray reads them.

    In version 2 the array's own fill value is that of CF. In version 3 it is base64 for floats.
    """
    given = attributes if isinstance(attributes, Mapping) else {}
    found = {name: given[name] for name in SCALE_NAMES if name in given}
    if version == 2:
        found.pop("_FillValue", None)
        return found if fill is None else {**found, "_FillValue": fill}
    if isinstance(text := found.get("_FillValue"), str) and dtype.kind == "f":
        try:
            (found["_FillValue"],) = struct.unpack("<d", base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError, struct.error):
            raise FormatError(f"expected a fill value in base64, found {text[:40]!r}") from None
    return found
