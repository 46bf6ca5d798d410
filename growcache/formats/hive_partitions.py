"""Columns in the key of an object, as in ``year=2024/region=eu/part-0.parquet``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.schema import Value

_NULL = "__HIVE_DEFAULT_PARTITION__"  # null, as Hive and Spark write it
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DTYPES = (
    "str", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float32", "float64",
)  # fmt: skip

Partitions = Mapping[str, Value | None]
"""A value per column; None is null."""


class PartitionOption:
    """Whether keys have columns, and their dtypes.

    Args:
        used: Whether keys have columns.
        dtypes: Dtypes by column. Other columns are int64 if the value is an integer, and text
            otherwise.
        kept: Columns that samples have; None keeps all.
    """

    def __init__(
        self, used: bool, dtypes: Mapping[str, str], kept: Collection[str] | None = None
    ) -> None:
        self._used = used
        self._dtypes = dtypes
        self._kept = kept

    def only(self, names: Collection[str]) -> PartitionOption:
        return PartitionOption(self._used, self._dtypes, names)

    def values_of(self, key: str) -> Partitions:
        if not self._used:
            return {}
        folders = key.split("/")[:-1]
        pairs = [folder.partition("=") for folder in folders]
        found = {
            unquote(name): self._value(unquote(name), unquote(text))
            for name, equals, text in pairs
            if name and equals and (self._kept is None or unquote(name) in self._kept)
        }
        for name in self._dtypes:
            if name not in found and (self._kept is None or name in self._kept):
                raise FormatError(
                    f"expected a folder {name}=VALUE in the key, as source.options.partitions says",
                    code="GC303",
                )
        return found

    def _value(self, name: str, text: str) -> Value | None:
        dtype = self._dtypes.get(name)
        if text == _NULL:
            return np.array(np.nan, dtype) if dtype in ("float32", "float64") else None
        if dtype is None:
            return np.array(int(text), np.int64) if _INTEGER.fullmatch(text) else text
        return text if dtype == "str" else _number(name, text, dtype)


def _number(name: str, text: str, dtype: str) -> Value:
    try:
        if dtype == "bool":
            return np.array({"true": True, "false": False}[text.lower()])
        return np.array(float(text) if dtype[0] == "f" else int(text), dtype)
    except (ValueError, KeyError, OverflowError):
        raise FormatError(
            f"its key has {name}={text:.40}, which is not {dtype}; see "
            "source.options.partitions",
            code="GC303",
        ) from None


def partitions_option(options: Mapping[str, Any]) -> PartitionOption:
    value = options.get("partitions", True)
    if isinstance(value, bool):
        return PartitionOption(value, {})
    if isinstance(value, Mapping) and all(
        isinstance(name, str) and dtype in _DTYPES for name, dtype in value.items()
    ):
        return PartitionOption(True, dict(value))
    raise ConfigError(
        "source.options.partitions: expected true, false or a mapping such as "
        f"{{region: str, year: int32}}, found {value!r}"
    )
