"""Small files of one JSON object that know whether they are what was written."""

from __future__ import annotations

from typing import Any

import google_crc32c
import orjson

CHECKSUM = "crc32c"


def guarded(values: dict[str, Any]) -> bytes:
    """Return the bytes of a file that holds these values, and their checksum."""
    sealed = {CHECKSUM: _checksum(values), **values}
    return orjson.dumps(sealed, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


def unguarded(data: bytes) -> dict[str, Any]:
    """Return the values of `guarded`.

    Raises:
        ValueError: the bytes are others.

    >>> unguarded(guarded({"issued": 7}))
    {'issued': 7}
    """
    values = orjson.loads(data)
    if not isinstance(values, dict):
        raise ValueError("expected a JSON object")
    if values.pop(CHECKSUM, None) != _checksum(values):
        raise ValueError("its checksum is wrong")
    return values


def _checksum(values: dict[str, Any]) -> str:
    return f"{google_crc32c.value(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)):08x}"
